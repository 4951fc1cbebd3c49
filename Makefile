# make demo    attack a client's update (four photographs, two attacks), then released models (digits); show one page
# make check   the fast part: style, types, import direction, quick tests and those of changed test files
# make test    every check: style, types, import direction, tests with coverage
# make docs    build the documentation in build/docs, with its notebooks executed (minutes)
# make mutants put 300 small faults in, one at a time, and count those that tests notice (about an hour)
# make format  let ruff rewrite the sources
# make clean   remove caches and build products; the environment and runs/ stay
#
# The first call makes a virtual environment in .venv; later calls reuse it until
# pyproject.toml or constraints.txt change. Another Python: make demo PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Folders whose tests are fast, and the test files that differ from the last commit.
FAST_TESTS := cli clients contracts data defenses io metrics models reporting training
FAST = $(wildcard tests/architecture/test_[cmr]*.py) $(addprefix tests/,$(FAST_TESTS)) \
  $(shell git diff --name-only --diff-filter=d HEAD -- 'tests/**/test_*.py' 2>/dev/null)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt

export WANDB_MODE ?= offline
# pip compiles nothing in advance (--no-compile); what gets imported is compiled then, and has to be kept.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo check test docs mutants format clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed '/^$$/q'

# PyTorch goes first and alone: with its version settled, pip does not fetch other builds of it to compare.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] < (3, 13) else \
	  "lit_recon needs Python 3.11 or 3.12, but $(PYTHON) is " + sys.version.split()[0] + ": add PYTHON=python3.11")'
	@printf '== environment in $(VENV): made once, takes a few minutes\n'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $$(grep '^torch==' constraints.txt)
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python attack.py run --config configs/attack/demo_photos.yaml --overwrite true
	$(BIN)/python attack.py run --config configs/attack/demo_photos_matching.yaml --overwrite true
	$(BIN)/python reconn.py run --config configs/reconn/digits_demo.yaml --overwrite true
	$(BIN)/python attack.py report runs/demo_photos runs/demo_photos_matching runs/digits_demo --out runs/demo.html
	@printf '\nReport: $(CURDIR)/runs/demo.html\n'

define check
	@printf '\n== %s\n' '$(1)'
	@$(BIN)/$(1)
endef

define static
	$(call check,ruff check .)
	$(call check,ruff format --check .)
	$(call check,mypy)
	$(call check,lint-imports --no-logo)
endef

check: $(INSTALLED)
	$(static)
	$(call check,pytest --quiet --numprocesses auto --dist loadfile -m "not slow and not processes" $(FAST))

test: $(INSTALLED)
	$(static)
	$(call check,pytest --cov --numprocesses auto --dist loadfile)

# Warnings are errors; every page is built anew, so that none of an earlier build is left.
docs: $(INSTALLED)
	@$(BIN)/python -c 'import furo, myst_nb, sphinx_copybutton' 2>/dev/null || $(PIP_INSTALL) --editable '.[dev,docs]'
	rm -rf build/docs
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --nitpicky --quiet \
	  --doctree-dir build/doctrees --fresh-env docs build/docs
	@printf '\nDocumentation: $(CURDIR)/build/docs/index.html\n'

mutants: $(INSTALLED)
	@$(BIN)/python -c 'import cosmic_ray' 2>/dev/null || $(PIP_INSTALL) --editable '.[dev,mutants]'
	$(BIN)/python -m benchmarks.mutants

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info htmlcov .coverage* .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find lit_recon tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
