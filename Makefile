# Every target sets itself up: Python >= 3.10 and make are all that a machine needs.
#   make demo ARGS="--nproc 4"      make test ARGS="-k mask -x"      make test PYTHON=python3.12

PYTHON ?= python3
ARGS   ?=
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Each page of the documentation stands in the docstring of one of these; the others have names that
# users meet. A package brings what it lists of its own.
MODULES := customized_ops annotations annotations.engines annotations.engines.torch \
  annotations.grammar annotations.rules benchmark \
  customized_ops.along_sequence customized_ops.causal_conv1d customized_ops.linear_attention \
  customized_ops.chunk_linear_cross_entropy customized_ops.ring_attention \
  customized_ops.ring_attention.api customized_ops.ring_attention.core \
  customized_ops.ring_attention.api.frameworks \
  customized_ops.ring_attention.api.magi_attention customized_ops.ring_attention.api.ring_flash_attn \
  customized_ops.ring_attention.api.ring_swa customized_ops.ring_attention.api.torch_context_parallel \
  customized_ops.ring_attention.api.transformers customized_ops.ring_attention.api.yunchang \
  customized_ops.ring_attention.core.cost customized_ops.ring_attention.core.kernels \
  customized_ops.ring_attention.core.plan.simulate customized_ops.ring_attention.fuzz \
  customized_ops.ring_attention.core.layout customized_ops.ring_attention.core.mask \
  customized_ops.ring_attention.core.mask.patterns customized_ops.ring_attention.core.plan \
  customized_ops.ring_attention.core.report customized_ops.ring_attention.packed_batches \
  customized_ops.ring_attention.probes customized_ops.ring_attention.rollouts

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint format docs clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'Options go in ARGS, as in: make test ARGS="-k mask -x"'

demo: $(STAMP)  ## train a small Llama on a sequence split over several processes
	@echo "demo: examples/train_llama.py $(ARGS)"
	@$(BIN)/python examples/train_llama.py $(ARGS)

test: $(STAMP)  ## run the tests that need no GPU and little time, a process for each core
	@# Tests start some hundred processes, each of which would compile what is not compiled yet.
	@$(BIN)/python -m compileall -q annotations customized_ops tests examples
	@echo 'test: pytest -m "not gpu and not slow" -n auto --dist worksteal $(ARGS)'
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not gpu and not slow" -n auto --dist worksteal $(ARGS)

lint: $(STAMP)  ## check style, formatting and types
	@echo "lint: ruff check"
	@$(BIN)/ruff check .
	@echo "lint: ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "lint: mypy"
	@$(BIN)/mypy

format: $(STAMP)  ## fix imports and formatting in place
	@echo "format: ruff"
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

docs: $(STAMP)  ## make the pages of the API and its concepts, in build/docs
	@echo "docs: pdoc"
	@PYTHONPATH=examples $(BIN)/python -W 'ignore:Error parsing type annotation' -m pdoc $(ARGS) --output-directory build/docs $(MODULES)
	@$(BIN)/python tests/support/site_links.py build/docs $(MODULES)
	@echo "docs: build/docs/index.html"

clean:  ## remove the environment, builds and caches
	@echo "clean: $(VENV), builds and caches"
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find annotations customized_ops examples tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "setup: '$(PYTHON)' is missing or older than Python 3.10; name another, as in: make test PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "setup: '$(PYTHON)' cannot make virtual environments: its venv or ensurepip module is missing." >&2; \
	  echo "       On Debian and Ubuntu: apt install python3-venv. Or name another: make test PYTHON=python3.12" >&2; \
	  exit 1; }
	@echo "setup: creating $(VENV) with $$($(PYTHON) --version)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@echo "setup: installing seqshard, PyTorch and the test tools (a few minutes the first time)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -e '.[test]' -c constraints.txt
	@# On all cores, where pip would compile file by file; and not the thousands that nothing imports.
	@$(BIN)/python -m compileall -qq -j 0 -x '/site-packages/(pip/|transformers/models/|.*/tests/)' $(VENV)/lib || true
	@touch $@
