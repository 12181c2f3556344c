# Two commands do everything, each with its own set-up: `make audit` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# The first fits a small machine; tiny double-backward graphs run slower on more threads.
export OMP_NUM_THREADS ?= 1

.PHONY: audit test test-quick check style setup format clean

audit: setup  ## Attack bundled photos, bare and through four defenses, and write a report page
	OMP_NUM_THREADS=2 $(BIN)/gradveil audit

test: setup  ## Run every test
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

test-quick: setup  ## Run the tests that start no engine processes and no browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "not engine and not slow and not browser"

check: style test  ## Format, lint, types, then every test

style: setup  ## Format, lint, types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

setup: $(STAMP)  ## Make the virtual environment if it is missing or out of date

# torch first and by exact version, so that nothing else pulls another build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "gradveil needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev,flower,dp,ui]"
	touch $(STAMP)

format: setup  ## Apply the formatter and the safe fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## Remove the virtual environment and what the tools wrote
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
