#!/usr/bin/env bash
# Everything that needs a GPU, in one go: build for this card, tests, sanitizers, benchmarks, and a short
# table last. Raw logs stay in $REFLEX_GPU_LOGS (build/gpu-logs).
#
# usage: tests/gpu/check.sh [quick]      quick: no sanitizers, no 8B model
#
# With REFLEX_GPU_PREBUILT=1 nothing is built: REFLEX_GPU_BUILD holds cuda_tests, cuda_bench, fcold, reflex
# (the launcher) and the Python modules (_native, _testing, _boot) of python3, built elsewhere by the lines below. All of it takes
# some 8 minutes then; every part has a time limit of its own.
#
# Wants nvcc, cmake, ninja, python3 with numpy, msgspec, pytest, nanobind, and for the benchmarks the gguf package
# and a folder with synth_gguf.py, fcold.cpp, cold.py and ggml-vocab-qwen2.gguf (REFLEX_SHARED; else
# ../shared/bench and ../shared/vocab). What it wants and does not find it says, and goes on.
set -u
cd "$(dirname "$0")/../.."
ROOT=$PWD BUILD=${REFLEX_GPU_BUILD:-build/gpu} LOGS=${REFLEX_GPU_LOGS:-build/gpu-logs}
DATA=${REFLEX_GPU_DATA:-build/gpu-data} QUICK=${1:-} PREBUILT=${REFLEX_GPU_PREBUILT:-}
SHARED=${REFLEX_SHARED:-}
mkdir -p "$LOGS" "$DATA"
failed=0
say() { printf '== %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*"; failed=1; }
find_shared() { # file -> its path
  for d in $SHARED ../shared/bench ../shared/vocab; do [ -e "$d/$1" ] && { echo "$d/$1"; return; }; done
}

# ---- models for timing, written while the rest builds
VOCAB=$(find_shared ggml-vocab-qwen2.gguf) SYNTH=$(find_shared synth_gguf.py)
make_model() { # name shape type
  [ -e "$DATA/$1.gguf" ] && return
  python3 "$SYNTH" "$VOCAB" "$DATA/$1.part" --shape "$2" --type "$3" && mv "$DATA/$1.part" "$DATA/$1.gguf"
}
if [ -n "$VOCAB" ] && [ -n "$SYNTH" ]; then
  { make_model 0.6b qwen3-0.6b Q8_0
    [ "$QUICK" = quick ] || make_model 8b qwen3-8b Q4_K_M; } >"$LOGS/models.log" 2>&1 &
  MODELS=$!
else
  say "no synthetic models: synth_gguf.py or the vocabulary is not found"
  MODELS=
fi

# ---- build for this card alone
ARCH=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .)
[ -n "$ARCH" ] || { echo "no GPU: nvidia-smi tells no compute capability"; exit 2; }
[ "$ARCH" = 90 ] && ARCH=90a
if [ -n "$PREBUILT" ]; then
  say "prebuilt: $BUILD"
else
  say "build for $ARCH"
  cmake -S . -B "$BUILD" -G Ninja -DREFLEX_CUDA=ON -DREFLEX_CUDA_ARCHS="$ARCH" -DREFLEX_TESTS=ON \
    -DREFLEX_PYTHON=ON -DPython_EXECUTABLE="$(command -v python3)" >"$LOGS/cmake.log" 2>&1 &&
    cmake --build "$BUILD" --target cuda_tests cuda_bench reflex_launcher _native _testing _boot >"$LOGS/build.log" 2>&1 ||
    { fail "build"; tail -20 "$LOGS/cmake.log" "$LOGS/build.log"; exit 1; }
fi

# ---- tests
say "native tests"
timeout 60 "$BUILD/cuda_tests" >"$LOGS/native.log" 2>&1 || fail "native tests"
grep -v '^ok' "$LOGS/native.log" | tail -15
STAGE=$BUILD/stage
rm -rf "$STAGE" && mkdir -p "$STAGE" && cp -r reflex_worker protocol/reflex_protocol tests "$STAGE/"
find "$BUILD" -path "$STAGE" -prune -o \( -name '_native*.so' -o -name '_testing*.so' -o -name '_boot*.so' \) \
  -print | xargs -I{} cp {} "$STAGE/reflex_worker/"
REFLEX=$(tests/gpu/prefix.sh "$BUILD") || fail "an install prefix"
say "python tests"
# Its own settings: the project's name plugins that a GPU machine may lack.
printf '[pytest]\naddopts = --import-mode=importlib\nmarkers =\n    gpu\n    slow\n' >"$STAGE/pytest.ini"
(cd "$STAGE" && REFLEX_LAUNCHER=$REFLEX PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" timeout 120 python3 -m pytest -q -c pytest.ini -p no:cacheprovider --rootdir . \
  tests/gpu -rA) >"$LOGS/pytest.log" 2>&1 || fail "python tests"
grep -E '^(FAILED|ERROR|E  )' "$LOGS/pytest.log" | head -20
tail -1 "$LOGS/pytest.log"

# ---- benchmarks
[ -n "$MODELS" ] && wait "$MODELS"
FCOLD=$(find_shared fcold.cpp) COLD=$(find_shared cold.py)
[ -n "$PREBUILT" ] || CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")}
[ -n "$FCOLD" ] && [ -z "$PREBUILT" ] && g++ -O2 -std=c++17 -I"$CUDA_HOME/include" "$FCOLD" -o "$BUILD/fcold" -ldl -lpthread 2>/dev/null
for m in 0.6b 8b; do
  f=$DATA/$m.gguf
  [ -e "$f" ] || continue
  say "warm $m"
  timeout 60 "$BUILD/cuda_bench" warm "$f" 2>&1 | tee "$LOGS/warm-$m.log"
done
for m in 0.6b 8b; do
  f=$DATA/$m.gguf
  [ -e "$f" ] && [ -x "$BUILD/fcold" ] || continue
  say "the command, $m"
  timeout 150 python3 tests/gpu/commands.py --reflex "$REFLEX" --fcold "$BUILD/fcold" --logs "$LOGS" "$f" 2>&1 |
    tee "$LOGS/commands-$m.log"
done
f=$DATA/0.6b.gguf
if [ -e "$f" ] && [ -x "$BUILD/fcold" ] && [ -n "$COLD" ]; then
  for cores in 0,1 0-3; do
    say "cold 0.6b on cores $cores"
    g="$REFLEX generate $f Once --max-tokens 1"
    timeout 60 taskset -c $cores python3 "$COLD" -n 5 --first '_OK|fcold' -- "$BUILD/fcold" "$f" 2 2 \
      -- $g --load-mode ring -- $g --load-mode map 2>&1 | tee "$LOGS/cold-cores-$cores.log"
  done
fi

# ---- sanitizers, on the smallest passes that reach each sort of kernel
if [ "$QUICK" != quick ] && command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck initcheck; do
    timeout 75 compute-sanitizer --tool $tool --error-exitcode 9 "$BUILD/cuda_tests" cuda_small \
      >"$LOGS/$tool.log" 2>&1 || fail "$tool"
    say "$tool: $(grep -h SUMMARY "$LOGS/$tool.log" | tail -1 | sed 's/=*//g')"
  done
fi

python3 tests/gpu/table.py "$LOGS" | tee "$LOGS/table.md"
exit $failed
