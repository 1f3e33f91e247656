PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.stamp
# DeepSpeed, for the test of its guide alone: transformers, accelerate and Lightning work otherwise where they can import it.
PEERS := .venv/peers
DEEPSPEED := deepspeed einops hjson ninja py-cpuinfo
# Triton and the headers of CUDA, for tests of what Inductor compiles for GPUs: it compiles otherwise where it can import Triton.
DEVICE := .venv/device
FOR_GPUS := triton nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl
# One thread per process: ranks and test workers share the cores between them.
export OMP_NUM_THREADS ?= 1
# Hundreds of processes of the tests import the same modules: byte code is kept, whatever the user's shell says.
unexport PYTHONDONTWRITEBYTECODE
# Neighbouring tests share what they set up, so a worker keeps a run of them until the other has nothing to do.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo check test gpu docs bench format clean

help:
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(STAMP)  ## create .venv with pinned dependencies and zeroir itself

$(STAMP): pyproject.toml setup.py constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found: install it or call make PYTHON=/path/to/python."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev,docs]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --upgrade --target $(PEERS) $(DEEPSPEED)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --upgrade --target $(DEVICE) $(FOR_GPUS)
	touch $@

demo: setup  ## compile, show and train a small GPT on two CPU ranks (about a minute)
	@mkdir -p build
	$(BIN)/zeroir compile examples/gpt.py --stage 3 -o build/gpt.zir
	$(BIN)/zeroir show build/gpt.zir
	$(BIN)/zeroir run --nproc 2 build/gpt.zir --steps 200

check: setup  ## format, lint, types, import rules and the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -q -m "not slow and not gpu"

test: setup  ## the whole suite, as continuous integration runs it
	ZEROIR_TEST_EXAMPLES=all $(PYTEST) -m "not gpu"

gpu: setup  ## the tests that need a CUDA device
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(BIN)/python -m pytest -m gpu; \
	else \
	  echo "No CUDA device was found, so the GPU tests were not run."; \
	fi

docs: setup  ## build the documentation site in build/site; a wrong link is an error
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html docs build/site
	@echo "Open build/site/index.html in a browser."

bench: setup  ## measure everything on docs/performance.md anew, on an idle machine
	$(BIN)/python -m tools.bench_peers peers --record docs/records/peers.json
	$(BIN)/python -m tools.bench_peers stages --record docs/records/stages.json
	$(BIN)/python -m tools.bench_peers techniques --record docs/records/techniques.json
	$(BIN)/python -m tools.bench_engine --record docs/records/engine.json
	$(BIN)/python -m tools.bench_compile --record docs/records/compile.json
	$(BIN)/python -m tools.bench_shapes --record docs/records/shapes.json
	$(BIN)/python -m tools.bench_first_step --record docs/records/first-step.json
	$(BIN)/python -m tools.bench_predict --record docs/records/predict.json
	$(BIN)/python -m tools.bench_checkpoint --record docs/records/bench-checkpoint.json
	$(BIN)/python -m tools.bench_eight_bit --record docs/records/eight-bit.json
	$(BIN)/python -m tools.bench_eight_bit --update --record docs/records/eight-bit-update.json
	$(BIN)/python -m tools.bench_offload --record docs/records/bench-offload.json
	$(BIN)/python -m tools.record_tables

format: setup  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove everything that was built, the virtual environment too
	rm -rf .venv build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
