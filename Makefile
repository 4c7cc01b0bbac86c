# The workshop's commands; `make help` lists them. Each makes the environment first where it is not ready.
SHELL := bash
VENV ?= .venv
PYTHON ?= python3
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-cpus mutants bench docs notebooks

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make the environment in .venv (VENV=/other/place, PYTHON=python3.11, SITE=polaris on a cluster)
	@if [ -n "$(SITE)" ]; then \
	    [ -f "submit/sites/$(SITE).sh" ] || { echo "SITE=$(SITE): there is no submit/sites/$(SITE).sh" >&2; exit 2; }; \
	    . "./submit/sites/$(SITE).sh" || { echo "SITE=$(SITE): its modules do not load here" >&2; exit 2; }; \
	fi; $(PYTHON) tools/environment/setup.py --venv "$(VENV)"

demo: setup ## train every chapter on 1 and 2 ranks; a table and a picture of what each costs
	@"$(VENV)/bin/python" -m tools.measuring.demo

test: setup ## prove it: every test, with real ranks
	@"$(VENV)/bin/ruff" check .
	@"$(VENV)/bin/python" -m pytest -n 3 --dist worksteal

test-cpus: setup ## the numeric core of the tests as on several CPUs: other instructions, one and two threads
	@"$(VENV)/bin/python" -m tools.measuring.cpus

mutants: setup ## some forty mistakes, one after the other: the tests have to notice each
	@"$(VENV)/bin/python" tests/mutants.py

bench: setup ## measure what loading, metrics and synchronisation cost
	@"$(VENV)/bin/python" -m tools.measuring.bench

docs: setup ## write diffs and tables into the pages again, and draw their figures (ONLY=03_ddp: of these pages)
	@"$(VENV)/bin/python" -m tools.pages.docs $(if $(ONLY),--only "$(ONLY)")

notebooks: setup ## run the notebooks from top to bottom and store what they show
	@"$(VENV)/bin/python" -m tools.pages.notebooks
