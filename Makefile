# `make` lists the targets. Everything is installed into .venv, with a Python >= 3.12 found by scripts/find_python.sh.
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# One stamp for what running needs, one for what developing needs: the demo does not wait for the linters.
RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable

.PHONY: help venv demo test lint types format clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' Makefile

venv: $(DEV)  ## .venv with jaxinfer (editable) and the development tools

demo: $(RUN)  ## fetch SmolLM2-135M-Instruct and ask it a question
	@model=$$($(BIN)/jaxinfer fetch-demo) && $(BIN)/jaxinfer generate --model "$$model" --chat --temperature 0 \
		--prompt "What is the capital of France?"

test: $(DEV)  ## the whole test suite; ARGS="-k sampler" passes options to pytest
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(DEV)  ## ruff: style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)  ## mypy on the four packages
	$(BIN)/mypy

format: $(DEV)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv and everything generated
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/pip:
	@python=$$(sh scripts/find_python.sh) && echo "Making $(VENV) with $$python" && "$$python" -m venv $(VENV)

$(RUN): pyproject.toml | $(BIN)/pip
	@echo "Installing jaxinfer into $(VENV): a minute or two"
	@$(PIP_INSTALL) '.[gguf]'
	@touch $@

$(DEV): pyproject.toml | $(BIN)/pip
	@echo "Installing jaxinfer and its development tools into $(VENV): a minute or two"
	@$(PIP_INSTALL) '.[dev]'
	@touch $(RUN) $@
