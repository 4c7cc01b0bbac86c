# The workshop's commands; `make help` lists them. Most of them create the environment first if needed.
SHELL := bash
VENV ?= .venv
PYTHON ?= python3
PASSES ?= 3
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, 1 + os.cpu_count()))')
PYTEST = "$(VENV)/bin/python" -m pytest -n $(WORKERS) --dist worksteal
# Only tracked files, not an attendee's own scripts
RUFF = git ls-files -z '*.py' '*.ipynb' | xargs -0 "$(VENV)/bin/ruff" check --quiet
.DEFAULT_GOAL := help
.PHONY: help setup setup-tests exercise grades demo gpu check test test-root test-core test-all faults docs notebooks site slides pins

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make the environment in .venv (VENV=/other/place, PYTHON=python3.12, SITE=polaris or SITE=/shared/mine.sh on a cluster)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON): command not found; on Debian and Ubuntu: apt install python3-venv python3-dev g++" >&2; exit 2; }
	@if [ -n "$(SITE)" ]; then \
	    case "$(SITE)" in */*) site="$(SITE)";; *) site="submit/sites/$(SITE).sh";; esac; \
	    [ -f "$$site" ] || { echo "SITE=$(SITE): there is no $$site" >&2; exit 2; }; \
	    . "$$site" || { echo "SITE=$(SITE): could not load its modules on this machine" >&2; exit 2; }; \
	fi; $(PYTHON) tools/environment/setup.py --venv "$(VENV)" $(SETUP_FLAGS)

setup-tests: SETUP_FLAGS = --tests
setup-tests: setup ## the same, with the packages of make test, site and slides

exercise: setup ## grade an exercise, such as N=1; see exercises/README.md
	@"$(VENV)/bin/python" exercises/grade.py $(or $(N),$(error name an exercise: make exercise N=1)) || [ $$? = 1 ]

grades: setup ## print which exercises this clone has solved, as one line of JSON
	@"$(VENV)/bin/python" exercises/grade.py all

demo: SETUP_FLAGS = --packages
demo: setup ## train every chapter's network on 1 and 2 ranks; print and draw the speed-ups (PASSES=1: without ranges)
	@"$(VENV)/bin/python" -m tools.measuring.demo --passes $(PASSES)

gpu: setup ## test a node's GPUs: correctness, speed, predictions (PARTS=nccl: correctness)
	@"$(VENV)/bin/python" tests/gpu $(PARTS)

check: WORKERS = 0
check: setup-tests ## fast checks that start no ranks, after editing a page or a tool
	@$(RUFF)
	@! command -v shellcheck >/dev/null || git ls-files -z '*.sh' '*.pbs' '*.slurm' .ci/run | xargs -0 shellcheck
	@$(PYTEST) -m check

test: setup-tests ## run the tests on real ranks (WORKERS=2: two at a time)
	@$(RUFF)
	@$(PYTEST) -m "not slow" --durations 10

test-root: setup-tests ## tests that need namespaces or a real Slurm; as root, after make test
	@$(PYTEST) -m "root and not slow"

test-core: setup-tests ## a few tests of each kind, to try another system
	@$(PYTEST) -m core

test-all: setup-tests ## every test
	@$(RUFF)
	@$(PYTEST) --durations 20

faults: setup-tests ## fault-injection tests: killed ranks, full disks, bad input; lists each
	@$(PYTEST) -m fault -rA --no-header

docs: setup ## update the generated parts of pages, and figures
	@"$(VENV)/bin/python" -m tools.pages.docs

notebooks: setup ## run the notebooks from top to bottom and store their outputs
	@"$(VENV)/bin/python" -m tools.pages.notebooks

site: setup-tests ## build all pages and notebooks as an offline site: results/site/README.html
	@"$(VENV)/bin/python" -m sphinx -q -W --keep-going -j auto -c docs -d results/site/.doctrees . results/site
	@echo "results/site/README.html"

slides: setup-tests ## build the half day's slides, with speaker notes, for a browser without a network: results/site/slides/slides.html
	@"$(VENV)/bin/python" -m sphinx -q -W --keep-going -b revealjs -c tools/pages/slides -d results/site/slides/.doctrees docs results/site/slides
	@echo "results/site/slides/slides.html"

pins: ## regenerate requirements.txt after changing a version in pyproject.toml; installs nothing
	@$(or $(wildcard $(VENV)/bin/uv),uv) pip compile --quiet --system-certs --universal --python-version 3.11 \
	    --no-annotate --custom-compile-command "make pins" --group tests -o requirements.txt pyproject.toml
