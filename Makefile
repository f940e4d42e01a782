PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-fast lint clean

demo: .venv/installed  ## The embedded model continues a real source file.
	$(BIN)/qspec demo

test: .venv/installed-test lint  ## Everything that CI runs.
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --durations=10

test-fast: .venv/installed-test  ## Without the tests that take most of the time: under 5 minutes.
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow"

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python >= 3.11 is needed; {sys.executable} is {sys.version.split()[0]}. Say which: make PYTHON=python3.12")'
	@echo "Installing into .venv: a minute or two."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test,train]"
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info
