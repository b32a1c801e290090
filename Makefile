# Two commands matter: `make demo` and `make test`. Each sets up everything it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin

.PHONY: demo test lint bench clean
.DELETE_ON_ERROR:

$(VENV)/.done: pyproject.toml packaging/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c packaging/constraints.txt -e '.[dev]'
	touch $@
