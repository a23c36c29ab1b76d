"""Tokens and templates by themselves: /tokenize, /detokenize, /apply-template."""

from __future__ import annotations

from typing import Any

from reflex_protocol.messages import Detokenize, DetokenizeAnswer, Tokenize, TokenizeAnswer

from ..bodies import DetokenizeBody, TemplateBody, TokenizeBody, decode
from ..errors import bad_request
from ..prompts import ChatSpec, Prompt, chat_prompt, check_length, thinking_kwargs
from ..web import Call, Reply, json_reply
from ..work import Job


async def tokenize(call: Call) -> Reply:
    """POST /tokenize. A `content` gets no BOS unless asked (llama-server), a `prompt` does (vLLM)."""
    body = decode(call.body, TokenizeBody)
    given = [x for x in (body.content, body.prompt, body.messages) if x is not None]
    if len(given) != 1:
        raise bad_request("expected exactly one of content, prompt and messages")
    asked = body.add_special if body.add_special is not None else body.add_special_tokens
    if body.messages is not None:
        spec = ChatSpec(
            body.messages,
            tools=body.tools or (),
            kwargs=body.chat_template_kwargs or {},
            add_generation_prompt=body.add_generation_prompt is not False,
        )
        prompt = await chat_prompt(call.services, spec)
        line = Tokenize(text=prompt.text, literal_spans=prompt.spans)
    else:
        text = body.content if body.content is not None else body.prompt
        assert text is not None
        check_length(call.services, text)
        add = asked if asked is not None else body.content is None
        parse = body.parse_special is not False
        line = Tokenize(text=text, add_bos=None if add else False, parse_special=parse)
    async with Job(call.services) as job:
        (answer,) = await job.ask(line)
        assert isinstance(answer, TokenizeAnswer)
        ids = answer.token_ids
        tokens: list[Any] = list(ids)
        if body.with_pieces:
            pieces = await job.ask(*(Detokenize(token_ids=[i], skip_special=False) for i in ids))
            tokens = [
                {"id": i, "piece": p.text}
                for i, p in zip(ids, pieces, strict=True)
                if isinstance(p, DetokenizeAnswer)
            ]
    return json_reply({"tokens": tokens, "count": len(ids), "max_model_len": call.services.facts.n_ctx})


async def detokenize(call: Call) -> Reply:
    """POST /detokenize. The text under llama-server's name and vLLM's."""
    body = decode(call.body, DetokenizeBody)
    async with Job(call.services) as job:
        (answer,) = await job.ask(Detokenize(token_ids=body.tokens, skip_special=bool(body.skip_special)))
        assert isinstance(answer, DetokenizeAnswer)
    return json_reply({"content": answer.text, "prompt": answer.text})


async def apply_template(call: Call) -> Reply:
    """POST /apply-template."""
    body = decode(call.body, TemplateBody)
    if not call.services.ready:
        raise call.services.not_ready()
    prompt = await chat_prompt(call.services, _spec(body))
    return json_reply(
        {"prompt": prompt.text, "literal_spans": prompt.spans, "template": _source(prompt)},
        headers=prompt.headers,
    )


def _spec(body: TemplateBody) -> ChatSpec:
    return ChatSpec(
        body.messages,
        tools=body.tools or (),
        kwargs=thinking_kwargs(body.chat_template_kwargs, body.enable_thinking, body.reasoning_effort),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final=bool(body.continue_final_message),
    )


def _source(prompt: Prompt) -> str:
    return prompt.headers.get("x-reflex-template", "plain")
