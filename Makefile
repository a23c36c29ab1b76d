# The loop. `make help` lists it; everything happens in .venv, nothing outside the folder.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Tests and CI compile CUDA for one architecture only; a release build takes the default list.
CUDA_ARCHS ?= 90a
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test emulated emulate check format bench fuzz gpu aarch64 sanitize clean

help: ## this list
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t12

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip

# pip -q keeps to itself what cmake said of nvcc.
SAY_CUDA = @$(PY) -I -c "from reflex_worker._native import build_facts; \
  print('CUDA kernels:', build_facts()['cuda_archs'] or 'none (no nvcc, or REFLEX_CUDA=OFF): built for the CPU only')"

# The worker without tests, for demo and bench.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml CMakeLists.txt $(shell find native cmake reflex_worker protocol/reflex_protocol sidecar/reflex_sidecar -type f -not -name '*.pyc')
	$(PY) -m pip install -q --upgrade ./protocol
	$(PY) -m pip install -q --upgrade . --config-settings=cmake.define.REFLEX_CUDA_ARCHS="$(CUDA_ARCHS)"
	$(SAY_CUDA)
	@rm -f $(VENV)/.installed-tests
	@touch $@

# Everything with the native tests and their module.
$(VENV)/.installed-tests: $(VENV)/bin/python pyproject.toml CMakeLists.txt $(shell find native cmake reflex_worker protocol sidecar tests/native -type f -not -name '*.pyc' -not -path '*.egg-info*' -not -path '*/build/*')
	$(PY) -m pip install -q --upgrade ./protocol
	$(PY) -m pip install -q --upgrade ".[test]" --config-settings=cmake.define.REFLEX_TESTS=ON \
	  --config-settings=cmake.define.REFLEX_CUDA_ARCHS="$(CUDA_ARCHS)" --config-settings=build-dir=build/tests
	$(PY) -m pip install -q --upgrade "./sidecar[test]"
	$(SAY_CUDA)
	@touch $@ $(VENV)/.installed

demo: $(VENV)/.installed ## set up, build, decide and write with the bundled model
	@echo '$$ reflex system1 --demo "The capital of France is" --candidate " Paris" --candidate " London" --candidate " Rome"'
	@$(VENV)/bin/reflex system1 --demo "The capital of France is" --candidate " Paris" --candidate " London" --candidate " Rome"
	@echo '$$ reflex generate --demo "Once upon a time" --max-tokens 64 --stream'
	@$(VENV)/bin/reflex generate --demo "Once upon a time" --max-tokens 64 --stream

test: $(VENV)/.installed-tests ## set up, build with tests, run them all
	build/tests/tests/native/reflex_tests
	@! command -v ctest >/dev/null || ctest --test-dir build/tests -R kernel_symbols --output-on-failure
	$(MAKE) --no-print-directory emulated
	$(VENV)/bin/pytest -q protocol/tests
	$(VENV)/bin/pytest -q sidecar/tests
	$(VENV)/bin/pytest -q tests

# The kernels on an emulated card (tests/native/emulator), where there are kernels. The cases are those that take
# seconds there; `cuda_small`, which reaches every sort of kernel, runs backwards too.
EMULATOR := build/tests/tests/native/emulator
EMULATED_CASES := cuda_small cuda_loads cuda_same_pass cuda_trees cuda_draws cuda_reads cuda_some cuda_gathered \
  cuda_out_of cuda_refuses cuda_mixtures_of_odd
ON_EMULATOR := LD_LIBRARY_PATH=$(EMULATOR)/emulator
BACKWARDS := REFLEX_EMULATOR_REVERSE=1 REFLEX_EMULATOR_EARLY=1
emulated: $(VENV)/.installed-tests
	@if test ! -e $(EMULATOR)/emulator; then echo "no kernels in this build: nothing to emulate"; else set -ex; \
	$(EMULATOR)/emulator_tests; \
	$(ON_EMULATOR) build/tests/tests/native/reflex_tests $(EMULATED_CASES); \
	$(ON_EMULATOR) $(BACKWARDS) build/tests/tests/native/reflex_tests cuda_small; fi

emulate: $(VENV)/.installed-tests ## all native CUDA tests on an emulated card, forwards and backwards (long)
	$(ON_EMULATOR) build/tests/tests/native/reflex_tests cuda_
	$(ON_EMULATOR) $(BACKWARDS) build/tests/tests/native/reflex_tests cuda_

check: $(VENV)/.installed-tests ## linters, check only
	$(PY) -m pip install -q ruff==0.17.6 pyright==1.1.414 clang-format==14.0.6
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(PY)
	git ls-files 'native/*.h' 'native/*.cpp' 'native/*.cu' 'native/*.cuh' 'tests/*.h' 'tests/*.cpp' 'tests/*.cu' 'tests/*.cuh' | xargs $(VENV)/bin/clang-format --dry-run -Werror

format: $(VENV)/bin/python ## rewrite everything in the project's style
	$(PY) -m pip install -q ruff==0.17.6 clang-format==14.0.6
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	git ls-files 'native/*.h' 'native/*.cpp' 'native/*.cu' 'native/*.cuh' 'tests/*.h' 'tests/*.cpp' 'tests/*.cu' 'tests/*.cuh' | xargs $(VENV)/bin/clang-format -i

bench: $(VENV)/.installed ## warm and cold figures of the bundled model; BENCH_MODEL=file.gguf for another
	$(VENV)/bin/reflex bench $(or $(BENCH_MODEL),--demo)
	$(VENV)/bin/reflex bench $(or $(BENCH_MODEL),--demo) --cold 10

FUZZ_SECONDS ?= 60
fuzz: ## libFuzzer on the GGUF parser, its walk over strings and the tokenizer (needs clang); FUZZ_SECONDS=60 each
	tests/fuzz/run.sh $(FUZZ_SECONDS)

sanitize: ## the native tests under AddressSanitizer and UBSan
	cmake -S . -B build/asan -DREFLEX_TESTS=ON -DREFLEX_PYTHON=OFF -DREFLEX_CUDA=OFF -DREFLEX_SANITIZE=address,undefined
	cmake --build build/asan -j2
	build/asan/tests/native/reflex_tests

aarch64: ## cross-build the portable path and run the native tests under qemu-user
	tests/cpu/aarch64.sh

gpu: ## build, test, sanitise and benchmark on this machine's NVIDIA GPU
	tests/gpu/check.sh

clean: ## remove what was built
	rm -rf build $(VENV)
