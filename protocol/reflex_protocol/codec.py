"""Bytes to messages and back. Pure: no I/O, no clock, no threads.

A worker splits what arrives with `LineSplitter` and turns each line into a message with
`decode_line`; whatever is wrong with a line comes back as a `LineError` in its place, and the next
line starts clean. A client writes with `encode` and reads with `decode_answer`.
"""

from __future__ import annotations

import re
from typing import Any, Final, get_args

import msgspec
from msgspec import Raw, Struct

from .errors import RemoteProtocolError
from .messages import (
    CONTROL_TYPES,
    EVENT_TYPES,
    ClientMessage,
    ErrorFinal,
    Experts,
    Fields,
    GenerateFinal,
    Request,
    ScoreFinal,
    ScoreKind,
    ShutdownMode,
    WorkerMessage,
)

DEFAULT_MAX_LINE_BYTES: Final = 16 << 20
# What a client takes in one answer: prompt_logprobs of a long prompt are the largest there is.
MAX_ANSWER_BYTES: Final = 256 << 20
# How much of a line that is too long is kept, to read its id from.
KEPT_PREFIX_BYTES: Final = 4096

BOM: Final = b"\xef\xbb\xbf"


class LineError(Struct, frozen=True):
    """A line that is no message: why, and whose line it was where that could be read."""

    kind: str
    message: str
    id: str | None = None

    def final(self) -> ErrorFinal:
        """The answer that such a line gets."""
        return ErrorFinal(id=self.id, error=self.message, error_kind=self.kind)


class LineSplitter:
    """Cuts a stream of bytes, fed in pieces of any size, into lines of at most `max_line_bytes`.

    The limit counts neither the newline nor a carriage return before it. Blank lines are skipped.
    """

    def __init__(self, max_line_bytes: int = DEFAULT_MAX_LINE_BYTES) -> None:
        self.max_line_bytes = max_line_bytes
        self._buffer = bytearray()
        self._searched = 0  # no newline before this offset
        self._discarding = False  # inside a line already reported as too long

    @property
    def pending_bytes(self) -> int:
        """Bytes held of a line that has not ended yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes | LineError]:
        """The lines that `data` completes, in order; a too long one is reported once, as it is noticed."""
        out: list[bytes | LineError] = []
        buffer = self._buffer
        buffer += data
        start = 0
        while True:
            end = buffer.find(b"\n", max(start, self._searched))
            if end < 0:
                break
            self._take(bytes(memoryview(buffer)[start:end]), out)
            start = end + 1
        del buffer[:start]
        self._searched = len(buffer)
        if self._discarding:
            buffer.clear()
            self._searched = 0
        elif len(buffer) > self.max_line_bytes + 1:  # one more may be the carriage return
            out.append(self._too_long(bytes(buffer[:KEPT_PREFIX_BYTES])))
            buffer.clear()
            self._searched = 0
            self._discarding = True
        return out

    def finish(self) -> list[bytes | LineError]:
        """End of input: a last line without a newline counts as a line."""
        out: list[bytes | LineError] = []
        self._take(bytes(self._buffer), out)
        self._buffer.clear()
        self._searched = 0
        return out

    def _take(self, line: bytes, out: list[bytes | LineError]) -> None:
        if self._discarding:
            self._discarding = False
            return
        if line.endswith(b"\r"):
            line = line[:-1]
        if len(line) > self.max_line_bytes:
            out.append(self._too_long(line[:KEPT_PREFIX_BYTES]))
        elif line.strip(b" \t\r"):
            out.append(line)

    def _too_long(self, prefix: bytes) -> LineError:
        return LineError(
            "line_too_long",
            f"expected a line of at most {self.max_line_bytes} bytes, found a longer one",
            leading_id(prefix),
        )


_FIELDS: Final = msgspec.json.Decoder(Fields)
_ID: Final = msgspec.json.Decoder(str | None)
_STRING: Final = msgspec.json.Decoder(str)
_REQUEST: Final = msgspec.json.Decoder(Request)
_CONTROL: Final = {name: msgspec.json.Decoder(cls) for name, cls in CONTROL_TYPES.items()}
_EVENT: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    name: msgspec.json.Decoder(cls) for name, cls in EVENT_TYPES.items()
}

# Patterns are compiled when the first bad line needs them: a worker's start is counted in
# milliseconds, and most workers never see one.
_LEADING_ID: Final = rb'[ \t\r\n]*\{[ \t\r\n]*"id"[ \t\r\n]*:[ \t\r\n]*("[^"\\]*(?:\\.[^"\\]*)*")'
_SURROGATE: Final = rb"\\u[dD][89a-fA-F]"
_PATH: Final = r" - at `(key` in `)?\$\.?([^`]*)`$"
_NAMED: Final = r"Object (contains unknown|missing required) field `(.*)`"


def leading_id(line: bytes) -> str | None:
    """The id of a line that could not be decoded, where it is the line's first field."""
    match = re.compile(_LEADING_ID, re.DOTALL).match(line[:KEPT_PREFIX_BYTES])
    return _read_id(match[1]) if match else None


