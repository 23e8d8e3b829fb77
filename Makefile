# Everything a person does in this repository. A fresh machine needs Python >= 3.11, make and git: each target makes
# the virtual environment it needs, at the versions of constraints.txt.
#
#   make demo ARGS="--nodes 6"        make test ARGS="tests/unit -k barrier"        make PYTHON=python3.13 test

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

# The oldest supported version first: constraints.txt was resolved with it.
PYTHON ?=
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3.11 python3.12 python3.13 python3)

# Tests use every core, four at most. Those of whole swarms share one worker (tests/conftest.py): they measure seconds,
# and two of them at once would measure each other.
PARALLEL ?= -n logical --maxprocesses 4 --dist loadgroup

# Finds $$python, or says why it cannot. A name on the path is not enough: version shims answer for Pythons that are
# not there, and some distributions ship venv without ensurepip.
find_python = python=; \
	for candidate in $(CANDIDATES); do \
	  if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    python=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "p2pnode needs Python 3.11 or newer with the venv module; none of these is one: $(CANDIDATES)." >&2; \
	  echo "Install it (on Debian and Ubuntu: apt-get install python3 python3-venv), or say where it is: make PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi

.DEFAULT_GOAL := help
.PHONY: help venv demo test check format docs bench pins clean

help: ## Show the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

# The stamp comes last, so that an interrupted installation is taken up again. An environment whose Python has gone
# (moved folder, upgraded system) is made anew.
$(STAMP): pyproject.toml constraints.txt $(wildcard training/kernels/kernels.c)
	@$(BIN)/python -c '' 2>/dev/null || { $(find_python); echo "Making $(VENV) with $$python"; "$$python" -m venv --clear $(VENV); }
	@echo "Installing p2pnode and its pinned packages into $(VENV) (once; PyTorch is large)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[torch,dev]"
	@touch $@

venv: $(STAMP) ## Make the virtual environment

demo: $(STAMP) ## Train one model on four daemons of this machine; ARGS go to `p2pnode demo`
	@$(BIN)/p2pnode demo $(ARGS)

test: $(STAMP) ## Run the tests; ARGS go to pytest
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

check: $(STAMP) ## Format, lint, types, import rules and known advisories, all as CI has them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/audit.py

format: $(STAMP) ## Bring the code into the form that check asks for
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## Write node.toml and docs/config.md anew from the settings in the code
	$(BIN)/python -m p2pnode.config.documentation

bench: $(STAMP) ## Measure the figures of docs/figures.md; ARGS go to the benchmarks
	@$(BIN)/python -m benchmarks $(ARGS)

pins: ## Resolve constraints.txt anew
	@$(find_python); "$$python" -m venv --clear build/pins
	@grep '^torch==' constraints.txt > build/pins/torch.txt
	build/pins/bin/python -m pip install -qq --disable-pip-version-check -c build/pins/torch.txt -e ".[torch,dev]"
	@{ grep '^#' constraints.txt; build/pins/bin/python -m pip freeze --exclude-editable | sed 's/^\(torch==[0-9.]*\)+.*/\1/'; } > build/pins/new.txt
	@mv build/pins/new.txt constraints.txt
	@rm -rf build/pins

# Figures in benchmarks/results and nodes' state folders are nobody's rubbish: they stay.
clean: ## Remove everything that these targets made
	rm -rf $(VENV) build dist *.egg-info training/kernels/_compiled* .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
