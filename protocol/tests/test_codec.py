"""Framing: any cut of the bytes gives the same lines, and one bad line never spoils the next."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reflex_protocol import LineError, LineSplitter, RemoteProtocolError, decode_answer, decode_line, encode
from reflex_protocol.messages import Cancel, ErrorFinal, Ping, Request, Sampling

STREAM = (
    b'{"id":"1","prompt":"\xc3\xa9\xf0\x9f\x97\x9d"}\n'
    b"\r\n"
    b" \t \n"
    b'{"type":"ping"}\r\n'
    b"not json\n"
    b'{"type":"cancel","target":"1"}'
)


def split(splitter, pieces):
    out = [x for piece in pieces for x in splitter.feed(piece)]
    return out + splitter.finish()


def messages_of(pieces, limit=1000):
    return [x if isinstance(x, LineError) else decode_line(x) for x in split(LineSplitter(limit), pieces)]


EXPECTED = [
    Request(id="1", prompt="é🗝"),
    Ping(),
    decode_line(b"not json"),
    Cancel(target="1"),
]


def test_the_stream_in_one_piece():
    assert messages_of([STREAM]) == EXPECTED


@pytest.mark.parametrize("at", range(len(STREAM) + 1))
def test_cut_at_every_byte(at):
    assert messages_of([STREAM[:at], STREAM[at:]]) == EXPECTED


def test_byte_by_byte():
    assert messages_of([STREAM[i : i + 1] for i in range(len(STREAM))]) == EXPECTED


def test_empty_input():
    assert messages_of([]) == []
    assert messages_of([b"", b"\n", b"\r\n", b"   "]) == []


LIMIT = 64


def line_of_length(n):
    line = b'{"id":"x","prompt":"' + b"a" * (n - 22) + b'"}'
    assert len(line) == n
    return line


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_a_line_of_the_limit_passes_and_one_byte_more_does_not(end, piece):
    good, bad = line_of_length(LIMIT), line_of_length(LIMIT + 1)
    data = good + end + bad + end + good + end
    out = messages_of([data[i : i + piece] for i in range(0, len(data), piece)], LIMIT)
    too_long = LineError("line_too_long", "expected a line of at most 64 bytes, found a longer one", "x")
    assert [x if isinstance(x, LineError) else x.id for x in out] == ["x", too_long, "x"]


def test_a_line_without_end_is_reported_once_and_not_kept():
    splitter = LineSplitter(100)
    out = []
    for _ in range(1000):
        out += splitter.feed(b"x" * 50)
        assert splitter.pending_bytes <= 151
    out += splitter.feed(b'\n{"type":"ping"}\n')
    assert len(out) == 2
    assert out[0].kind == "line_too_long"
    assert decode_line(out[1]) == Ping()


def test_a_too_long_line_cut_off_by_the_end_is_reported_once():
    splitter = LineSplitter(10)
    assert [x.kind for x in splitter.feed(b"y" * 20)] == ["line_too_long"]
    assert splitter.finish() == []


def test_a_megabyte_in_small_pieces_is_linear():
    """Searching the buffer from its start for each piece would take minutes here."""
    splitter = LineSplitter(1 << 22)
    line = line_of_length(1 << 20)
    for i in range(0, len(line), 16):
        assert splitter.feed(line[i : i + 16]) == []
    assert splitter.feed(b"\n") == [line]


def test_nesting_too_deep_is_an_error_and_not_a_crash():
    deep = b'{"id":"d","constraint":{"type":"json_schema","schema":' + b"[" * 200_000 + b"]" * 200_000 + b"}}"
    assert decode_line(deep) == LineError(
        "invalid_input", "expected JSON, found values nested too deeply", "d"
    )
    assert isinstance(decode_line(b"[" * 1_000_000), LineError)


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        (b'{"type":"load","id":"x","model":"m","experts":"never"}', "auto, lazy, eager"),
        (b'{"type":"shutdown","mode":"soon"}', "drain, now"),
    ],
)
def test_a_value_out_of_a_list_is_answered_with_the_list(line, choices):
    """`experts` was answered with "a documented value"."""
    found = decode_line(line)
    assert isinstance(found, LineError) and f"expected one of {choices}, found" in found.message


def test_the_id_of_a_bad_line_is_echoed_wherever_it_stands_if_the_line_is_json():
    assert decode_line(b'{"prompt":7,"stop":[],"id":"late"}').id == "late"
    assert decode_line(b'{"prompt":"x","id":null}') == Request(prompt="x")


def test_escaped_and_spaced_type_is_still_a_control_line():
    assert decode_line(b'\t{ "\\u0074ype" :\t"ping" } ') == Ping()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from([*Request.__struct_fields__, "type", "target", "text", "token_ids", "mode", "x"])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=60) | st.just(b"\n") | st.just(b'{"type":"ping"}\n'), max_size=12))
def test_fuzz_any_bytes_give_messages_or_errors(pieces):
    data = b"".join(pieces)
    whole = split(LineSplitter(40), [data])
    assert split(LineSplitter(40), pieces) == whole
    for line in whole:
        if not isinstance(line, LineError):
            assert len(line) <= 40
            outcome = decode_line(line)
            if isinstance(outcome, LineError):
                encode(outcome.final())


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(names, json_values, max_size=5))
def test_fuzz_any_object_gives_a_message_or_an_error(value):
    outcome = decode_line(msgspec.json.encode(value))
    if isinstance(outcome, LineError):
        assert outcome.kind == "invalid_input"
        assert outcome.message
    else:
        assert decode_line(encode(outcome).rstrip(b"\n")) == outcome


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(names, json_values), min_size=1, max_size=5))
def test_fuzz_a_field_twice_never_passes(pairs):
    text = [msgspec.json.encode(k) + b" : " + msgspec.json.encode(v) for k, v in pairs]
    outcome = decode_line(b"{" + b",".join(text) + b"}")
    twice = len({k for k, _ in pairs}) < len(pairs)
    assert not twice or isinstance(outcome, LineError)
    if isinstance(outcome, LineError) and outcome.message.endswith("found it twice"):
        assert twice


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from(Request.__struct_fields__), min_size=1, max_size=8), st.text(" \t\r", max_size=2)
)
def test_fuzz_fields_twice_with_valid_values(fields, space):
    """Lists hold commas, braces and quotes that the walk over the line must not take for its own."""
    values = {
        "id": '"a,\\"}"',
        "prompt": '"{\\"prompt\\":1}"',
        "stop": '["}", ","]',
        "literal_spans": "[[1,2] , [3,4]]",
    }
    shown = {f: getattr(Request(), f) for f in Request.__struct_fields__}
    pairs = [
        f'{space}"{f}"{space}:{space}{values.get(f) or msgspec.json.encode(shown[f]).decode()}'
        for f in fields
    ]
    outcome = decode_line(("{" + f"{space},".join(pairs) + "}").encode())
    assert isinstance(outcome, LineError) == (len(set(fields)) < len(fields))


requests = st.builds(
    Request,
    id=st.none() | st.text(),
    prompt=st.text(),
    max_tokens=st.integers(0, 2**31 - 1),
    stop=st.lists(st.text(min_size=1)),
    literal_spans=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))),
    sampling=st.none()
    | st.builds(
        Sampling,
        temperature=st.floats(0, 1e3),
        seed=st.none() | st.integers(0, 2**64 - 1),
        logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-1e3, 1e3), max_size=3),
    ),
    add_bos=st.none() | st.booleans(),
    timeout_ms=st.none() | st.integers(0, 10**6),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests)
def test_fuzz_requests_survive_the_way_there(request):
    line = encode(request)
    assert line.count(b"\n") == 1
    assert decode_line(line[:-1]) == request


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b"[]",
        b'{"event":"party"}',
        b'{"event":"token"}',
        b'{"ok":true}',
        b'{"event":"final","ok":true}',
    ],
)
def test_what_is_no_answer_is_a_remote_error(line):
    with pytest.raises(RemoteProtocolError):
        decode_answer(line)


def test_a_newer_worker_may_add_fields():
    line = b'{"event":"final","id":"a","ok":false,"error":"e","error_kind":"quota","retry":1}'
    answer = decode_answer(line)
    assert answer == ErrorFinal(id="a", error="e", error_kind="quota")