def decode_line(line: bytes) -> ClientMessage | LineError:
    """The message of one line (without its newline), or what is wrong with it."""
    if line.startswith(BOM):
        return _bad("expected a JSON object, found a byte order mark", leading_id(line[len(BOM) :]))
    if b"\0" in line:
        return _bad(f"expected JSON text, found a NUL byte at offset {line.index(0)}", leading_id(line))
    try:
        fields = _FIELDS.decode(line)
    except msgspec.ValidationError as e:
        return _bad("expected a JSON object, found " + _last_word(str(e)), None)
    except (msgspec.DecodeError, RecursionError) as e:
        return _bad(_syntax(line, e), leading_id(line))
    line_id = _read_id(fields["id"]) if "id" in fields else None
    decoder: msgspec.json.Decoder = _REQUEST
    if "type" in fields:
        try:
            kind = _STRING.decode(fields["type"])
        except msgspec.DecodeError as e:
            return _bad("type: " + _explain(e), line_id)
        found = _CONTROL.get(kind)
        if found is None:
            known = ", ".join(_CONTROL)
            return _bad(f"type: expected one of {known} (or no type: a request), found '{kind}'", line_id)
        decoder = found
    try:
        message = decoder.decode(line)
    except msgspec.ValidationError as e:
        return _bad(_explain(e), line_id)
    except (msgspec.DecodeError, RecursionError) as e:
        return _bad(_syntax(line, e), line_id)
    duplicate = _duplicate(line, fields)
    if duplicate is not None:
        return _bad(f"{duplicate}: expected the field once, found it twice", line_id)
    return message


def encode(message: Struct) -> bytes:
    """One line, newline included."""
    return msgspec.json.encode(message) + b"\n"


class _Head(Struct):
    event: str
    ok: bool = True
    candidates: Raw = Raw()


_HEAD: Final = msgspec.json.Decoder(_Head)
_FINAL_GENERATE: Final = msgspec.json.Decoder(GenerateFinal)
_FINAL_SCORE: Final = msgspec.json.Decoder(ScoreFinal)
_FINAL_ERROR: Final = msgspec.json.Decoder(ErrorFinal)


def decode_answer(line: bytes) -> WorkerMessage:
    """The worker's message in one line. Raises RemoteProtocolError for anything else."""
    try:
        head = _HEAD.decode(line)
        if head.event == "final":
            if not head.ok:
                return _FINAL_ERROR.decode(line)
            return (_FINAL_SCORE if bytes(head.candidates) else _FINAL_GENERATE).decode(line)
        decoder = _EVENT.get(head.event)
        if decoder is not None:
            return decoder.decode(line)
    except (msgspec.DecodeError, RecursionError) as e:
        raise RemoteProtocolError(f"not an answer ({e}): {_excerpt(line)}") from None
    raise RemoteProtocolError(f"an answer of unknown kind '{head.event}': {_excerpt(line)}")


