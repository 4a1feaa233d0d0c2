# `make serve` and `make test` each do everything on a fresh machine: Python >= 3.11, no GPU, no network but the package index.
PYTHON ?= python3
# Not ?=: some shells export HOST as the name of the machine.
HOST = 127.0.0.1
PORT ?= 8000
MODEL ?= demo
ARGS ?=
TESTS ?=

# On Linux exactly one MLX backend is installed: `make serve BACKEND=cuda` on an NVIDIA machine.
BACKEND ?= $(if $(filter Linux,$(shell uname -s)),cpu,)
comma := ,
EXTRAS := [dev$(if $(BACKEND),$(comma)$(BACKEND))]

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed$(if $(BACKEND),-$(BACKEND))

.PHONY: serve test lint format install clean

serve: install
	$(BIN)/ling-serve --model $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: install
	$(BIN)/python -m pytest $(TESTS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"ling-serve needs Python 3.11 or newer; $(PYTHON) is {sys.version.split()[0]}. Try: make PYTHON=python3.12")'
	@for other in $(filter-out $@,$(wildcard $(VENV)/.installed*)); do \
	  echo "$(VENV) was installed as $$other; MLX's backends overwrite each other's files. Run: make clean"; exit 1; done
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
	  { echo "No virtual environment could be made. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.$(EXTRAS)'
	touch $@

clean:
	rm -rf $(VENV)
