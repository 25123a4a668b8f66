# Everything runs in .venv, installed from requirements.lock by uv.
PYTHON ?= python3
VENV := .venv
VLM := .venv-vlm
OLD_TORCH := .venv-torch211
BIN := $(VENV)/bin
DEMO := demo

.PHONY: setup setup-vlm demo demo-train test test-torch211 soak lint bench lock clean

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --requirement requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	touch $@

# vLLM in an environment of its own, for `wp2 caption --serve` and its tests.
setup-vlm: $(VLM)/.ready

$(VLM)/.ready: environments/vllm/setup environments/vllm/cpu.txt environments/vllm/gpu.txt | setup
	environments/vllm/setup $(VLM) $(BIN)/uv
	touch $@

demo: setup
	$(BIN)/wp2 record $(DEMO)/recordings --seed 1 --navigation 4 --loops 1 --events 1
	$(BIN)/wp2 curate gameplay:$(DEMO)/recordings --out $(DEMO)/corpus --config demo.yaml
	$(BIN)/wp2 verify $(DEMO)/corpus
	$(BIN)/wp2 table $(DEMO)/corpus latents
	$(BIN)/wp2 table $(DEMO)/corpus clips --columns clip_id,source_path,status,frames,latents,perspective
	$(BIN)/wp2 show $(DEMO)/corpus navigation00 --out $(DEMO)/clip.png

# The corpus of `make demo` through all five stages: checkpoints, four-step weights, a video and a page of measures.
demo-train: demo
	$(BIN)/wp2 train $(DEMO)/corpus --out $(DEMO)/run --config demo-train.yaml --stages 1-5 \
	  --gate-override actions,recall,memory,next_chunk,few_steps
	$(BIN)/wp2 export $(DEMO)/run --layout worldplay2 --out $(DEMO)/fast
	$(BIN)/wp2 rollout --weights $(DEMO)/fast --input docs/example/rollout.json --out $(DEMO)/videos \
	  --codec linear:$(DEMO)/corpus/statistics/codec-v0001.json
	$(BIN)/wp2 eval revisit $(DEMO)/fast --codec linear:$(DEMO)/corpus/statistics/codec-v0001.json \
	  --starts docs/example --trajectories 4 --out $(DEMO)/revisit

test: setup
	$(BIN)/python -m pytest -m "alone and not soak"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not alone and not soak"

# The oldest torch that the trainer runs on, in an environment of its own.
test-torch211: $(OLD_TORCH)/.ready
	$(OLD_TORCH)/bin/python -m pytest -m "not soak" tests/trainer

$(OLD_TORCH)/.ready: environments/torch211/setup environments/torch211/override.txt requirements.lock | setup
	environments/torch211/setup $(OLD_TORCH) $(BIN)/uv
	touch $@

# The full counts of the kill and corruption tests.
soak: setup
	$(BIN)/python -m pytest -m soak --timeout 7200

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m benchmarks.frames
	$(BIN)/python -m benchmarks.shards
	$(BIN)/python -m benchmarks.runner
	$(BIN)/python -m benchmarks.ledger
	$(BIN)/python -m benchmarks.vo
	$(BIN)/python -m benchmarks.rotation
	$(BIN)/python -m benchmarks.stitch
	$(BIN)/python -m benchmarks.quality
	$(BIN)/python -m benchmarks.captions
	$(BIN)/python -m benchmarks.codec
	$(BIN)/python -m benchmarks.rollout
	$(BIN)/python -m benchmarks.loader
	$(BIN)/python -m benchmarks.stable

lock:
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --all-extras --no-header \
	  --no-annotate pyproject.toml --output-file requirements.lock

clean:
	rm -rf $(DEMO)