def _bad(message: str, line_id: str | None) -> LineError:
    return LineError("invalid_input", message, line_id)


def _read_id(raw: bytes | Raw) -> str | None:
    try:
        return _ID.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


_SPACE: Final = b" \t\r\n"
_END: Final = ord("}")
_AFTER_VALUE: Final = b",}"


def _skip_space(line: bytes, at: int) -> int:
    """The first offset from `at` on that is no space; there is one."""
    while line[at] in _SPACE:
        piece = line[at : at + KEPT_PREFIX_BYTES]
        at += len(piece) - len(piece.lstrip(_SPACE))
    return at


def _duplicate(line: bytes, fields: Fields) -> str | None:
    """The first field that the object has twice. The decoder kept the last value of each, so walking
    the text and finding another value, or a field a second time, tells. The line has been decoded:
    it is valid JSON and its fields have names that contain no quote."""
    seen: set[str] = set()
    at = _skip_space(line, line.index(b"{") + 1)
    while line[at] != _END:
        after_key = line.index(b'"', at + 1) + 1
        key = _STRING.decode(line[at:after_key])
        at = _skip_space(line, line.index(b":", after_key) + 1)
        value = bytes(fields[key])
        if key in seen or not line.startswith(value, at):
            return key
        seen.add(key)
        at = _skip_space(line, at + len(value))
        if line[at] not in _AFTER_VALUE:
            return key
        if line[at] != _END:
            at = _skip_space(line, at + 1)
    return None


# What msgspec does not list when a word is none of those expected, by field.
_CHOICES: Final = {
    "score": get_args(ScoreKind),
    "mode": get_args(ShutdownMode),
    "experts": get_args(Experts),
    "constraint.type": ("json_schema", "regex", "lark"),
}


def _explain(error: Exception) -> str:
    """msgspec's message as `field: expected ..., found ...`."""
    text = str(error)
    match = re.search(_PATH, text)
    where = ""
    if match:
        text = text[: match.start()]
        where = match[2] + (": a key" if match[1] else "")
    named = re.fullmatch(_NAMED, text, re.DOTALL)
    if named:
        path = f"{where}.{named[2]}" if where else named[2]
        what = "unknown field" if named[1] == "contains unknown" else "expected a value, found none"
        return f"{path}: {what}"
    text = text.replace("`", "").replace(", got ", ", found ")
    if text.startswith("Expected"):
        text = "e" + text[1:]
    elif text == "Number out of range":
        text = "expected a number from -1.8e+308 to 1.8e+308, found one beyond"
    elif text.startswith("Invalid "):
        choices = ", ".join(_CHOICES.get(where, ("a documented value",)))
        text = f"expected one of {choices}, found {text.rpartition('value ')[2]}"
    return f"{where}: {text}" if where else text


def _syntax(line: bytes, error: Exception) -> str:
    """Why a line is not JSON."""
    if isinstance(error, RecursionError):
        return "expected JSON, found values nested too deeply"
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as e:
        return f"expected UTF-8, found byte 0x{line[e.start]:02x} at offset {e.start}"
    if re.search(_SURROGATE, line) and "malformed" not in str(error):
        return "expected Unicode text, found half of a surrogate pair (\\ud800 to \\udfff) by itself"
    text = str(error).removeprefix("JSON is malformed: ")
    return f"not JSON: {text[:1].lower()}{text[1:]}"


def _last_word(text: str) -> str:
    return text.rpartition("got ")[2].strip("`")


def _excerpt(line: bytes, limit: int = 200) -> str:
    text = line[:limit].decode("utf-8", "replace")
    return text + ("..." if len(line) > limit else "")
