#!/usr/bin/env bash
# shellcheck disable=SC2317  # blocks are called by name
# Everything that needs a GPU, in one go: build for this card, tests, sanitizers, benchmarks, and a table of every
# block last. Raw logs stay in $REFLEX_GPU_LOGS (build/gpu-logs).
#
# usage: tests/gpu/check.sh [--only BLOCK,...] [--skip BLOCK,...] [--list] [quick]
#
# Blocks run in the order of --list, what no run has settled yet before what earlier runs have. Each has a time
# limit of its own and fails for itself; all of them have $REFLEX_GPU_BUDGET_S (570) seconds, the build not
# counted, and a block for which none are left says so. $REFLEX_GPU_RUNS: cold starts of each command in turn (6, on
# few cores 5; figures to publish take 10, in a call of their own: --only commands,cores). $REFLEX_GPU_VARIANTS=1:
# load and turns compare more ways to read. quick: no sanitizers, no model of more than a gigabyte.
#
# With REFLEX_GPU_PREBUILT=1 nothing is built: REFLEX_GPU_BUILD holds cuda_tests, cuda_bench, fcold, reflex
# (the launcher) and the Python modules (_native, _testing, _boot) of python3, built elsewhere by the lines below,
# and REFLEX_GPU_COMMIT names the commit they were built of.
#
# Wants nvcc, cmake, ninja, python3 with numpy, msgspec, pytest, nanobind, and for the benchmarks the gguf package
# and a folder with synth_gguf.py, fcold.cpp, cold.py and ggml-vocab-qwen2.gguf (REFLEX_SHARED; else
# ../shared/bench and ../shared/vocab). What it wants and does not find it says, and goes on. REFLEX_GPU_DATA
# (build/gpu-data) should be on a disk, not in memory: 40 GB of models are written there.
set -u
cd "$(dirname "$0")/../.." || exit 2
BUILD=${REFLEX_GPU_BUILD:-build/gpu} LOGS=${REFLEX_GPU_LOGS:-build/gpu-logs}
DATA=${REFLEX_GPU_DATA:-build/gpu-data} PREBUILT=${REFLEX_GPU_PREBUILT:-}
SHARED=${REFLEX_SHARED:-} BUDGET=${REFLEX_GPU_BUDGET_S:-570} RUNS=${REFLEX_GPU_RUNS:-} VARIANTS=${REFLEX_GPU_VARIANTS:-}
BLOCKS="native pytest latent load warm hybrids families sanitize_models turns exit cold8b lazydisk commands cores sanitize"
QUICK='' ONLY='' SKIP=''
while [ $# -gt 0 ]; do
  case $1 in
    quick) QUICK=1 ;;
    --only) ONLY=${2:?--only wants blocks}; shift ;;
    --skip) SKIP=${2:?--skip wants blocks}; shift ;;
    --list) echo "$BLOCKS" | tr ' ' '\n'; exit 0 ;;
    *) echo "usage: tests/gpu/check.sh [--only BLOCK,...] [--skip BLOCK,...] [--list] [quick]"; exit 2 ;;
  esac
  shift
done
for b in ${ONLY//,/ } ${SKIP//,/ }; do
  case " $BLOCKS " in *" $b "*) ;; *) echo "there is no block '$b' (--list)"; exit 2 ;; esac
done
mkdir -p "$LOGS" "$DATA"
failed=0
say() { printf '== %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*"; failed=1; }
wanted() { # block
  [ -z "$ONLY" ] || case ",$ONLY," in *",$1,"*) ;; *) return 1 ;; esac
  case ",$SKIP," in *",$1,"*) return 1 ;; esac
  case $QUICK:$1 in 1:sanitize* | 1:hybrids | 1:latent | 1:families | 1:cold8b | 1:lazydisk) return 1 ;; esac
}
find_shared() { # file -> its path
  for d in $SHARED ../shared/bench ../shared/vocab; do [ -e "$d/$1" ] && { echo "$d/$1"; return; }; done
}

# ---- models for timing: written while the rest builds and is tested, before anything is timed
VOCAB=$(find_shared ggml-vocab-qwen2.gguf) SYNTH=$(find_shared synth_gguf.py)
DENSE="0.6b 8b" HYBRIDS="hybrid mla" FAMILIES="deepseek32 deepseek4 qwen4exp"
write_model() { # name -> $DATA/name.part
  case $1 in
    0.6b) python3 "$SYNTH" "$VOCAB" "$DATA/$1.part" --shape qwen3-0.6b --type Q8_0 ;;
    8b) python3 "$SYNTH" "$VOCAB" "$DATA/$1.part" --shape qwen3-8b --type Q4_K_M ;;
    hybrid) python3 tests/bench/synth_mixers.py "$DATA/$1.part" --shape qwen35-4b ;;
    mla) python3 tests/bench/synth_mixers.py "$DATA/$1.part" --shape deepseek2-lite --layers 9 ;;
    deepseek32 | deepseek4 | qwen4exp)
      python3 tests/bench/synth_families.py "$VOCAB" "$DATA/$1.part" --shape "$1" ;;
    30b) python3 tests/bench/big_gguf.py header "$SYNTH" "$VOCAB" "$DATA/$1.head" --shape qwen3-30b-a3b --type Q4_K_M &&
      python3 tests/bench/big_gguf.py fill "$DATA/$1.head" "$DATA/$1.part" ;;
  esac
}
models_of() { # block -> names
  case $1 in
    load | exit | warm | commands) [ -n "$QUICK" ] && echo 0.6b || echo "$DENSE" ;;
    turns | cores) echo 0.6b ;;
    hybrids) echo "$HYBRIDS" ;;
    latent) echo mla ;;
    families) echo "$FAMILIES" ;;
    cold8b) echo 8b ;;
    lazydisk) echo 30b ;;
  esac
}
model() { [ -e "$DATA/$1.gguf" ] && echo "$DATA/$1.gguf" && return; say "there is no model '$1'" >&2; return 1; }
MODELS=''
if [ -n "$VOCAB" ] && [ -n "$SYNTH" ]; then
  need=' '
  for b in $BLOCKS; do
    wanted "$b" || continue
    for m in $(models_of "$b"); do case $need in *" $m "*) ;; *) need="$need$m " ;; esac; done
  done
  for m in $need; do
    [ -e "$DATA/$m.gguf" ] && continue
    { write_model "$m" && mv "$DATA/$m.part" "$DATA/$m.gguf"; } >"$LOGS/model-$m.log" 2>&1 &
    MODELS="$MODELS $!"
  done
else
  say "no synthetic models: synth_gguf.py or the vocabulary is not found"
fi

# ---- build for this card alone
ARCH=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .)
[ -n "$ARCH" ] || { echo "no GPU: nvidia-smi tells no compute capability"; exit 2; }
[ "$ARCH" = 90 ] && ARCH=90a
FCOLD=$(find_shared fcold.cpp) COLD=$(find_shared cold.py)
if [ -n "$PREBUILT" ]; then
  say "prebuilt: $BUILD"
else
  say "build for $ARCH"
  if ! { cmake -S . -B "$BUILD" -G Ninja -DREFLEX_CUDA=ON -DREFLEX_CUDA_ARCHS="$ARCH" -DREFLEX_TESTS=ON \
    -DREFLEX_PYTHON=ON -DPython_EXECUTABLE="$(command -v python3)" >"$LOGS/cmake.log" 2>&1 &&
    cmake --build "$BUILD" --target cuda_tests cuda_bench reflex_launcher _native _testing _boot >"$LOGS/build.log" 2>&1; }; then
    fail "build"
    tail -20 "$LOGS/cmake.log" "$LOGS/build.log"
    exit 1
  fi
  SECONDS=0
  CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")}
  [ -n "$FCOLD" ] && g++ -O2 -std=c++17 -I"$CUDA_HOME/include" "$FCOLD" -o "$BUILD/fcold" -ldl -lpthread 2>/dev/null
fi
STAGE=$BUILD/stage
rm -rf "$STAGE" && mkdir -p "$STAGE" && cp -r reflex_worker protocol/reflex_protocol tests "$STAGE/"
find "$BUILD" -path "$STAGE" -prune -o \( -name '_native*.so' -o -name '_testing*.so' -o -name '_boot*.so' \) \
  -exec cp {} "$STAGE/reflex_worker/" \;
# Its own settings: the project's name plugins that a GPU machine may lack.
printf '[pytest]\naddopts = --import-mode=importlib\nmarkers =\n    gpu\n    slow\n' >"$STAGE/pytest.ini"
STAGED=$(cd "$STAGE" && pwd)${PYTHONPATH:+:$PYTHONPATH}
REFLEX=$(tests/gpu/prefix.sh "$BUILD") || fail "an install prefix"
floor() { [ -x "$BUILD/fcold" ] && echo "--fcold $BUILD/fcold"; }

# ---- blocks. The seconds behind each name are its limit.
run_native() { # 60
  timeout "$1" "$BUILD/cuda_tests" >"$LOGS/native.log" 2>&1
  local rc=$?
  grep -v '^ok' "$LOGS/native.log" | tail -15
  return "$rc"
}
run_pytest() { # 180
  (cd "$STAGE" && REFLEX_LAUNCHER=$REFLEX PYTHONPATH=$STAGED timeout "$1" python3 -m pytest -q -c pytest.ini \
    -p no:cacheprovider --rootdir . tests/gpu -rA) >"$LOGS/pytest.log" 2>&1
  local rc=$?
  grep -E '^(FAILED|ERROR|E  )' "$LOGS/pytest.log" | head -20
  tail -1 "$LOGS/pytest.log"
  return "$rc"
}
run_load() { # 120
  local rc=0 m f
  for m in $(models_of load); do
    f=$(model "$m") || { rc=1; continue; }
    timeout $(($1 / 2)) python3 tests/gpu/experiments.py load ${VARIANTS:+--variants} --reflex "$REFLEX" \
      --bench "$BUILD/cuda_bench" "$f" || rc=1
  done
  return "$rc"
}
warm() { # model seconds
  local f
  f=$(model "$1") || return 1
  say "warm $1"
  timeout "$2" "$BUILD/cuda_bench" warm "$f" 2>&1 | tee "$LOGS/warm-$1.log"
  [ "${PIPESTATUS[0]}" = 0 ]
}
each_warm() { # seconds model...
  local rc=0 m limit=$1
  shift
  for m in "$@"; do warm "$m" $((limit / $#)) || rc=1; done
  return "$rc"
}
# shellcheck disable=SC2046
run_warm() { each_warm "$1" $(models_of warm); } # 60
# shellcheck disable=SC2046
run_hybrids() { each_warm "$1" $(models_of hybrids); } # 60
run_latent() { # 75: both forms of latent attention in turn, rows of a pass and rows before them
  local f form rows rc=0
  f=$(model mla) || return 1
  for rows in "64 0" "128 0" "256 0" "512 0" "2048 0" "128 3072" "512 3072"; do
    for form in absorbed decompressed chosen; do
      # shellcheck disable=SC2086
      timeout $(($1 / 3)) "$BUILD/cuda_bench" pass "$f" ${rows% *} 20 $form ${rows#* } || rc=1
    done
  done
  return "$rc"
}
# shellcheck disable=SC2046
run_families() { each_warm "$1" $(models_of families); } # 75
run_sanitize_models() { # 270: every family's fixture under each tool, and a fault that each tool must find
  local rc=0 tool
  command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not found"; return 1; }
  for tool in memcheck initcheck racecheck; do
    timeout 20 compute-sanitizer --tool "$tool" --error-exitcode 9 python3 tests/gpu/sanitizer_control.py "$tool" \
      >"$LOGS/control-$tool.log" 2>&1
    [ $? = 9 ] || { echo "$tool: did not find the fault that was made for it"; tail -3 "$LOGS/control-$tool.log"; rc=1; }
    PYTHONPATH=$STAGED timeout $(($1 / 3)) compute-sanitizer --tool "$tool" --error-exitcode 9 \
      python3 tests/gpu/sanitize_models.py tests/fixtures >"$LOGS/sanitize_models-$tool.log" 2>&1 || rc=1
    say "$tool: $(grep -c '^[a-z0-9_-]*, \(exact\|fast\): tokens' "$LOGS/sanitize_models-$tool.log") runs of fixtures," \
      "$(grep -h SUMMARY "$LOGS/sanitize_models-$tool.log" | tail -1 | sed 's/=*//g')"
  done
  return "$rc"
}
run_turns() { # 100
  local f
  f=$(model 0.6b) && timeout "$1" python3 tests/gpu/experiments.py turns ${VARIANTS:+--read} --reflex "$REFLEX" "$f"
}
run_exit() { # 75
  local f
  # shellcheck disable=SC2046
  f=$(model 0.6b) && timeout "$1" python3 tests/gpu/experiments.py exit --reflex "$REFLEX" \
    --bench "$BUILD/cuda_bench" $(floor) "$f"
}
run_cold8b() { # 60
  local f
  f=$(model 8b) && timeout "$1" python3 tests/gpu/experiments.py disk --reflex "$REFLEX" "$f"
}
run_lazydisk() { # 75
  local f
  f=$(model 30b) && timeout "$1" python3 tests/gpu/experiments.py disk --lazy --reflex "$REFLEX" "$f"
}
run_commands() { # 260
  local rc=0 m f
  for m in $(models_of commands); do
    f=$(model "$m") || { rc=1; continue; }
    # shellcheck disable=SC2046
    timeout $(($1 / 2)) python3 tests/gpu/commands.py --reflex "$REFLEX" $(floor) --runs "${RUNS:-6}" --logs "$LOGS" "$f" || rc=1
  done
  return "$rc"
}
run_cores() { # 110
  local f rc=0 cores g
  if [ ! -x "$BUILD/fcold" ] || [ -z "$COLD" ]; then echo "fcold or cold.py is not there"; return 1; fi
  f=$(model 0.6b) || return 1
  for cores in 0,1 0-3; do
    say "cold 0.6b on cores $cores"
    g="$REFLEX generate $f Once --max-tokens 1"
    # shellcheck disable=SC2086
    timeout $(($1 / 2)) taskset -c $cores python3 "$COLD" -n "${RUNS:-5}" --first '_OK|fcold' -- "$BUILD/fcold" "$f" 2 2 \
      -- $g --load-mode ring -- $g --load-mode map 2>&1 | tee "$LOGS/cold-cores-$cores.log"
    [ "${PIPESTATUS[0]}" = 0 ] || rc=1
  done
  return "$rc"
}
run_sanitize() { # 240: the smallest passes that reach each sort of kernel
  local rc=0 tool
  command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not found"; return 1; }
  for tool in memcheck racecheck initcheck; do
    timeout $(($1 / 3)) compute-sanitizer --tool "$tool" --error-exitcode 9 "$BUILD/cuda_tests" cuda_small \
      >"$LOGS/$tool.log" 2>&1 || rc=1
    say "$tool: $(grep -h SUMMARY "$LOGS/$tool.log" | tail -1 | sed 's/=*//g')"
  done
  return "$rc"
}
limit_of() { sed -n "s/^run_$1() {.*# \([0-9]*\).*/\1/p" tests/gpu/check.sh; }

wait_for_models() { # once; what is dirty is written before anything is timed
  for p in $MODELS; do wait "$p" || true; done
  [ -n "$MODELS" ] && timeout 60 sync
  MODELS=''
  for m in ${need:-}; do
    [ -e "$DATA/$m.gguf" ] || { fail "model $m"; tail -3 "$LOGS/model-$m.log"; }
  done
  need=''
}
: >"$LOGS/blocks.txt"
for b in $BLOCKS; do
  wanted "$b" || continue
  case $b in native | pytest) ;; *) wait_for_models ;; esac
  left=$((BUDGET - SECONDS)) limit=$(limit_of "$b") begin=$SECONDS
  if [ $left -lt 10 ]; then
    say "$b: no time is left"
    echo "$b not run, no time was left" >>"$LOGS/blocks.txt"
    continue
  fi
  say "$b"
  "run_$b" $((limit < left ? limit : left)) > >(tee "$LOGS/block-$b.log") 2>&1
  rc=$?
  [ $rc = 0 ] || fail "$b"
  echo "$b $([ $rc = 0 ] && echo passed || echo FAILED), $((SECONDS - begin)) s" >>"$LOGS/blocks.txt"
done

sleep 0.2 # the last block's tee
python3 tests/gpu/table.py "$LOGS" | tee "$LOGS/table.md"
exit $failed
