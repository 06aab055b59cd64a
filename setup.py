"""The one thing that setup.cfg cannot say: the top-level folder kernels/ is installed as lbpar/kernels."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["lbpar", "lbpar.*"]), "lbpar.kernels"],
    package_dir={"lbpar": "lbpar", "lbpar.kernels": "kernels"},
)
