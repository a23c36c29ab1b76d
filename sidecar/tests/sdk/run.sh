#!/usr/bin/env bash
# Installs LangChain, litellm (and mcp, which it wants for tools), instructor and schemathesis (into the
# given interpreter's environment) and the npm `openai` package (into a folder below build/), and runs
# them all against the bundled model.
#
#     sidecar/tests/sdk/run.sh [PYTHON]        default: .venv/bin/python, as `make test` leaves it
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$here/../../.." && pwd)"
python="${1:-$root/.venv/bin/python}"
"$python" -m pip install -q langchain-openai litellm mcp instructor schemathesis llguidance
mkdir -p "$root/build/sdk-npm"
if command -v npm >/dev/null; then
  npm install --silent --no-fund --no-audit --prefix "$root/build/sdk-npm" openai
  export REFLEX_NODE_MODULES="$root/build/sdk-npm/node_modules"
fi
cd "$root"
"$python" -m pytest -q -rs sidecar/tests/sdk
