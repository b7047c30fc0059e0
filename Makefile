# Every target does its own set-up: a fresh Debian with Python 3.11, pip and make is enough.
# Nothing is installed outside .venv. PYTHON=... chooses the interpreter, VENV=... another place for it, PYTEST_ARGS=...
# adds arguments.
.DEFAULT_GOAL := help
.PHONY: help demo test test-all check format bench crash escape clean
MAKEFLAGS += --no-print-directory
# Set on some machines, it has every one of the suite's thousands of fresh interpreters compile lowtide again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
PYTEST_ARGS ?=
# WITHOUT="and not newcomer" leaves out of test-all what `make test` has run already.
WITHOUT ?=
# FULL=1 runs every conformance case on every provider; tests/selection.py says what is left out without it.
FULL ?=
CASES := $(if $(FULL),not alone,not alone and not full)
# Most tests wait for processes, engines and servers rather than for a processor.
WORKERS ?= $(shell echo $$(( 2 * $$(nproc) )))

# Where the newcomer's tests are: the others are not even collected, so their SDKs need not be imported.
NEWCOMER := tests/unit tests/conformance/test_local.py tests/crash \
	tests/runtime/test_core.py tests/runtime/test_local.py \
	tests/emulators/test_daytona_quickstart.py tests/emulators/test_e2b_sdk.py tests/emulators/test_runloop_sdk.py \
	tests/emulators/test_coreweave_sdk.py

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | expand -t 10

demo: $(VENV)/.runtime ## the two-minute tour: sandboxes, a kill -9, and nothing left
	@$(BIN)/lowtide demo

test: $(VENV)/.test ## the newcomer's test-suite: no engine, no account, a few minutes
	@LOWTIDE_CRASH_KILLS=4 $(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m newcomer $(PYTEST_ARGS) $(NEWCOMER)

test-all: $(VENV)/.dev ## the whole test suite, with the engines that `scripts/engines up` started; FULL=1 leaves no case out
	@code=0; \
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m "$(CASES) $(WITHOUT)" $(PYTEST_ARGS) || code=$$?; \
	$(BIN)/pytest -q -m alone $(PYTEST_ARGS) || code=$$?; \
	exit $$code

check: $(VENV)/.dev ## format, lint, types, layers, exported names
	@$(BIN)/ruff format --check --quiet --diff .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary --package lowtide --package benchmarks
	@$(BIN)/lint-imports --no-cache >$(VENV)/layers.log 2>&1 || { cat $(VENV)/layers.log; exit 1; }
	@$(BIN)/pytest -q --no-header tests/unit/test_exports.py
	@echo "check: format, lint, types, layers and exported names are fine"

format: $(VENV)/.dev ## rewrite the code as `make check` wants it
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(VENV)/.dev ## speed, as ratios against the raw mechanism
	@$(BIN)/python -m benchmarks

crash: $(VENV)/.dev ## the crash matrix: real processes, killed at every instant
	@LOWTIDE_CRASH_KILLS=$${LOWTIDE_CRASH_KILLS:-300} $(BIN)/pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS) tests/crash

escape: $(VENV)/.dev ## try to get out of a sandbox, in every way we know; one line each
	@$(BIN)/python -m tests.escape --as-user

clean: ## remove the virtual environment and the caches
	@rm -rf $(VENV) $(VENV)-3.* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# --- set-up -------------------------------------------------------------------------------------
# The stamps depend on pyproject.toml, so a changed dependency is installed by the next target.

$(VENV)/.runtime: pyproject.toml | $(BIN)/python
	@$(call install,.)
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	@$(call install,.[test])
	@touch $@ $(VENV)/.runtime

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@$(call install,.[dev])
	@touch $@ $(VENV)/.test $(VENV)/.runtime

# Debian's python3 may come without ensurepip; pip can then still install into the environment from outside.
pip = $$(if [ -x $(BIN)/pip ]; then echo $(BIN)/python -m pip; else $(find_python) && echo $$python -m pip --python $(BIN)/python; fi)
pip_install = $(pip) install -q --disable-pip-version-check
# INSTALLER=uv: seconds instead of a minute and a half. It does not read pip's settings, so it has to be asked for.
INSTALLER ?= pip
ifeq ($(INSTALLER),uv)
install = echo "setting up $(VENV) with $(1) ..." && $(pip_install) uv && \
	$(BIN)/python -m uv pip install -q --compile-bytecode -p $(BIN)/python -e '$(1)' || $(pip_install) -e '$(1)'
else
install = echo "setting up $(VENV) with $(1) ..." && $(pip_install) -e '$(1)'
endif

$(BIN)/python:
	@$(find_python) && \
	{ $$python -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV) && $$python -m venv --without-pip $(VENV); }; }

find_python = python=; \
	for candidate in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11 python; do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python=$$candidate; break; fi; \
	done; \
	[ -n "$$python" ] || { echo "lowtide needs Python 3.11 or later: install it, or say make PYTHON=/path/to/python" >&2; exit 1; }
