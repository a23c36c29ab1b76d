"""The C API from a C program, compiled as a user would."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = r"""
#include <stdio.h>
#include <string.h>
#include "c_api/reflex.h"

static int count(int32_t id, const char* text, void* user) {
  (void)id;
  strcat((char*)user, text);
  return 0;
}

int main(int argc, char** argv) {
  reflex_options options = {"cpu", 1, 0, 0};
  reflex_engine* engine = reflex_open(argv[1], &options);
  if (argc < 2 || !engine) return 10;
  int32_t ids[64];
  size_t n = 0;
  if (reflex_tokenize(engine, "The capital of France is", 1, ids, 64, &n) || n == 0) return 11;
  if (!reflex_tokenize(engine, "The capital of France is", 1, ids, 1, &n) || n < 2) return 12;
  const char* candidates[] = {" London", " Paris"};
  double probabilities[2], entropy;
  size_t best;
  if (reflex_score(engine, "The capital of France is", candidates, 2, REFLEX_SCORE_AUTO, 1.0, NULL,
                   probabilities, &best, &entropy))
    return 13;
  char text[4096] = "";
  const char* reason = NULL;
  reflex_generate_options g = {0};
  g.max_tokens = 8;
  if (reflex_generate(engine, "Once upon a time", &g, count, text, &reason)) return 14;
  if (!reflex_score(engine, "x", candidates, 0, REFLEX_SCORE_AUTO, 1.0, NULL, NULL, NULL, NULL)) return 15;
  printf("%zu %.3f %s %s %s\n", best, probabilities[best], reason, reflex_last_error_kind(), text);
  reflex_close(engine);
  return 0;
}
"""


def test_c_program_scores_and_generates(tmp_path, demo_gguf, reflex):
    libraries = sorted(ROOT.glob("build/tests/libreflex.so"))
    if not libraries or not shutil.which("cc"):
        pytest.skip("the C library is built with the native tests (make test)")
    (tmp_path / "main.c").write_text(PROGRAM)
    flags = [
        "-std=c99",
        "-Wall",
        "-Werror",
        f"-I{ROOT}/native",
        str(libraries[0]),
        f"-Wl,-rpath,{libraries[0].parent}",
    ]
    subprocess.run(["cc", "main.c", "-o", "main", *flags], cwd=tmp_path, check=True)
    done = subprocess.run(
        [str(tmp_path / "main"), str(demo_gguf)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    best, probability, reason, kind, text = done.stdout.rstrip("\n").split(" ", 4)
    assert best == "1" and float(probability) > 0.9
    assert reason == "length" and kind == "invalid_input"
    import json

    command_line = json.loads(
        reflex("generate", "--demo", "Once upon a time", "--max-tokens", "8", "--json").stdout
    )
    assert text == command_line["text"]
