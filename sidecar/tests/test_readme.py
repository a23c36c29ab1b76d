"""The README's examples, executed against the bundled model."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from servers import HERE, Server

README = (HERE.parent / "README.md").read_text()
SHELL = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"


def run(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_examples():
    assert len(SHELL) >= 4 and len(PYTHON) >= 2
    assert all(ADDRESS in example for example in SHELL + PYTHON)


@pytest.mark.parametrize("example", SHELL, ids=lambda e: re.search(r"/v1/\S+", e)[0])
def test_curl(demo: Server, example: str):
    answer = json.loads(run(["bash", "-c", example.replace(ADDRESS, demo.url)]))
    assert "error" not in answer, answer
    if "label" in answer:
        assert answer["label"] == "Paris" and answer["probabilities"]["Paris"] > 0.9
    elif "answers" in answer:
        mood, level, happy = answer["answers"].values()
        assert mood["choice"] == "negative" and level["score"] < 1 and happy["noul"] < 0.5
    elif answer["object"] == "chat.completion":
        assert "Paris" in answer["choices"][0]["message"]["content"]
    else:
        assert answer["choices"][0]["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize("example", PYTHON, ids=["stream", "parse"])
def test_python(demo: Server, example: str):
    pytest.importorskip("openai")
    if "response_format" in example:
        pytest.importorskip("llguidance", reason="the worker's optional package")
    said = run([sys.executable, "-c", example.replace(ADDRESS, demo.url)])
    assert "city=" in said if "response_format" in example else len(said) > 40


def test_the_table_names_every_route():
    from reflex_sidecar.app import ROUTES

    for _, path, _ in ROUTES:
        assert path.replace(":path", "").replace("{model_id}", "{id}") in README, path
