# The commands of this repository. A new machine needs Python >= 3.11, make and git: each target creates
# the virtual environment it needs, at the versions of constraints.txt.
#
#   make demo ARGS="--nodes 6"        make test ARGS="tests/unit -k barrier"        make PYTHON=python3.13 test

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FRAMEWORKS := $(VENV)/.frameworks
DEPLOY := $(VENV)/.deploy
SITE := $(VENV)/.site
BROWSER := $(VENV)/.browser
CHECKS := $(VENV)/.checks
# What CI installs: all that the targets below would, found and built once.
ALL := $(VENV)/.all
EVERYTHING := torch,dev,frameworks,deploy,docs,browser
TESTED := torch,test
# pip, with the time to go on a terminal. Python compiles what is imported, a fraction of the files of which pip takes half
# a minute of processor time.
INSTALL := $(BIN)/python -m tools.install --no-compile
ARGS ?=

# The oldest supported version first: constraints.txt was resolved with it.
PYTHON ?=
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3.11 python3.12 python3.13 python3)

# Six workers, three on a single core. Two of three take the tests of whole swarms and of processes first, which mostly
# wait, and the third what computes (tests/harness/runner/forked_workers.py): with five that all began with what waits,
# the long run used 871 s of processor time in 526 s on two cores. The tests of whole swarms share one worker because
# they measure seconds, and two at once would measure each other.
PARALLEL ?= --workers $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 2 ? 3 : 6)))

# The processes of the tests would otherwise compile our modules again, hundreds of times.
unexport PYTHONDONTWRITEBYTECODE

# Finds $$python, or explains why it cannot. A name on the path is not enough: version shims exist for Pythons that are
# not installed, and some distributions ship venv without ensurepip.
find_python = python=; \
	for candidate in $(CANDIDATES); do \
	  if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    python=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "p2pnode needs Python 3.11 or newer with the venv module; none of these is one: $(CANDIDATES)." >&2; \
	  echo "Install it (on Debian and Ubuntu: apt-get install python3 python3-venv), or give its path: make PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi

.DEFAULT_GOAL := help
.PHONY: help venv demo test ledger ledger-breaks test-frameworks test-deploy test-browser test-large screenshots check format generated docs bench size pins clean

help: ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 17

# The stamp is written last, so that an interrupted installation is resumed. An environment whose Python is gone (moved
# folder, upgraded system) is created again.
$(STAMP) $(ALL): pyproject.toml constraints.txt $(wildcard training/kernels/kernels.c)
	@$(BIN)/python -c '' 2>/dev/null || { $(find_python); echo "Creating $(VENV) with $$python"; "$$python" -m venv --clear $(VENV); }
	@echo "Installing p2pnode and its pinned packages into $(VENV) (once; PyTorch is large)"
	@$(INSTALL) -c constraints.txt -e ".[$(if $(filter $(ALL),$@),$(EVERYTHING),$(TESTED))]"
	@touch $(STAMP) $(if $(filter $(ALL),$@),$(FRAMEWORKS) $(DEPLOY) $(SITE) $(BROWSER) $(CHECKS) $@)

venv: $(STAMP) ## Create the virtual environment

demo: $(STAMP) ## Train one model on four daemons of this machine; ARGS go to `p2pnode demo`
	@$(BIN)/p2pnode demo $(ARGS)

test: $(STAMP) ## Run the tests; ARGS go to pytest
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

ledger: $(STAMP) ## Run the tests that hold the promises of docs/faults.md, and print which holds which
	@$(BIN)/python -m pytest -p tests.harness.project.ledger $(ARGS)

ledger-breaks: $(STAMP) ## Break each promise of docs/faults.md once, and see its test fail; ARGS are their numbers
	@$(BIN)/python -m tests.harness.project.breaks $(ARGS)

# transformers, accelerate, peft, Lightning, pyarrow and datasets: 270 MB and half a minute of installation, for the tests below.
# Those skip in `make test`, unless this has been run before.
$(FRAMEWORKS): $(STAMP)
	@echo "Installing transformers, peft and Lightning into $(VENV) (once)"
	@$(INSTALL) -c constraints.txt -e ".[frameworks]"
	@touch $@

