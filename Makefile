# A machine with Python 3.11 or newer, pip and make is enough: the first target that needs them
# installs the pinned packages into .venv, and again only after pyproject.toml or the pins change.

PYTHON ?= python3.11
WORKERS ?= 2
MODELS ?=
QUICK ?=
VENV := .venv
READY := $(VENV)/.ready
FRAMEWORKS := build/frameworks
PIP := $(VENV)/bin/python -m pip install --quiet

.PHONY: help demo test models benchmarks-quick check docs clean
.DEFAULT_GOAL := help

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 20

demo: $(READY) ## Plan a small GPT for two devices and train it on two local processes
	$(VENV)/bin/shardwright run examples/bytes_gpt.py:job --devices 2

# One file stays on one worker: module fixtures are built once, and each worker starts one group of
# ranks at a time. Files go in order, so that the last ones are the many short ones of tests/unit.
# Compiled files are there for its hundreds of processes, also where the environment writes none.
test: $(READY) $(FRAMEWORKS)/.ready ## Run the whole test suite
	$(VENV)/bin/python -m compileall -q shardwright tests benchmarks scripts
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 20

models: $(READY) ## Capture, plan and verify every model, and write docs/models.md
	$(VENV)/bin/python scripts/coverage_models.py $(MODELS)

benchmarks-quick: $(READY) ## Run a small version of each comparison with other ways to train
	$(VENV)/bin/python -m benchmarks.quick $(QUICK)

check: $(READY) ## Format, lint, types, layers, examples in docstrings
	scripts/check

docs: $(READY) ## Build the documentation site into build/site, strictly
	$(VENV)/bin/python -m mkdocs build --quiet

clean: ## Remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# All but torch is installed by hash. torch goes by its exact pin: its builds for other hardware have other hashes, and a
# looser request may find one of them.
$(READY): pyproject.toml constraints.txt requirements.lock
	@set -e; \
	say() { echo "make: $$*" >&2; }; \
	new_enough() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }; \
	if new_enough "$(PYTHON)"; then python="$(PYTHON)"; \
	elif new_enough python3; then python=python3; \
	else say "neither $(PYTHON) nor python3 is Python 3.11 or newer; use make PYTHON=/path/to/python"; exit 1; fi; \
	if ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1; then \
		if "$$python" -c 'import ensurepip' 2>/dev/null; then \
			"$$python" -m venv --clear $(VENV); \
		elif "$$python" -m pip --version >/dev/null 2>&1; then \
			"$$python" -m venv --clear --without-pip $(VENV); \
			"$$python" -m pip --python $(VENV)/bin/python install --quiet pip; \
		else \
			say "$$python has neither ensurepip nor pip; install them (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; \
		fi; \
	fi; \
	say "installing the pinned packages into $(VENV), which takes a minute or two"; \
	$(PIP) --require-hashes --no-deps --requirement requirements.lock; \
	$(PIP) --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"; \
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# Other training frameworks, whose parsers read what is written for them or whose layers ours equal. They stay out of the environment: some packages do
# other things where DeepSpeed is installed.
$(FRAMEWORKS)/.ready: $(READY) $(wildcard tests/frameworks/*.lock)
	@echo "make: installing other frameworks into $(FRAMEWORKS)" >&2
	@rm -rf $(FRAMEWORKS)
	@for name in latest toml torchao; do \
		$(PIP) --require-hashes --no-deps --target $(FRAMEWORKS)/$$name --requirement tests/frameworks/$$name.lock || exit 1; \
	done
	@touch $@
