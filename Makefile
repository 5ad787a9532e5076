# `make train` and `make test` do everything: virtual environment, pinned packages, then the work itself.

PYTHON ?= python3
VENV   ?= .venv
RECIPE ?= recipes/quickstart.yaml
# Further arguments of the training script, such as ARGS="--set train.steps=100".
ARGS   ?=
# Ranks of each learner; empty: what tools/local_ranks.py finds fitting here.
N      ?=

STAMP = $(VENV)/.installed
BIN   = $(abspath $(VENV))/bin

.PHONY: train test check setup browser clean

train: $(STAMP)
	@line="$$($(BIN)/python tools/local_ranks.py --command $(if $(N),--ranks $(N)) $(RECIPE) 2>/dev/null)" || \
	  exec $(BIN)/python tools/local_ranks.py --command $(RECIPE); \
	set -- $$line $(ARGS); \
	echo "$$@"; PATH="$(BIN):$$PATH" exec "$$@"

test: $(STAMP)
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(STAMP)

# torch comes first so that nothing resolves to another build of it; deepspeed builds its kernels lazily, on use.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "moe_async needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1). Use make PYTHON=python3.12 ..."; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) || { \
	  echo "Could not make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# A Chromium for the tests of pages, which are left out where there is none.
browser:
	@command -v chromium > /dev/null || { \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium > /dev/null; } || { \
	  echo "Could not install Chromium; on Debian, as root: apt-get install chromium"; exit 1; }

clean:
	rm -rf $(VENV) build *.egg-info
