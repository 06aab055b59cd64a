"""The one thing that setup.cfg cannot say: the top-level folders kernels/ and jobs/ are installed as lbpar/kernels and lbpar/jobs."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["lbpar", "lbpar.*"]), "lbpar.kernels", "lbpar.jobs"],
    package_dir={"lbpar": "lbpar", "lbpar.kernels": "kernels", "lbpar.jobs": "jobs"},
)
