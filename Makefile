# The workshop's commands; `make help` lists them. Each makes the environment first where it is not ready.
SHELL := bash
VENV ?= .venv
PYTHON ?= python3
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, 1 + os.cpu_count()))')
PYTEST = "$(VENV)/bin/python" -m pytest -n $(WORKERS) --dist worksteal
# What git knows: an attendee's own script is not checked
RUFF = git ls-files -z '*.py' '*.ipynb' | xargs -0 "$(VENV)/bin/ruff" check
.DEFAULT_GOAL := help
.PHONY: help setup tested exercise demo gpu check test test-root test-core test-all test-cpus faults bench docs notebooks site pins

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make the environment in .venv (VENV=/other/place, PYTHON=python3.12, SITE=polaris or SITE=/shared/mine.sh on a cluster)
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON): on Debian and Ubuntu apt install python3-venv python3-dev g++" >&2; exit 2; }
	@if [ -n "$(SITE)" ]; then \
	    case "$(SITE)" in */*) site="$(SITE)";; *) site="submit/sites/$(SITE).sh";; esac; \
	    [ -f "$$site" ] || { echo "SITE=$(SITE): there is no $$site" >&2; exit 2; }; \
	    . "$$site" || { echo "SITE=$(SITE): its modules do not load here" >&2; exit 2; }; \
	fi; $(PYTHON) tools/environment/setup.py --venv "$(VENV)" $(PART)

tested: PART = --tests
tested: setup

exercise: setup ## grade an exercise: N=1 to 10; see exercises/README.md
	@$(if $(N),"$(VENV)/bin/python" exercises/grade.py $(N) || [ $$? = 1 ],echo "which one? make exercise N=1"; exit 2)

demo: PART = --packages
demo: setup ## train every chapter's network on 1 and 2 ranks; a table and a picture of what each costs
	@"$(VENV)/bin/python" -m tools.measuring.demo

gpu: setup ## meet a node's GPUs: are they right, how fast, do they scale? (PARTS="ladder scaling")
	@"$(VENV)/bin/python" submit/gpu.py $(PARTS)

check: WORKERS = 0
check: tested ## after editing a page or a tool: what needs no ranks
	@$(RUFF)
	@! command -v shellcheck >/dev/null || git ls-files -z '*.sh' '*.pbs' '*.slurm' .ci/run | xargs -0 shellcheck
	@$(PYTEST) -m check

test: tested ## prove it, with real ranks (WORKERS=2: tests at once)
	@$(RUFF)
	@$(PYTEST) -m "not slow" --durations 10

test-root: tested ## as root, after make test: what needs namespaces or a real Slurm
	@$(PYTEST) -m "root and not slow"

test-core: tested ## the proof's core, for one more system: each program trains and resumes, mistakes, exercises
	@$(PYTEST) -m core

test-all: tested ## every test
	@$(RUFF)
	@$(PYTEST) --durations 20

test-cpus: tested ## the numeric core of the tests as on several CPUs: other instructions, one and two threads
	@"$(VENV)/bin/python" -m tools.measuring.cpus

faults: tested ## break it: killed ranks, full disks, wrong input; names what was tried and survived
	@$(PYTEST) -m fault -rA --no-header

bench: setup ## measure what loading, metrics and synchronisation cost
	@"$(VENV)/bin/python" -m tools.measuring.bench

docs: setup ## write diffs and tables into the pages again, and draw their figures
	@"$(VENV)/bin/python" -m tools.pages.docs

notebooks: setup ## run the notebooks from top to bottom and store what they show
	@"$(VENV)/bin/python" -m tools.pages.notebooks

site: tested ## all pages and notebooks as one site, which opens offline: results/site/README.html
	@"$(VENV)/bin/python" -m sphinx -q -W --keep-going -j auto -c docs -d results/site/.doctrees . results/site
	@echo "results/site/README.html"

pins: ## after moving a version in pyproject.toml: write requirements.txt again; installs nothing
	@$(or $(wildcard $(VENV)/bin/uv),uv) pip compile --quiet --system-certs --universal --python-version 3.11 \
	    --no-annotate --custom-compile-command "make pins" --group tests -o requirements.txt pyproject.toml
