# Both need Python 3.11 or newer with pip; everything else goes into .venv here.
PYTHON ?= python3
BIN := .venv/bin
NATIVE := $(wildcard src/headrace/ops/native/csrc/*)  # compiled when the package is installed

.PHONY: demo test test-slow test-gpu check clean

demo: .venv/runtime  ## install, fetch the default model, answer a question
	$(BIN)/headrace run "Explain in three sentences why the sky is blue." --temperature 0.2 --top-p 0.9 --seed 1 --max-tokens 120

test: .venv/tests check  ## the linters and every fast test
	$(BIN)/pytest

test-slow: .venv/tests  ## what takes longer: the real model against its oracle, long random schedules
	$(BIN)/pytest -m slow

test-gpu: .venv/tests  ## Triton kernels and the engine on a GPU; without one, in Triton's interpreter
	$(BIN)/pytest tests/gpu -m "slow or not slow"

check: .venv/tests
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Headrace needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.12 demo" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

.venv/runtime: pyproject.toml setup.py $(NATIVE) | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/tests: pyproject.toml setup.py $(NATIVE) | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@ .venv/runtime

clean:
	rm -rf .venv build dist src/*.egg-info
