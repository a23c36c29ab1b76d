"""The command as its users type it: results, errors, exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time

import numpy as np
import pytest

from tests.conftest import reflex_command
from tests.oracle.rewrite import rewrite


def fields(line: str) -> dict[str, object]:
    """A result line's key=value pairs; values are JSON."""
    decoder = json.JSONDecoder()
    rest = line.strip().partition(" ")[2]
    out = {}
    while rest:
        key, _, rest = rest.partition("=")
        out[key], end = decoder.raw_decode(rest)
        rest = rest[end:].lstrip()
    return out


def test_system1_knows_the_capital_of_france(reflex):
    done = reflex(
        "system1", "--demo", "The capital of France is", "--candidate", " London", "--candidate", " Paris"
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [ln.split(" ", 1)[0] for ln in lines] == ["REFLEX_SYSTEM1_CANDIDATE_OK"] * 2 + [
        "REFLEX_SYSTEM1_OK"
    ]
    paris = fields(lines[1])
    assert paris["idx"] == 1 and paris["text"] == " Paris" and paris["probability"] > 0.9
    final = fields(lines[2])
    assert final["best_idx"] == 1 and final["best_text"] == " Paris" and final["num_candidates"] == 2
    assert 0 <= final["entropy"] < 0.5
    assert final["process_start_to_result_ms"] > 0


def test_generate_result_line_carries_text_and_phases(reflex):
    done = reflex("generate", "--demo", "Once upon a time", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("REFLEX_GENERATE_OK ")
    row = fields(done.stdout)
    assert len(row["token_ids"]) == row["completion_tokens"] <= 8
    assert row["text"]
    for phase in ("launch_ms", "gguf_open_ms", "model_load_ms", "tokenize_ms", "prompt_eval_ms", "total_ms"):
        assert row[phase] >= 0
    assert row["process_start_to_first_token_ms"] >= row["prompt_eval_ms"]


def test_experts_on_the_cpu_are_the_mappings_and_it_says_so(reflex):
    plain = reflex("generate", "--demo", "x", "--max-tokens", "1", "--device", "cpu")
    lazy = reflex("generate", "--demo", "x", "--max-tokens", "1", "--device", "cpu", "--experts", "lazy")
    assert (lazy.returncode, fields(lazy.stdout)["text"]) == (0, fields(plain.stdout)["text"])
    assert "on the CPU the file's mapping brings experts" in lazy.stderr
    assert "experts" not in plain.stderr


def test_a_cap_on_experts_that_is_no_number_is_refused(reflex):
    env = {**os.environ, "REFLEX_EXPERT_BYTES": "8G"}
    done = reflex("generate", "--demo", "x", env=env)
    assert done.returncode == 2
    assert "REFLEX_EXPERT_BYTES: expected a number of bytes, found '8G'" in done.stderr


def test_generate_json_is_one_object_with_a_schema_version(reflex):
    done = reflex("generate", "--demo", "Once upon a time", "--max-tokens", "3", "--json", "--logprobs", "2")
    row = json.loads(done.stdout)
    assert row["schema_version"] == 1 and row["event"] == "REFLEX_GENERATE_OK"
    assert len(row["logprobs"]) == len(row["token_ids"])
    assert all(len(e["top_logprobs"]) == 2 for e in row["logprobs"])


def test_generate_stream_shows_the_same_text(reflex):
    plain = fields(reflex("generate", "--demo", "Once upon a time", "--max-tokens", "12").stdout)
    done = reflex("generate", "--demo", "Once upon a time", "--max-tokens", "12", "--stream")
    text, _, last = done.stdout.rpartition("\nREFLEX_GENERATE_OK")
    assert text == plain["text"] and last


def test_a_stream_beside_json_is_json_lines_alone(reflex):
    """The text came raw, before the line of JSON: no line of stdout could be read."""
    args = ("generate", "--demo", "Once upon a time", "--max-tokens", "6", "--logprobs", "1", "--ignore-eos")
    done = reflex(*args, "--stream", "--json")
    *tokens, last = map(json.loads, done.stdout.splitlines())
    assert all(row["schema_version"] == 1 for row in (*tokens, last))
    assert [row["event"] for row in tokens] == ["token"] * 6 and last["event"] == "REFLEX_GENERATE_OK"
    assert [row["token_id"] for row in tokens] == last["token_ids"]
    assert last["text"].startswith("".join(row["text"] for row in tokens))
    told = [{k: row[k] for k in ("token_id", "logprob", "top_logprobs")} for row in tokens]
    assert told == last["logprobs"]
    plain = json.loads(reflex(*args[:-3], "--ignore-eos", "--stream", "--json").stdout.splitlines()[0])
    assert set(plain) == {"schema_version", "event", "token_id", "text"}


def test_same_seed_same_text(reflex):
    def args(seed):
        return ("generate", "--demo", "Once upon a time", "--temperature", "1.5", "--seed", seed)

    texts = [fields(reflex(*args(s)).stdout)["text"] for s in ("7", "7", "8", "9")]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_prompt_from_stdin(reflex):
    with_arg = fields(reflex("generate", "--demo", "Once upon", "--max-tokens", "4").stdout)
    command = [*reflex_command(), "generate", "--demo", "-", "--max-tokens", "4"]
    done = subprocess.run(command, input="Once upon", capture_output=True, text=True, timeout=120)
    assert fields(done.stdout)["token_ids"] == with_arg["token_ids"]


@pytest.mark.parametrize("command", ["generate", "system1", "uds", "info", "check", "bench"])
def test_a_command_without_arguments_prints_its_usage(reflex, command):
    done = reflex(command)
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: reflex {command} ")


@pytest.mark.parametrize(
    ("args", "status", "pattern"),
    [
        (["generate", "/nonexistent.gguf", "x"], 4, r"\[io\]: .*/nonexistent\.gguf"),
        (["nonsense"], 2, r"\[invalid_input\]: unknown command 'nonsense'"),
        (
            ["generate", "--demo", "x", "--max-tokens", "lots"],
            2,
            r"--max-tokens: expected a whole number from 0 to 2147483647, found 'lots'",
        ),
        (["generate", "--demo", "x", "--nope"], 2, r"unknown option --nope"),
        (["generate", "--demo", "x", "--device", "tpu"], 2, r"device: expected .* found 'tpu'"),
        (
            ["generate", "--demo", "x", "--top-p", "0"],
            2,
            r"--top-p: expected a number above 0, at most 1, found '0'",
        ),
        (["generate", "--demo", "x", "y"], 2, r"unexpected argument 'y'"),
        (["generate", "--demo", "x", "--stop", ""], 2, r"--stop: expected text, found an empty string"),
        (["generate", "--demo", "x", "--isa", "sse9"], 2, r"instruction set 'sse9': expected one"),
        (["generate", "--demo", "x", "--load-mode", "floppy"], 2, r"load_mode: expected .* found 'floppy'"),
        (["generate", "--demo", "x", "--experts", "soon"], 2, r"experts: expected .* found 'soon'"),
        (["bench", "--demo", "--lengths", "9,4000"], 2, r"--lengths: expected 1 to 2047, found 4000"),
        (["bench", "--demo", "--ctx", "5"], 2, r"--ctx: expected 6 or more to decode in, found 5"),
        (
            ["generate", "--demo", "word " * 3000, "--ctx", "16"],
            7,
            r"\[context_overflow\]: prompt: \d+ tokens",
        ),
        (["system1", "--demo", "x"], 2, r"expected at least one --candidate"),
        (["system1", "--demo", "x", "--candidate", ""], 2, r"candidates\[0\]"),
        (["info", "/dev/null"], 4, r"\[io\]: .*/dev/null"),
        (["info", __file__], 3, r"\[gguf\]: .*not a GGUF file"),
    ],
)
def test_errors_are_one_line_with_category_and_status(reflex, args, status, pattern):
    done = reflex(*args)
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert re.search(pattern, done.stderr), done.stderr


INT32 = "a whole number from {} to 2147483647"


@pytest.mark.parametrize(
    ("command", "option", "values", "expected"),
    [
        ("generate", "--max-tokens", ["-1", "3000000000", "9" * 20], INT32.format(0)),
        ("generate", "--top-k", ["-1", "2147483648"], INT32.format(0)),
        ("generate", "--ctx", ["-5", "9" * 20], INT32.format(0)),
        ("generate", "--threads", ["-1", "1025"], "a whole number from 0 to 1024"),
        ("generate", "--logprobs", ["-1", "1001"], "a whole number from 0 to 1000"),
        ("generate", "--seed", ["-1", str(1 << 64)], "a whole number from 0 to 18446744073709551615"),
        ("generate", "--temperature", ["-1", "nan", "1e39"], "a number from 0 to 3.40282e+38"),
        ("generate", "--min-p", ["-0.1", "1.1"], "a number from 0 to 1"),
        ("generate", "--repetition-penalty", ["0", "inf"], "a number above 0, at most 3.40282e+38"),
        ("generate", "--presence-penalty", ["-1e39", "x"], "a number from -3.40282e+38 to 3.40282e+38"),
        ("system1", "--temperature", ["0", "inf"], "a number above 0, at most 1.79769e+308"),
        ("check", "--tokens", ["0"], INT32.format(1)),
        ("bench", "--cold", ["0", "-1"], INT32.format(1)),
        ("bench", "--repeat", ["0"], INT32.format(1)),
        ("bench", "--pause", ["-1", "nan"], "a number from 0 to 86400"),
        ("stdio", "--max-line-bytes", ["1023", "9" * 12], INT32.format(1024)),
        ("uds", "--mode", ["-1", "999", "1000"], "an octal number from 0 to 777"),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_the_range(reflex, command, option, values, expected):
    """`expected N` told nobody what would have been right."""
    for value in values:
        done = reflex(command, "--demo", "x", option, value)
        assert done.returncode == 2 and done.stdout == ""
        assert (
            done.stderr == f"reflex: error [invalid_input]: {option}: expected {expected}, found '{value}'\n"
        )


def test_the_launchers_ranges_are_those_of_who_refuses_behind_it():
    """Written where importing them would cost: they must not drift apart."""
    from reflex_protocol import validate

    from reflex_worker import cli_args, cli_generate, cli_serve, serve

    assert cli_generate.MAX_LOGPROBS == validate.MAX_LOGPROBS
    assert cli_serve.LINE_BYTES.low == serve.MIN_MAX_LINE_BYTES
    assert (cli_args.INT32_MAX, cli_args.FLOAT32_MAX) == (validate.INT32_MAX, validate.FLOAT32_MAX)


needs_launcher = pytest.mark.skipif(
    len(reflex_command()) > 1, reason="no installed launcher: the interpreter itself looks at its descriptors"
)


@needs_launcher
@pytest.mark.parametrize("command", ["stdio", "generate"])
@pytest.mark.parametrize(("redirect", "name"), [("</", "stdin"), ("1</", "stdout"), ("</ 1</", "stdin")])
def test_a_directory_in_place_of_a_standard_descriptor_is_one_line(command, redirect, name):
    """The interpreter died of it, with a fatal error of its own and a stack of no frames."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", *reflex_command(), command, "--demo"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 4 and done.stdout == ""
    assert (
        done.stderr == f"reflex: error [io]: {name}: expected a pipe, file or terminal, found a directory\n"
    )


@needs_launcher
def test_a_directory_in_place_of_stderr_is_as_good_as_none(reflex):
    args = [*reflex_command(), "generate", "--demo", "x", "--max-tokens", "1"]
    done = subprocess.run(["sh", "-c", 'exec "$@" 2</', "sh", *args], stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith(b"REFLEX_GENERATE_OK")


@pytest.mark.parametrize("redirect", [">&-", "1</dev/null"])
def test_a_stdout_that_takes_nothing_is_refused_before_the_work(redirect):
    """The model was loaded and the tokens drawn first; and then it was `[Errno 9] Bad file descriptor`."""
    args = [*reflex_command(), "generate", "/nonexistent.gguf", "x"]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", *args], stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode == 4
    assert done.stderr.startswith("reflex: error [io]: stdout: expected it open for writing, found it closed")


def test_a_result_that_cannot_be_written_names_stdout():
    args = [*reflex_command(), "generate", "--demo", "x", "--max-tokens", "1"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(args, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 4
    assert done.stderr == "reflex: error [io]: stdout: No space left on device\n"


def test_argument_bytes_that_are_not_utf8_are_refused(reflex):
    done = subprocess.run(
        [*map(os.fsencode, reflex_command()), b"generate", b"--demo", b"caf\xe9"],
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 2 and b"expected valid UTF-8" in done.stderr


def test_a_temperature_below_the_smallest_normal_number_is_greedy(reflex):
    """It divided the logits into infinities, and the draw found no token."""
    args = ("generate", "--demo", "Once upon a time", "--max-tokens", "6")
    greedy = fields(reflex(*args).stdout)["token_ids"]
    for tiny in ("1e-45", "1e-39", "1e-300"):
        done = reflex(*args, "--temperature", tiny)
        assert done.returncode == 0, done.stderr
        assert fields(done.stdout)["token_ids"] == greedy


def test_logits_that_are_not_numbers_are_the_files_fault(reflex, demo_gguf, tmp_path):
    """They were drawn from, and the first id came out as if it had been chosen."""
    broken = rewrite(demo_gguf, tmp_path / "nan.gguf", change={"output_norm": lambda w: w * np.nan})
    for args in (
        ["generate", str(broken), "x"],
        ["generate", str(broken), "x", "--temperature", "1"],
        ["system1", str(broken), "x", "--candidate", " a", "--candidate", " b"],
        ["check", str(broken)],
    ):
        done = reflex(*args)
        assert done.returncode == 3 and re.search(r"\[gguf\]: .*(not finite|not a number)", done.stderr), (
            done.stderr
        )
        assert done.stdout == "" and done.stderr.count("\n") == 1


def test_a_prompt_wanted_from_a_closed_stdin_is_an_unusable_stdin():
    """It was a usage error, unlike a directory in its place and unlike `stdio` without one."""
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *reflex_command(), "generate", "--demo", "-"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 4
    assert done.stderr == "reflex: error [io]: stdin: expected a prompt there, found: Bad file descriptor\n"


def test_no_tokens_have_no_time_of_the_first(reflex):
    row = fields(reflex("generate", "--demo", "x", "--max-tokens", "0").stdout)
    assert row["process_start_to_first_token_ms"] is None and row["token_ids"] == []


def test_an_interrupt_while_the_command_starts_leaves_no_traceback():
    if len(reflex_command()) > 1:
        pytest.skip("started through `python -m`: until our code runs the interpreter's own handler answers")
    for delay in range(0, 60, 6):
        process = subprocess.Popen(
            [*reflex_command(), "generate", "--demo", "Once", "--max-tokens", "100"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        time.sleep(delay / 1e3)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        # -2: before the interpreter has its own handler
        assert process.returncode in (0, 130, -signal.SIGINT)
        assert b"Traceback" not in said


def test_info_tells_shape_and_verdict(reflex):
    done = reflex("info", "--demo")
    assert done.returncode == 0
    assert re.search(r"^architecture +qwen3$", done.stdout, re.M)
    assert re.search(r"^runs +yes$", done.stdout, re.M)
    row = json.loads(reflex("info", "--demo", "--json", "--metadata").stdout)
    assert row["runs"] is True and row["metadata"]["general.architecture"] == "qwen3"


def test_info_of_a_vocabulary_says_why_it_will_not_run(reflex, shared):
    done = reflex("info", str(shared / "vocab/ggml-vocab-qwen2.gguf"))
    assert done.returncode == 3
    assert "holds no tensors" in done.stdout


def test_check_reports_how_far_fast_is_from_exact(reflex):
    row = fields(reflex("check", "--demo").stdout)
    assert 0 < row["rms_diff"] < row["logit_std"]
    assert row["mean_kl"] >= 0 and 0 < row["top1_agree"] <= 1


def test_bench_warm_and_cold(reflex):
    done = reflex("bench", "--demo", "--lengths", "1,8", "--decode", "4", "--repeat", "1")
    assert [ln.split()[0] for ln in done.stdout.splitlines()] == ["REFLEX_BENCH_PREFILL_OK"] * 2 + [
        "REFLEX_BENCH_DECODE_OK"
    ]
    done = reflex("bench", "--demo", "--ctx", "40", "--decode", "90", "--repeat", "1", "--json")
    rows = [json.loads(ln) for ln in done.stdout.splitlines()]
    assert [r.get("prompt_tokens", r.get("tokens")) for r in rows] == [1, 8, 32, 35]
    done = reflex("bench", "--demo", "--cold", "2", "--pause", "0", "--json")
    rows = [json.loads(ln) for ln in done.stdout.splitlines()]
    assert rows[-1]["event"] == "REFLEX_BENCH_COLD_OK" and rows[-1]["runs"] == 2
    assert {"spawn_to_first_token_ms", "launch_ms", "prompt_eval_ms"} <= {r.get("phase") for r in rows}
    assert {"cuda_init_ms", "first_kernel_at_ms", "total_ms"} <= {r.get("phase") for r in rows}


def test_a_plot_without_matplotlib_is_refused_before_the_runs_and_not_after_them(reflex):
    try:
        import matplotlib  # noqa: F401  # pyright: ignore
    except ImportError:
        done = reflex("bench", "--demo", "--cold", "1", "--plot", "x.svg")
        assert done.returncode == 2 and "matplotlib" in done.stderr and done.stdout == ""
    else:
        pytest.skip("matplotlib is here")


@pytest.mark.parametrize(
    "args, found",
    [
        (["--plot", "x.svg"], "expected --cold N"),
        (["--cold", "1", "--floor", "--plot", "x.svg"], "expected --cold N"),
        (
            ["--cold", "1", "--plot", "x.foo"],
            "ends in .svg, .png, .pdf, found 'x.foo'",
        ),
        (
            ["--cold", "1", "--plot", "x"],
            "ends in .svg, .png, .pdf, found 'x'",
        ),
        (["--cold", "1", "--plot", ""], "ends in .svg, .png, .pdf, found ''"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_refused_before_the_runs(reflex, args, found):
    """It was passed over, ended in a traceback, or went to x.png and was told as x."""
    done = reflex("bench", "--demo", *args)
    assert done.returncode == 2 and done.stdout == ""
    assert "[invalid_input]: --plot: " in done.stderr and found in done.stderr


def test_smoke_and_doctor(reflex):
    assert reflex("smoke").stdout.startswith("REFLEX_SMOKE_OK ")
    facts = json.loads(reflex("doctor", "--json").stdout)
    assert facts["engine"].startswith("CPU")


def test_help_and_version(reflex):
    from reflex_worker import __version__

    assert reflex("--version").stdout == f"reflex {__version__}\n"
    assert "usage: reflex COMMAND" in reflex("--help").stdout
    assert reflex("generate", "--help").returncode == 0
