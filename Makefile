# Every target sets itself up: the virtual environment is made when absent and reused when there.
# Needs Python 3.11 or newer (choose one with `make test PYTHON=python3.12`), git and make.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
SEEDS  ?= 33-82

BIN := $(VENV)/bin
# pip would compile every file of torch and the rest; Python compiles the few that are imported, when they are.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:  # two pips must not write to one environment
.PHONY: help demo test test-lowest test-engines cov docs dist bench trust reproduce lint types format clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# One thread a process: the matrices are small, and sums do not depend on the number of cores.
demo test test-lowest test-engines cov docs dist trust reproduce: export OMP_NUM_THREADS := 1
demo test test-lowest test-engines cov docs dist trust reproduce: export OPENBLAS_NUM_THREADS := 1
demo test test-lowest test-engines cov docs dist trust reproduce: export MKL_NUM_THREADS := 1

# An environment that forbids it would compile torch anew in every process: seconds each.
export PYTHONDONTWRITEBYTECODE :=

demo: $(VENV)/.demo  ## Repair a small network on a wages table; print before and after, write demo-report.html
	$(BIN)/python -m esvdfair demo --force

test: $(VENV)/.dev  ## Run all tests
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-lowest: $(VENV)-lowest/.dev  ## Run all tests with the lowest versions that pyproject.toml allows (torch as in constraints.txt)
	$(VENV)-lowest/bin/python -m pytest -n $(JOBS) --dist worksteal --ignore tests/test_docs.py

test-engines: $(VENV)-engines/.dev  ## Repair through PySpark and Ray (needs Java: apt-get install default-jre-headless)
	@for engine in spark ray_data; do \
		$(VENV)-engines/bin/python benchmarks/engines/$$engine.py 2>$(VENV)-engines/$$engine.log \
			|| { tail -n 20 $(VENV)-engines/$$engine.log; exit 1; }; done

cov: $(VENV)/.dev  ## Run all tests; fail when branch coverage of esvdfair.core is under 95 % or of all under 90 %
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --cov --cov-report=
	$(BIN)/coverage report --skip-covered --fail-under=90
	$(BIN)/coverage report --include='*/esvdfair/core/*' --fail-under=95

docs: $(VENV)/.docs  ## Build the documentation site into docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -j $(JOBS) -d docs/_build/doctrees docs docs/_build/html
	@echo "docs/_build/html/index.html"

dist: $(VENV)/.dev  ## Build wheel and sdist into dist/, and try both: the wheel in an empty environment, the sdist's tests
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	.ci/try-dist $(BIN)/python

bench: $(VENV)/.bench  ## Measure speed and growth on a quiet machine (ten minutes or so), renew the tables of benchmarks/performance.md
	$(BIN)/python benchmarks/scale.py

trust: $(VENV)/.dev  ## Try to break the package (some five minutes of one core), write the tables of benchmarks/reliability.md
	$(BIN)/python benchmarks/reliability.py

reproduce: $(VENV)/.dev  ## Run the paper's experiments for the seeds SEEDS (hours), write tables and figures into results/
	$(BIN)/python -m reproduction all --seeds $(SEEDS) --jobs $(JOBS) --out results

lint: $(VENV)/.dev  ## Check style and formatting (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## Check types (mypy, strict)
	$(BIN)/mypy

format: $(VENV)/.dev  ## Rewrite the source in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the virtual environment and all caches
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-engines dist docs/_build docs/gallery docs/reference .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `.demo`, `.bench`, `.docs` and `.dev` are stamps in the environment: which part of the package's extras it holds.
$(VENV)/.demo: pyproject.toml constraints.txt $(BIN)/python
	@echo "Installing esvdfair[data] into $(VENV)"
	@$(PIP) -e '.[data]'
	@touch $@

$(VENV)/.bench: pyproject.toml constraints.txt $(BIN)/python
	@echo "Installing esvdfair[torch,onnx] into $(VENV); the first time takes a few minutes"
	@$(PIP) -e '.[torch,onnx]'
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt $(BIN)/python
	@echo "Installing esvdfair[docs] into $(VENV); the first time takes a few minutes"
	@$(PIP) -e '.[docs]'
	@touch $(VENV)/.demo $@

$(VENV)/.dev: pyproject.toml constraints.txt $(BIN)/python
	@echo "Installing esvdfair[dev] into $(VENV); the first time takes a few minutes"
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.demo $(VENV)/.bench $@

# Pytest 9 and pyparsing 3.3 warn of what scikit-learn 1.7 and matplotlib 3.10 do, and a warning is an error.
$(VENV)-lowest/.dev: pyproject.toml constraints.txt .ci/lowest.py
	@$(MAKE) --no-print-directory VENV=$(VENV)-lowest $(VENV)-lowest/bin/python
	@echo "Installing the lowest versions into $(VENV)-lowest; the first time takes a few minutes"
	@$(VENV)-lowest/bin/python .ci/lowest.py --except torch >$(VENV)-lowest/lowest.txt
	@$(VENV)-lowest/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt \
		-c $(VENV)-lowest/lowest.txt -e '.[all]' 'pytest<9' 'pyparsing<3.3' pytest-xdist pyyaml hypothesis onnxscript pooch skl2onnx \
		catboost complexipy lightgbm numpydoc xgboost-cpu
	@touch $@

$(VENV)-engines/.dev: pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory VENV=$(VENV)-engines $(VENV)-engines/bin/python
	@echo "Installing PySpark and Ray into $(VENV)-engines; the first time takes a few minutes"
	@$(VENV)-engines/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt \
		-e '.[data]' pyspark 'ray[data]'
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
		echo "There is no '$(PYTHON)'. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$$($(PYTHON) --version) is too old: esvdfair needs 3.11 or newer. Name one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }
