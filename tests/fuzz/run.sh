#!/usr/bin/env bash
# usage: tests/fuzz/run.sh [SECONDS [TARGET...]]
#
# Builds each libFuzzer target fuzz_TARGET.cpp (all of them by default) with clang, ASan and
# UBSan, seeds it and runs it for SECONDS (60). Fails on a crash, a leak, a slow input or an
# allocation that its input does not justify; prints how many inputs were executed.
#
# A target says in its comments what it is built from and where its seeds come from:
#   // fuzz-sources: FILE...    globs below the repository's root
#   // fuzz-seeds: COMMAND      run with a folder to write them to as its last argument
# TARGET.dict beside it, where there is one, is its dictionary. Corpora and findings stay in
# fuzz-out/TARGET. CLANG names another compiler than clang++.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly SECONDS_EACH="${1:-60}"
shift || true
readonly CLANG="${CLANG:-clang++}"
readonly OUT="fuzz-out"
readonly MAX_INPUT_BYTES=65536   # headers of real files are larger, their structure is not
readonly SLOW_INPUT_S=10         # under sanitizers, on a busy machine
readonly MAX_MALLOC_MB=64        # one allocation; inputs have 64 KiB
readonly MAX_RSS_MB=1024

if ! command -v "$CLANG" >/dev/null; then
  echo "fuzz: $CLANG was not found (libFuzzer comes with clang)" >&2
  exit 1
fi
if [[ ! "$SECONDS_EACH" =~ ^[1-9][0-9]*$ ]]; then
  echo "fuzz: expected a number of seconds, found '$SECONDS_EACH'" >&2
  exit 2
fi

# Prints what follows "// KEY: " in a target's source.
directive() { sed -n "s|^// $1: ||p" "$2" | head -1; }

build() { # NAME SOURCE
  local sources
  sources="$(directive fuzz-sources "$2")"
  mkdir -p "$OUT/$1/corpus" "$OUT/$1/seeds"
  # shellcheck disable=SC2086  # the globs are meant to expand
  "$CLANG" -std=c++20 -O1 -g -fno-omit-frame-pointer -fsanitize=fuzzer,address,undefined \
    -fno-sanitize-recover=all -Wall -Wextra -Werror -Inative -pthread "$2" $sources -o "$OUT/$1/fuzz"
}

run() { # NAME SOURCE
  local seeds options=()
  seeds="$(directive fuzz-seeds "$2")"
  # shellcheck disable=SC2086
  if [[ -n "$seeds" ]]; then $seeds "$OUT/$1/seeds"; fi
  if [[ -f "tests/fuzz/$1.dict" ]]; then options+=("-dict=tests/fuzz/$1.dict"); fi
  local log="$OUT/$1/log" status=0
  "$OUT/$1/fuzz" "${options[@]}" -max_total_time="$SECONDS_EACH" -max_len="$MAX_INPUT_BYTES" \
    -timeout="$SLOW_INPUT_S" -malloc_limit_mb="$MAX_MALLOC_MB" -rss_limit_mb="$MAX_RSS_MB" -use_value_profile=1 \
    -print_final_stats=1 -artifact_prefix="$OUT/$1/" "$OUT/$1/corpus" "$OUT/$1/seeds" >"$log" 2>&1 || status=$?
  local executed
  executed="$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")"
  if ((status != 0)); then
    tail -60 "$log" >&2
    echo "fuzz $1: FAILED after ${executed:-?} inputs; see $log" >&2
    return 1
  fi
  echo "fuzz $1: $executed inputs in $SECONDS_EACH s, no finding; $(grep -o 'cov: [0-9]*' "$log" | tail -1)"
}

targets=("$@")
if ((${#targets[@]} == 0)); then
  for source in tests/fuzz/fuzz_*.cpp; do
    name="${source#tests/fuzz/fuzz_}"
    targets+=("${name%.cpp}")
  done
fi
for name in "${targets[@]}"; do
  source="tests/fuzz/fuzz_$name.cpp"
  if [[ ! -f "$source" ]]; then
    echo "fuzz: there is no target '$name' ($source)" >&2
    exit 2
  fi
  build "$name" "$source"
  run "$name" "$source"
done
