"""The command line as one frozen object. Starts nothing and opens nothing."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from . import __version__

ReasoningField = Literal["reasoning_content", "reasoning", "both", "none"]

MIB: Final = 1 << 20


@dataclass(frozen=True)
class Options:
    """What the command line said; limits are in the unit that their name ends with."""

    model: str | None = None
    demo: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    alias: str | None = None
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()

    chat_template: str | None = None
    no_chat_template: bool = False
    template_timeout_s: float = 5.0
    template_memory_mib: int = 512
    reasoning_field: ReasoningField = "reasoning_content"

    max_tokens: int = 8192
    max_prompt_bytes: int = 4 * MIB
    max_body_bytes: int = 16 * MIB
    max_queue: int = 256
    timeout_s: float = 600.0
    drain_timeout_s: float = 60.0
    keep_alive_s: float = 15.0

    worker_command: tuple[str, ...] = ()
    worker_args: tuple[str, ...] = ()
    stuck_timeout_s: float = 120.0
    ready_timeout_s: float = 600.0
    max_crashes: int = 5
    crash_window_s: float = 120.0
    log_requests: bool = False

    @property
    def model_id(self) -> str:
        """The name under which /v1/models lists the model."""
        if self.alias:
            return self.alias
        return "reflex-demo" if self.demo or not self.model else Path(self.model).stem

    @property
    def worker_argv(self) -> list[str]:
        """The command that starts the worker."""
        source = ["--demo"] if self.demo or not self.model else ["--model", self.model]
        return [*(self.worker_command or default_worker()), "stdio", *source, *self.worker_args]


def default_worker() -> tuple[str, ...]:
    """The `reflex` command installed beside this interpreter, else the one on PATH."""
    beside = Path(sys.executable).with_name("reflex")
    return (str(beside),) if beside.exists() else ("reflex",)


@dataclass(frozen=True)
class _Flag:
    """One option: `name` is the field of Options that it fills."""

    flag: str
    name: str
    help: str
    type: type = str
    metavar: str | None = None
    keywords: dict[str, Any] = field(default_factory=dict)


_GROUPS: Final[dict[str, tuple[_Flag, ...]]] = {
    "where": (
        _Flag("--host", "host", "address to listen on", metavar="ADDR"),
        _Flag("--port", "port", "port to listen on; 0 picks a free one", int, "N"),
        _Flag("--alias", "alias", "the model's id in answers (default: the file's name)", metavar="ID"),
        _Flag("--api-key", "api_key", "ask for this bearer token (or REFLEX_API_KEY)", metavar="KEY"),
    ),
    "prompts": (
        _Flag("--chat-template", "chat_template", "a Jinja file instead of the model's own", metavar="FILE"),
        _Flag("--template-timeout", "template_timeout_s", "seconds a template may run", float, "S"),
        _Flag("--template-memory", "template_memory_mib", "MiB of memory a template may use", int, "MIB"),
        _Flag(
            "--reasoning-field",
            "reasoning_field",
            "where a model's thoughts go in answers",
            keywords={"choices": ["reasoning_content", "reasoning", "both", "none"]},
        ),
    ),
    "limits": (
        _Flag(
            "--max-tokens",
            "max_tokens",
            "most tokens of one answer, and as many where none are asked for",
            int,
            "N",
        ),
        _Flag("--max-prompt-bytes", "max_prompt_bytes", "longest prompt, in bytes of UTF-8", int, "N"),
        _Flag("--max-body-bytes", "max_body_bytes", "longest request body", int, "N"),
        _Flag("--max-queue", "max_queue", "requests that may wait for the worker", int, "N"),
        _Flag("--timeout", "timeout_s", "seconds a request may wait and run", float, "S"),
        _Flag("--drain-timeout", "drain_timeout_s", "seconds to finish requests after SIGTERM", float, "S"),
        _Flag("--keep-alive", "keep_alive_s", "seconds of silence before a stream's comment", float, "S"),
    ),
    "worker": (
        _Flag(
            "--stuck-timeout",
            "stuck_timeout_s",
            "seconds a worker may answer no ping before it is killed",
            float,
            "S",
        ),
        _Flag("--ready-timeout", "ready_timeout_s", "seconds a worker may take to load", float, "S"),
        _Flag("--max-crashes", "max_crashes", "crashes within the window that end the sidecar", int, "N"),
        _Flag("--crash-window", "crash_window_s", "length of that window in seconds", float, "S"),
    ),
}


def parser() -> argparse.ArgumentParser:
    """The parser; every default is that of Options."""
    ap = argparse.ArgumentParser(
        prog="reflex-openai",
        description="Serve the OpenAI HTTP API from one GGUF model.",
        epilog="Arguments after -- go to the worker (for example: -- --threads 4 --ctx 8192).",
    )
    ap.add_argument("--version", action="version", version=f"reflex-openai {__version__}")
    ap.add_argument("model", nargs="?", metavar="MODEL.gguf", help="the model to serve")
    ap.add_argument("--demo", action="store_true", help="serve the bundled model")
    defaults = Options()
    for title, flags in _GROUPS.items():
        group = ap.add_argument_group(title)
        for f in flags:
            default = getattr(defaults, f.name)
            shown = "" if default is None else f" (default: {default})"
            extra: dict[str, Any] = dict(f.keywords)
            if "choices" not in extra:
                extra["metavar"] = f.metavar
            group.add_argument(
                f.flag, dest=f.name, type=f.type, default=default, help=f.help + shown, **extra
            )
    ap.add_argument(
        "--no-chat-template", action="store_true", help="write prompts as plain text with role labels"
    )
    ap.add_argument(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin call the API ('*': of any); may be repeated",
    )
    ap.add_argument(
        "--worker-command",
        metavar="COMMAND",
        default="",
        help="how the worker is started, before its arguments (default: reflex)",
    )
    ap.add_argument("--log-requests", action="store_true", help="one line on stderr for each request")
    return ap


# Lower bounds that keep a flag from making every request fail in a way that nobody understands, and what the
# worker's counts, the kernel's ports and a clock's timers hold.
_INT32_MAX: Final = 2**31 - 1
_LONGEST_S: Final = 366 * 86400.0
_RANGES: Final = {
    "port": (0, 65535),
    "template_memory_mib": (64, _INT32_MAX),
    "max_tokens": (1, _INT32_MAX),
    "max_prompt_bytes": (1, _INT32_MAX),
    "max_body_bytes": (1, _INT32_MAX),
    "max_queue": (0, _INT32_MAX),
    "max_crashes": (1, _INT32_MAX),
}


def parse(argv: list[str]) -> Options:
    """The options of a command line. Ends the process with usage (status 2) where it is wrong."""
    ap = parser()
    worker_args: list[str] = []
    if "--" in argv:
        at = argv.index("--")
        argv, worker_args = argv[:at], argv[at + 1 :]
    ns = vars(ap.parse_args(argv))
    if ns["demo"] and ns["model"]:
        ap.error("expected a model file or --demo, found both")
    if not ns["demo"] and not ns["model"]:
        ap.error("expected a model file or --demo, found neither")
    for name, (low, high) in _RANGES.items():
        if not low <= ns[name] <= high:
            ap.error(f"{name}: expected {low} to {high}, found {ns[name]}")
    for name, value in ns.items():
        if name.endswith("_s") and not 0 < value <= _LONGEST_S:
            ap.error(f"{name}: expected seconds above 0, at most {_LONGEST_S:g}, found {value}")
    ns["api_key"] = ns["api_key"] or os.environ.get("REFLEX_API_KEY") or None
    ns["cors_origins"] = tuple(ns["cors_origins"])
    ns["worker_command"] = tuple(shlex.split(ns["worker_command"]))
    return Options(**ns, worker_args=tuple(worker_args))
