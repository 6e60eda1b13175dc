# The two commands a newcomer needs: `make demo` and `make test`. Both set everything up first.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test lint setup clean
demo: setup
	$(BIN)/rlmux run examples/two_pipelines.yaml --policy rollmux --overwrite --out runs/demo

test: setup lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: $(READY)

# torch goes in first and alone: a later requirement that it already satisfies then installs nothing more.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[train,envs,solver,parquet,dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