test-frameworks: $(FRAMEWORKS) ## Run the tests with Hugging Face and Lightning; ARGS go to pytest
	@$(BIN)/python -m pytest tests/unit/p2pnode/integrations tests/unit/training/trainer/test_script_arguments.py \
	  tests/unit/training/engines/mapreduce/test_sources.py tests/unit/training/trainer/sampling/test_hugging_face.py $(ARGS)
	@$(BIN)/python -m pytest -m long tests/process/test_examples.py -k "huggingface or lightning or accelerate" $(ARGS)
	@$(BIN)/python -m pytest -m long tests/process/test_framework_ranks.py $(ARGS)

# Schemas of Kubernetes and of compose files, shellcheck: 120 MB, for the tests below. Those skip in `make test`, unless this
# has been run before.
$(DEPLOY): $(STAMP)
	@$(INSTALL) -c constraints.txt -e ".[deploy]"
	@touch $@

test-deploy: $(DEPLOY) ## Check the files of deploy/ with every tool at hand; ARGS go to pytest
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -rs tests/unit/project/test_deploy.py \
	  tests/unit/project/test_metrics_files.py $(ARGS)

# Ten to twenty minutes for each thousand nodes: not for every change.
test-large: $(STAMP) ## Simulate overlays of 500 and 1,000 nodes, and exchanges of 100 and 150; ARGS go to pytest
	@$(BIN)/python -m pytest -m large $(ARGS)

# playwright drives the Chromium of the system: 50 MB, without a browser of its own.
$(BROWSER): $(STAMP)
	@$(INSTALL) -c constraints.txt -e ".[browser]"
	@touch $@

test-browser: $(BROWSER) ## Look at the dashboard with a real browser (Chromium); ARGS go to pytest
	@$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

screenshots: $(BROWSER) ## Make the pictures of docs/ again: the dashboard of a swarm, and a terminal
	@$(BIN)/python -m tests.browser.screenshots $(ARGS)

# mypy, ruff, import-linter and pip-audit, which no test uses.
$(CHECKS): $(STAMP)
	@$(INSTALL) -c constraints.txt -e ".[dev]"
	@touch $@

check: $(CHECKS) ## Format, lint, types, import rules and known advisories, all as CI has them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.audit

format: $(CHECKS) ## Format the code as `check` requires
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# MkDocs with its theme and what reads docstrings, 30 MB. Tests that build no site check the same links.
$(SITE): $(STAMP)
	@$(INSTALL) -c constraints.txt -e ".[docs]"
	@touch $@

generated: $(STAMP) ## Write what is generated from the code: node.toml, docs/config.md, the HTTP API and the metrics
	$(BIN)/python -m tools.pages

docs: $(SITE) generated ## Generate those files, and build the documentation into build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "open build/site/index.html"

bench: $(CHECKS) ## Measure the figures of docs/figures.md; ARGS go to the benchmarks
	@$(BIN)/python -m benchmarks $(ARGS)

size: $(STAMP) ## Count lines, functions of a step, settings and more; ARGS are up to two revisions to compare
	@$(BIN)/python -m tools.size $(ARGS)

pins: ## Resolve constraints.txt again
	@$(find_python); "$$python" -m venv --clear build/pins
	@grep '^torch==' constraints.txt > build/pins/torch.txt
	build/pins/bin/python -m pip install -qq --disable-pip-version-check -c build/pins/torch.txt -e ".[$(EVERYTHING)]"
	@{ grep '^#' constraints.txt; build/pins/bin/python -m pip freeze --exclude-editable | sed 's/^\(torch==[0-9.]*\)+.*/\1/'; } > build/pins/new.txt
	@mv build/pins/new.txt constraints.txt
	@rm -rf build/pins

# Keeps figures in benchmarks/results and state directories of nodes.
clean: ## Remove everything that these targets created
	rm -rf $(VENV) build dist *.egg-info training/kernels/_compiled* .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
