# Everything starts from a bare Python: the targets make .venv and install what they need themselves.
PYTHON ?= python3
# Another supported version of torch has a virtual environment of its own: make test TORCH=2.14.1
PINNED := $(patsubst torch==%,%,$(filter torch==%,$(file < constraints.txt)))
TORCH ?= $(PINNED)
VENV := .venv$(if $(filter-out $(PINNED),$(TORCH)),-torch-$(TORCH))
# PyPI's torch for x86-64 brings gigabytes of CUDA. Without an NVIDIA driver, PyTorch's CPU build is taken instead, from
# this index. TORCH_INDEX=URL names a mirror of it, and an empty TORCH_INDEX= takes torch from where pip takes the rest.
NVIDIA_DRIVER := $(wildcard /proc/driver/nvidia/version /dev/nvidiactl /dev/nvidia0 /dev/dxg)
TORCH_INDEX ?= $(if $(NVIDIA_DRIVER),,https://download.pytorch.org/whl/cpu)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEVELOPED := $(VENV)/.developed
CONSTRAINTS := $(VENV)/constraints.txt

.PHONY: install demo seed test test-one test-long test-fp8 test-gpu test-apiserver crash bench wheel docs lint clean

install: $(INSTALLED)

# torch goes first and pinned: a looser range can pull gigabytes of CUDA packages. --no-deps: its index has few others.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(CONSTRAINTS)
	@echo "installing torch $(TORCH), then about 60 packages, into $(VENV): 1.5 GB with torch for CPU; pip prints nothing"
	@if [ -z "$(TORCH_INDEX)" ] || ! $(BIN)/pip install --quiet --retries 1 --timeout 20 --no-deps \
	  --index-url "$(TORCH_INDEX)" torch==$(TORCH) 2> $(VENV)/torch-index.log; then \
	  [ -z "$(TORCH_INDEX)" ] || echo "make: $(TORCH_INDEX) did not serve torch $(TORCH) (see $(VENV)/torch-index.log):" \
	    "taking it from pip's default index, which may bring gigabytes of CUDA. Set TORCH_INDEX=URL to a mirror." >&2; \
	  $(BIN)/pip install --quiet --constraint $(CONSTRAINTS) torch==$(TORCH); \
	fi
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable ".[lora]"
	@touch $@

# What tests, linters and benchmarks need beside.
$(DEVELOPED): $(INSTALLED)
	@echo "installing about 90 packages for tests, linters and benchmarks into $(VENV): 0.7 GB; pip prints nothing"
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable ".[dev,deepspeed]"
	@touch $@

demo: $(INSTALLED)
	$(BIN)/aliquot train examples/quickstart.yaml

# A file of tests stays with one of the two workers, and so do the runs that its tests share.
# SEED=random or SEED=NUMBER: files in random order, to find a test that depends on another file.
test: $(DEVELOPED)
	FILE_ORDER=$(SEED) $(BIN)/python -m pytest -m "not long" -n 2 --dist loadfile --no-loadscope-reorder

# A file, a folder or a test, its long ones left out: make test-one FILE=tests/optim
FILE ?= tests
test-one: $(DEVELOPED)
	$(BIN)/python -m pytest -m "not long" $(FILE)

# All that `make test` leaves out, and more examples of what is random; says at its end how long it took.
test-long: $(DEVELOPED)
	$(BIN)/python -m pytest -m "(long or hypothesis) and not apiserver" --hypothesis-profile=full --durations=20
	$(MAKE) test-fp8

# Products in fp8, emulated. torchao is no part of the environment: transformers would import it in every process.
test-fp8: $(DEVELOPED)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --no-deps --upgrade --target $(VENV)/fp8 torchao
	PYTHONPATH=$(VENV)/fp8 $(BIN)/python -m pytest tests/engines/test_fp8_layers.py -rP

# On a machine with a GPU: the curves of the CPU lie in tests/gpu/cpu_curves.json, so that the GPU waits for none.
test-gpu: $(DEVELOPED)
	$(BIN)/python -m pytest tests/gpu -m "not long and not alone" -vv -n 12 --dist loadgroup
	$(BIN)/python -m pytest tests/gpu -m alone -vv

# Everything rendered, against a real Kubernetes API server on loopback; skipped where no tool starts one.
test-apiserver: $(DEVELOPED)
	$(BIN)/python -m pytest -m apiserver

# Kills a real two-rank run that often, at random moments, and checks that nothing is lost.
KILLS ?= 300
crash: $(DEVELOPED)
	$(BIN)/python -m tests.tools.crash --kills $(KILLS)

# A script of HF Trainer and DeepSpeed, then the same job as an aliquot config, on a small model made for them.
seed: $(DEVELOPED)
	$(BIN)/aliquot train examples/quickstart.yaml run.name=seed-model train.max_steps=5 observe.sample_prompt=null
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/torchrun --nproc-per-node 2 examples/seed/train.py \
	  --model runs/seed-model/export --data docs/guides/deepspeed.md --steps 3
	$(BIN)/aliquot train examples/seed/run.yaml model.path=runs/seed-model/export data.path=docs/guides/deepspeed.md \
	  train.max_steps=3 shard.deepspeed_config=examples/seed/cpu-ds.json

# Tables on the console, JSON beside: two hours or three, 20 GB of disk. Peers that are not installed get a row saying so.
# What frugal states do to the loss needs a small model and a text: make bench MODEL=DIRECTORY TEXT=FILE
bench: $(DEVELOPED)
	$(BIN)/python benchmarks/prepare.py --json benchmarks/prepare.json
	$(BIN)/python benchmarks/load.py --json benchmarks/load.json
	$(BIN)/python benchmarks/checkpoint.py --json benchmarks/checkpoint.json
	$(BIN)/python benchmarks/parts.py --json benchmarks/parts.json
	$(BIN)/python benchmarks/wire.py --json benchmarks/wire.json
	$(BIN)/python benchmarks/hosts.py --json benchmarks/hosts.json
	$(BIN)/python benchmarks/memory.py --json benchmarks/memory.json
	$(BIN)/python benchmarks/step.py --json benchmarks/step.json
	$(BIN)/python benchmarks/breakdown.py --json benchmarks/breakdown.json
	$(BIN)/python benchmarks/attention.py --json benchmarks/attention.json
	$(BIN)/python benchmarks/moe.py --json benchmarks/moe.json
	$(BIN)/python benchmarks/lora.py --json benchmarks/lora.json
	$(BIN)/python benchmarks/dpo.py --json benchmarks/dpo.json
ifneq ($(and $(MODEL),$(TEXT)),)
	$(BIN)/python benchmarks/long_run.py --text $(TEXT) --json benchmarks/long_run.json
	$(BIN)/python benchmarks/states.py --model $(MODEL) --text $(TEXT) --json benchmarks/states.json
	$(BIN)/python benchmarks/patches.py --model $(MODEL) --text $(TEXT) --json benchmarks/patches.json
endif
	$(BIN)/aliquot plan --calibrate
	$(BIN)/python benchmarks/foresight.py --json benchmarks/foresight.json

# The wheel, installed into an empty environment, examines the machine and trains.
WHEEL := build/wheel
wheel:
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)/env
	$(WHEEL)/env/bin/pip wheel --quiet --no-deps --wheel-dir $(WHEEL) .
	$(WHEEL)/env/bin/pip install --quiet --constraint constraints.txt --retries 1 --timeout 20 \
	  $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") $(WHEEL)/aliquot-*.whl
	cd $(WHEEL) && env/bin/aliquot init quickstart . && env/bin/aliquot doctor && \
	  env/bin/aliquot plan quickstart.yaml --instance m7i.8xlarge && env/bin/aliquot train quickstart.yaml train.max_steps=3

# build/site/index.html: every page, every link checked.
docs: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site

lint: $(DEVELOPED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.tools.docs_translations

clean:
	rm -rf .venv .venv-torch-* runs build src/*.egg-info
