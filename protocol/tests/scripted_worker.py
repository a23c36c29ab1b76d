"""A worker made of one script, for the tests of the clients: argv[1] says how it behaves.

Answers `generate` with two tokens where streamed and a final, pings at once; the prompt can ask for
misbehaviour: "die" (killed half way), "garbage", "silence", "huge".
"""

import json
import os
import signal
import sys


def say(**fields):
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def final(line_id, **fields):
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 0}
    say(event="final", id=line_id, ok=True, usage=usage, timings={}, **fields)


def generate(request):
    line_id, prompt = request["id"], request.get("prompt")
    if request.get("stream"):
        say(event="token", id=line_id, token_id=1, text="a")
        if prompt == "die":
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        say(event="token", id=line_id, token_id=2, text="b")
    if prompt == "garbage":
        sys.stdout.write("garbage\n")
        sys.stdout.flush()
    elif prompt == "refuse":
        say(event="final", id=line_id, ok=False, error="no", error_kind="context_overflow")
    elif prompt == "silence":
        return line_id
    else:
        text = "x" * 3_000_000 if prompt == "huge" else "ab"
        final(line_id, token_ids=[1, 2], text=text, finish_reason="length", seed=None)
    return None


def main(behaviour):
    if behaviour == "dies-early":
        print("no such model", file=sys.stderr, flush=True)
        sys.exit(3)
    for i in range(50_000 if behaviour == "chatty" else 1):
        print("loading", i, file=sys.stderr)
    if behaviour != "never-ready":
        print(
            'REFLEX_STDIO_READY pid=1 model="m \\"q\\".gguf" load_ms=1.5 odd=a/b', file=sys.stderr, flush=True
        )
    waiting = None
    for line in sys.stdin:
        m = json.loads(line)
        kind = m.get("type")
        if kind is None and "candidates" in m:
            found = [{"text": c, "token_ids": [1], "score": 0.0, "probability": 0.5} for c in m["candidates"]]
            final(m["id"], candidates=found, entropy=1.0, best_index=0, score="logit_sum")
        elif kind is None:
            waiting = generate(m)
        elif kind == "ping":
            say(event="pong", id=m["id"])
        elif kind == "cancel" and waiting == m["target"]:
            fields = {"error": "cancelled", "error_kind": "cancelled", "token_ids": [1], "text": "a"}
            say(event="final", id=waiting, ok=False, **fields)
            waiting = None
        elif kind == "tokenize":
            say(event="tokenize", id=m["id"], token_ids=[len(m["text"])])
        elif kind == "shutdown":
            sys.exit(0)
    if behaviour == "stays":
        signal.pause()


main(sys.argv[1] if len(sys.argv) > 1 else "")
