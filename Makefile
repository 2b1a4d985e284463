# Every target sets up what it needs: `make` on a fresh machine installs the package and runs the demo.
#
#     make demo ARGS="--seed 1"     passes arguments on
#     make test PYTHON=python3.12   sets up with another interpreter
#     make board RUN=corruption     opens the newest run of this experiment

PYTHON ?= python3
ARGS ?=
RUN ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The demo needs half of what the tests need. A first figure does not wait for the rest.
DEMO := $(or $(wildcard $(READY)),$(VENV)/.demo)
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check \
	--constraint constraints.txt --editable

.DELETE_ON_ERROR:
.PHONY: demo test test-lowest test-newest test-machines lint format board bench docs clean help

demo: $(DEMO)  ## play one algorithm in both worlds, then swap and differentiate (the default)
	$(BIN)/python -m experiments.demo $(ARGS)

test: $(READY)  ## run the tests
	$(BIN)/python -m pytest $(ARGS)

# Both have an environment of their own, .venv-test-lowest and .venv-test-newest. sympy is torch's, which knows its version best.
test-lowest: TORCH = torch==$(shell sed -n 's/^dependencies.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml).0
test-newest: TORCH = torch

test-lowest:  ## run the tests with the oldest torch that pyproject.toml allows
test-newest:  ## run the tests with the newest torch that pip finds
test-lowest test-newest:
	$(PYTHON) -m venv .venv-$@
	grep -vE '^(torch|sympy)==' constraints.txt > .venv-$@/constraints.txt
	.venv-$@/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
		--constraint .venv-$@/constraints.txt $(TORCH) --editable '.[all]'
	NUMBA_CACHE_DIR=.venv-$@/kernels .venv-$@/bin/python -m pytest $(ARGS)

test-machines: $(READY)  ## run what promises exact numbers with other instructions, libraries and numbers of threads
	@for setting in MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 OMP_NUM_THREADS=2 \
			"NUMBA_CPU_NAME=generic NUMBA_CACHE_DIR=build/kernels-generic"; do \
		echo "== $$setting"; env $$setting $(BIN)/python -m pytest -m bits $(ARGS) || exit 1; done

lint: $(READY)  ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## sort imports, fix what is safe to fix, format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# With more than 40 logs, TensorBoard's Scalars start empty. So it opens one directory of runs/.
LOGS = $(shell find runs/$(RUN)* -name 'events.out.tfevents.*' -exec ls -t {} + 2>/dev/null \
	| head -n 1 | cut -d / -f 1,2)

board: $(DEMO)  ## open TensorBoard on the newest run, or on that of RUN=<experiment>
	@test -n "$(LOGS)" || { echo "no TensorBoard log in runs/$(RUN)*; try: make demo" >&2; exit 1; }
	$(BIN)/tensorboard --logdir $(LOGS) $(ARGS)

bench: $(READY)  ## run the benchmark
	$(BIN)/python -m experiments.benchmark $(ARGS)

docs: $(READY).docs  ## build the documentation into build/site; warnings are errors
	$(BIN)/zensical build --clean --strict $(ARGS)

$(READY).docs: $(READY)
	$(INSTALL) '.[docs]'
	@touch $@

clean:  ## remove the environment, caches and build leftovers; runs/ stays
	rm -rf $(VENV) .venv-test-* build dist *.egg-info
	rm -rf .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find torch_occ experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Written last, so that an interrupted installation is taken up again.
$(VENV)/.demo: EXTRA = experiments
$(READY): EXTRA = all
$(VENV)/.demo $(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "PYTHON=$(PYTHON) is missing or older than 3.11, which torch_occ needs. Name another one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[$(EXTRA)]'
	@touch $@
