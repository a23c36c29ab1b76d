#!/usr/bin/env bash
# Executes the Dockerfile's own RUN steps below a scratch folder, where no image builder is at hand:
# COPY becomes cp, absolute folders of the image become folders of the scratch one, apt steps and USER
# are passed over (the host's compilers serve). Ends by running the entry point on the bundled model.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root/src" "$root/opt"
git ls-files -z | xargs -0 cp --parents -t "$root/src" 2>/dev/null
steps=0
while IFS= read -r line; do
  case "$line" in
    "RUN apt-get "*) continue ;;
    "RUN "*)
      step=${line#RUN }
      for folder in /build-venv /wheels /opt/reflex; do step=${step//$folder/$root$folder}; done
      echo "+ $step"
      (cd "$root/src" && CUDA_ARCHS="${CUDA_ARCHS:-90a}" bash -euc "$step")
      steps=$((steps + 1))
      ;;
  esac
done < Dockerfile
[ "$steps" -ge 2 ] || { echo "found $steps RUN steps to execute, expected at least 2" >&2; exit 1; }
entry=$(sed -n 's/^ENTRYPOINT \["\(.*\)"\]$/\1/p' Dockerfile | sed 's/", "/ /g')
echo "+ $entry --demo 'Once upon a time'"
# shellcheck disable=SC2086
$root$entry --demo "Once upon a time" --max-tokens 8
