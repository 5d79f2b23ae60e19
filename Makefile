# `make demo` and `make test` need Python 3.11 or later and pip; everything else goes into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
WORKERS ?= 2  # tests at once; each, and each program that it starts, uses one thread

.PHONY: setup demo test check bench docs clean

setup: .venv/made

.venv/made: requirements-dev.txt pyproject.toml $(wildcard hooks/csrc/*)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: setup
	$(BIN)/bitcheck demo --overwrite

test: setup
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python benchmarks/digest.py

docs: setup
	$(BIN)/python docs/build_cli_reference.py

clean:
	rm -rf .venv build dist *.egg-info hooks/_native*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
