"""The client's side of the protocol, without I/O: every pair of exchange and event, and the order."""

import pytest
from reflex_protocol import LocalProtocolError, RemoteProtocolError, decode_line
from reflex_protocol.client import Conversation
from reflex_protocol.client.conversation import AT_ONCE, TRANSITIONS, State
from reflex_protocol.messages import (
    Cancel,
    Detokenize,
    DetokenizeAnswer,
    ErrorFinal,
    GenerateFinal,
    Hello,
    HelloAnswer,
    Info,
    InfoAnswer,
    Limits,
    Load,
    Loaded,
    ModelSummary,
    Ping,
    Pong,
    ProgressEvent,
    Request,
    ScoreFinal,
    Shutdown,
    TokenEvent,
    Tokenize,
    TokenizeAnswer,
    Usage,
)

ASK = {
    "generate": lambda: Request(prompt="a", stream=True, progress=True),
    "system1": lambda: Request(prompt="a", candidates=["b"], progress=True),
    "hello": Hello,
    "info": Info,
    "ping": Ping,
    "tokenize": lambda: Tokenize(text="a"),
    "detokenize": lambda: Detokenize(token_ids=[1]),
    "load": lambda: Load(model="m"),
}
LIMITS = Limits(max_line_bytes=1, read_ahead_bytes=1, max_logprobs=1)
HEAR = {
    "token": lambda i: TokenEvent(id=i, token_id=1, text="b"),
    "progress": lambda i: ProgressEvent(id=i, done=1, total=2),
    "generate_final": lambda i: GenerateFinal(
        id=i, token_ids=[], text="", finish_reason="stop", usage=Usage()
    ),
    "score_final": lambda i: ScoreFinal(
        id=i, candidates=[], entropy=0, best_index=0, score="auto", usage=Usage()
    ),
    "error": lambda i: ErrorFinal(id=i, error="no", error_kind="other"),
    "hello": lambda i: HelloAnswer(id=i, server="s", capabilities=[], limits=LIMITS, state="ready"),
    "info": lambda i: InfoAnswer(id=i, model={}, special_tokens={}),
    "pong": lambda i: Pong(id=i),
    "tokenize": lambda i: TokenizeAnswer(id=i, token_ids=[]),
    "detokenize": lambda i: DetokenizeAnswer(id=i, text=""),
    "loaded": lambda i: Loaded(id=i, model=ModelSummary(path="m")),
}


def asked(conversation, kind):
    line, exchange = conversation.send(ASK[kind]())
    assert decode_line(line[:-1]).id == exchange.id
    assert exchange.kind == kind
    return exchange


@pytest.mark.parametrize("event", HEAR)
@pytest.mark.parametrize("kind", ASK)
def test_every_exchange_against_every_event(kind, event):
    conversation = Conversation()
    exchange = asked(conversation, kind)
    after = TRANSITIONS[kind].get(event)
    if after is None:
        with pytest.raises(RemoteProtocolError):
            conversation.receive(HEAR[event](exchange.id))
        return
    assert conversation.receive(HEAR[event](exchange.id)) is exchange
    assert exchange.state is after
    assert conversation.open == ([] if after is State.DONE else [exchange])


@pytest.mark.parametrize("event", HEAR)
@pytest.mark.parametrize("kind", ASK)
def test_nothing_comes_after_the_final(kind, event):
    conversation = Conversation()
    exchange = asked(conversation, kind)
    conversation.receive(HEAR["error"](exchange.id))
    with pytest.raises(RemoteProtocolError, match="nothing that was asked"):
        conversation.receive(HEAR[event](exchange.id))


@pytest.mark.parametrize("kind", [k for k in ASK if k not in AT_ONCE])
def test_ordered_answers_may_not_overtake(kind):
    conversation = Conversation()
    first = asked(conversation, "generate")
    second = asked(conversation, kind)
    with pytest.raises(RemoteProtocolError, match="before"):
        conversation.receive(HEAR["error"](second.id))
    assert not first.done


@pytest.mark.parametrize("kind", sorted(AT_ONCE))
def test_some_answers_overtake(kind):
    conversation = Conversation()
    first = asked(conversation, "generate")
    second = asked(conversation, kind)
    conversation.receive(HEAR["error"](second.id))
    assert second.done and conversation.open == [first]


def test_answers_without_an_id_or_with_an_unknown_one():
    conversation = Conversation()
    asked(conversation, "generate")
    for line_id in (None, "unknown"):
        with pytest.raises(RemoteProtocolError):
            conversation.receive(HEAR["token"](line_id))


def test_tokens_and_progress_only_where_asked():
    conversation = Conversation()
    _, exchange = conversation.send(Request(prompt="a"))
    for event in ("token", "progress"):
        with pytest.raises(RemoteProtocolError, match="did not ask"):
            conversation.receive(HEAR[event](exchange.id))


def test_ids_are_unique_among_what_is_open():
    conversation = Conversation()
    _, mine = conversation.send(Request(id="#1", prompt="a"))
    other = asked(conversation, "ping")
    assert other.id != "#1"
    with pytest.raises(LocalProtocolError, match="in use"):
        conversation.send(Request(id="#1", prompt="b"))
    conversation.receive(HEAR["error"](mine.id))
    conversation.send(Request(id="#1", prompt="b"))


def test_the_message_given_is_left_as_it_was():
    request = Request(prompt="a")
    Conversation().send(request)
    assert request == Request(prompt="a")


def test_a_message_that_would_be_refused_is_not_sent():
    conversation = Conversation()
    with pytest.raises(LocalProtocolError, match=r"stop\[0\]") as e:
        conversation.send(Request(prompt="a", stop=[""]))
    assert e.value.kind == "invalid_input"
    assert conversation.open == []


def test_cancel_and_shutdown_open_nothing_and_shutdown_is_the_last_word():
    conversation = Conversation()
    exchange = asked(conversation, "generate")
    assert conversation.send(Cancel(target=exchange.id)) == (
        b'{"type":"cancel","target":"%s"}\n' % exchange.id.encode(),
        None,
    )
    assert conversation.send(Shutdown()) == (b'{"type":"shutdown"}\n', None)
    with pytest.raises(LocalProtocolError, match="after shutdown"):
        conversation.send(Ping())
    conversation.receive(HEAR["error"](exchange.id))
    assert conversation.open == []
