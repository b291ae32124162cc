# Needs Python >= 3.10 and make. Everything else is installed into $(VENV) from requirements.txt, verified by hash.

VENV ?= .venv
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.10 python3 python; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
# Test processes: one per core, with one thread each, at most eight, because importing torch in more of them costs more than they save.
WORKERS ?= logical

# Without bytecode every process compiles PyTorch's and Lightning's modules anew, which takes ten seconds or more.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help demo pretrained reproduce-flickr8k bench test test-slow test-oldest check docs format lock clean

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*  ## \(.*\)/\1|\2/p' Makefile | \
	    while IFS='|' read -r name what; do printf '  make %-18s %s\n' "$$name" "$$what"; done

demo: $(STAMP)  ## caption a photo, train soft and hard attention on generated shapes, compare them
	@$(BIN)/python scripts/demo.py

# PRETRAINED=--dry_run prints the commands. An interrupted stage is resumed.
pretrained: $(STAMP)  ## make the pretrained captioner again from Flickr8k, Flickr30k and COCO (some hours on two cores)
	@$(BIN)/python scripts/pretrained.py $(PRETRAINED)

# STUDY="--jobs 2" trains two runs at once, STUDIES=lite2_hard runs one study. An interrupted study resumes.
STUDIES ?= lite2 lite2_hard lite2_decoders lite2_second_stage

reproduce-flickr8k: $(STAMP)  ## train and score the Flickr8k studies, write their tables into runs/reproduced (days on two cores)
	@for study in $(STUDIES); do \
	    $(BIN)/python scripts/study.py configs/studies/$$study.yaml --measurements runs/reproduced $(STUDY) || exit; \
	    $(BIN)/python scripts/study.py configs/studies/$$study.yaml --measurements runs/reproduced --report runs/reproduced/$$study.md || exit; \
	done

bench: $(STAMP)  ## measure speed beside the common port (BENCH="--only train")
	@$(BIN)/python -m benchmarks $(BENCH)

test: $(STAMP)  ## the quick tests
	@OMP_NUM_THREADS=1 $(BIN)/$(PYTEST)

test-slow: $(STAMP)  ## the slow tests, such as whole training runs
	@OMP_NUM_THREADS=1 $(BIN)/$(PYTEST) -m slow

# These tests pass with every lower bound in pyproject.toml.
test-oldest: $(STAMP)  ## the quick tests with the oldest packages that are admitted
	@$(BIN)/uv venv --quiet --clear --python $(PYTHON) $(VENV)-oldest
	@$(BIN)/uv pip install --quiet --python $(VENV)-oldest --resolution lowest-direct --editable '.[dev]'
	@OMP_NUM_THREADS=1 $(VENV)-oldest/bin/$(PYTEST)

check: $(STAMP)  ## lint, formatting, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m mypy

# A dead link and a page outside the navigation are errors. `mkdocs serve` shows the site with a search box.
docs: $(STAMP)  ## build the documentation as a site in site/, and check its links
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

format: $(STAMP)  ## put the code into the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lock: $(STAMP)  ## rebuild requirements.txt from pyproject.toml (LOCK=--upgrade: newest versions)
	$(BIN)/uv pip compile pyproject.toml --output-file requirements.txt --all-extras --universal \
	    --python-version 3.10 --generate-hashes --no-annotate --custom-compile-command "make lock" --quiet $(LOCK)

clean:  ## remove the virtual environment and caches; runs and data stay
	rm -rf $(VENV) $(VENV)-oldest build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find captioning scripts tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

# The stamp is written last, so that an interrupted install is repeated. uv takes seconds, pip minutes. uv itself is
# installed from requirements.txt; if that fails, or uv cannot reach its index, pip installs the rest. uv shows its
# progress in a terminal.
$(STAMP): requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.10 found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "installing into $(VENV) (about 6 GB with PyTorch, some minutes) ..."
	@rm -f $@
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@sed -n '/^uv==/,/[^\\]$$/p' requirements.txt > $(VENV)/uv.txt
	@{ $(BIN)/python -m pip install --quiet --require-hashes -r $(VENV)/uv.txt && \
	    $(BIN)/uv pip install $$([ -t 2 ] || echo --quiet) --python $(BIN)/python --require-hashes -r requirements.txt; } || \
	    { echo "uv did not succeed; trying pip, which takes some minutes ..."; \
	    $(BIN)/python -m pip install --require-hashes -r requirements.txt; }
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
