# Everything starts from a bare Python: the targets make .venv and install what they need themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test test-long test-apiserver crash bench lint clean

install: $(INSTALLED)

# torch goes first and pinned: a looser range can pull gigabytes of CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(INSTALLED)
	$(BIN)/aliquot train examples/quickstart.yaml

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not long"

test-long: $(INSTALLED)
	$(BIN)/python -m pytest -m "long and not apiserver"

# Everything rendered, against a real Kubernetes API server on loopback; skipped where no tool starts one.
test-apiserver: $(INSTALLED)
	$(BIN)/python -m pytest -m apiserver

# Kills a real two-rank run that often, at random moments, and checks that nothing is lost.
KILLS ?= 300
crash: $(INSTALLED)
	$(BIN)/python -m tests.crash --kills $(KILLS)

# Tables on the console, JSON beside: an hour or two, 20 GB of disk. Peers that are not installed get a row saying so.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/load.py --json benchmarks/load.json
	$(BIN)/python benchmarks/checkpoint.py --json benchmarks/checkpoint.json
	$(BIN)/python benchmarks/parts.py --json benchmarks/parts.json
	$(BIN)/python benchmarks/wire.py --json benchmarks/wire.json
	$(BIN)/python benchmarks/memory.py --json benchmarks/memory.json
	$(BIN)/python benchmarks/step.py --json benchmarks/step.json

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build src/*.egg-info
