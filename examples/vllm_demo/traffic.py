"""What clients do to an OpenAI-compatible vLLM server, and what they got: ids, text, finish and usage of each sequence.

The prompts are for `tiny_model`, whose answers are known; `send` works with any model. `return_token_ids`, vLLM's own
extension of the API, gives the token ids, streamed or not: no tokenizer, and nothing lost to decoding. Runs in the
caller's process on asyncio; needs httpx. Each request and the whole have a time limit.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from examples.vllm_demo.tiny_model import LETTERS, greedy, token_id

_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
_PAIRS = '{"a": 1, "b": 2}{"a": 1, "b": 2}'


@dataclass(frozen=True)
class Ask:
    """One request: its name, its body without model and token-id switch, and how the client behaves.

    `follows` is the prompt's last character, where the tiny model's answer follows from it alone.
    """

    name: str
    body: Mapping[str, Any]
    chat: bool = False
    hang_up_after: int | None = None
    """Streamed only: close the connection once so many token ids are there, and read no further."""
    follows: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Whether nothing is sampled at random."""
        return self.body.get("temperature") == 0


@dataclass
class Received:
    """One sequence as the client got it; `index` is its place in the response."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Answer:
    """One request's outcome. `error` is None unless the server refused, the connection broke or time ran out.

    `usage` counts over all sequences. `speculation` is vLLM's own `metrics.speculative_decoding`: it needs
    `--per-request-spec-decode-metrics`, and is absent for n > 1, several prompts, a stop string and an abort (0.32).
    """

    ask: Ask
    response_id: str = ""
    sequences: list[Received] = field(default_factory=list)
    usage: Mapping[str, Any] | None = None
    speculation: Mapping[str, Any] | None = None
    hung_up: bool = False
    error: str | None = None

    @property
    def tokens(self) -> int:
        """The token ids that the client got, over all sequences."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    def as_expected(self) -> bool | None:
        """Whether each sequence is the tiny model's greedy answer, as far as it goes; None where that is not known."""
        if self.ask.follows is None or self.error is not None:
            return None
        ignore_eos = bool(self.ask.body.get("ignore_eos"))
        return all(
            sequence.token_ids == greedy(self.ask.follows, len(sequence.token_ids), ignore_eos=ignore_eos)
            for sequence in self.sequences
        )


def complete(name: str, prompt: str, max_tokens: int, **body: Any) -> Ask:
    """A greedy completion of a text that ends with a visible ASCII character; `body` adds to the request."""
    free = "structured_outputs" not in body and "temperature" not in body  # the model alone decides what comes
    hang_up_after = body.pop("hang_up_after", None)
    return Ask(
        name,
        {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **body},
        hang_up_after=hang_up_after,
        follows=prompt[-1] if free else None,
    )


def chat(name: str, text: str, max_tokens: int, **body: Any) -> Ask:
    """A greedy chat with one message; the tiny model's template ends with a colon."""
    messages = [{"role": "user", "content": text}]
    free = "response_format" not in body and "temperature" not in body
    return Ask(
        name,
        {"messages": messages, "max_tokens": max_tokens, "temperature": 0, **body},
        chat=True,
        follows=":" if free else None,
    )


def new_traceparent() -> str:
    """A W3C trace context as a traced client sends it: sampled, with random ids."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def greedy_mix() -> list[Ask]:
    """Every way to end that a client can ask for, with drafts that are right, partly right, wrong and none at all."""
    known = LETTERS + "ab"  # an alphabet, and two letters of the next: every draft after it is right
    misleading = "9".join(LETTERS[:15]) + "9a"  # every letter was followed by a 9 before: every draft is wrong
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return [
        complete("long, drafts right", known, 300),
        complete("long, streamed", LETTERS * 4 + "ab", 200, **stream),
        *(complete(f"{tokens} tokens, drafts wrong", misleading, tokens) for tokens in (4, 6, 8, 10)),
        complete("drafts partly right", "abcdexxxabcdefgyyyab", 24),
        complete("no drafts at all", "5", 8),
        complete("ends by itself", "UVWXYZ-UV", 40),
        complete("ends by itself, streamed", "MNOPQRSTUVWXYZ-MN", 40, **stream),
        *(complete(f"cut off at {limit}", known, limit) for limit in (1, 2, 3, 7)),
        complete("stop token", known, 40, stop_token_ids=[token_id("i")]),
        complete("stop string", known, 40, stop=["ij"]),
        complete("stop string, streamed", known, 40, stop=["op"], **stream),
        complete("end ignored", "UVWXYZ-UV", 20, ignore_eos=True),
        complete("structured: choice", known, 30, structured_outputs={"choice": ["cdxy", "zzz"]}),
        complete("structured: regex", known, 30, structured_outputs={"regex": "cdef[0-9]{4}gh"}),
        complete("structured: json", _PAIRS + "{", 30, structured_outputs={"json": _SCHEMA}),
        Ask("two prompts", {"prompt": [known, "xyz"], "max_tokens": 12, "temperature": 0}),
        chat("chat", LETTERS, 40),
        chat("chat, streamed", LETTERS, 40, **stream),
        chat(
            "chat: json", _PAIRS, 30,
            response_format={"type": "json_schema", "json_schema": {"name": "pair", "schema": _SCHEMA}},
        ),
    ]  # fmt: skip


def sampled() -> list[Ask]:
    """Several sequences of one request, which vLLM allows only with a temperature.

    Send these alone. vLLM 0.32.0 on CPU verifies random samples against a temperature that it never filled in
    (`cpu_triton_utils._expand_kernel_impl` writes into a copy), so drafts are refused at random here, and a greedy
    request of the same step would be judged by that number as well. `top_k` even takes the engine down.
    """
    return [
        complete("three sequences", LETTERS + "ab", 13, n=3, temperature=1.0),
        complete(
            "two sequences, streamed", LETTERS + "ab", 21, n=2, temperature=1.0, stream=True,
            stream_options={"include_usage": True},
        ),
        chat("chat, two sequences", LETTERS, 17, n=2, temperature=1.0),
    ]  # fmt: skip


def aborted() -> list[Ask]:
    """Clients that hang up in mid-stream, long before the end: they ask for all that the tiny model's window holds.

    The engine makes some thousand tokens a second and hears of it late: of 400 tokens none may be left to stop.
    """
    return [
        complete("hangs up", LETTERS + "ab", 1900, stream=True, hang_up_after=12),
        complete("hangs up at once", LETTERS * 2 + "kl", 1900, stream=True, hang_up_after=1),
    ]


async def send(
    url: str,
    model: str,
    asks: Iterable[Ask],
    *,
    at_once: int = 8,
    seconds_each: float = 60.0,
    seconds: float = 180.0,
    answered: Callable[[Answer], None] | None = None,
) -> list[Answer]:
    """Send requests to the server at `url`, `at_once` at a time, and return what came of each, in their order.

    It ends within `seconds`; what has no answer by then has an `error`, as has every single failure. `answered` is
    called with each answer as it comes.
    """
    answers = [Answer(ask) for ask in asks]
    turn = asyncio.Semaphore(at_once)

    async def one(client: httpx.AsyncClient, answer: Answer) -> None:
        async with turn:
            try:
                await asyncio.wait_for(_exchange(client, model, answer), seconds_each)
            except (httpx.HTTPError, asyncio.TimeoutError, ValueError, KeyError) as error:
                answer.error = answer.error or f"{type(error).__name__}: {error}"
        if answered is not None:
            answered(answer)

    # A connection for each request: httpx and vLLM's server both keep an idle one for 5 s, and on a slow machine some
    # requests went out just when the server closed theirs (ReadError).
    # trust_env off: a proxy of the environment has no business between two processes of one machine.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=seconds_each, limits=limits, trust_env=False) as client:
        tasks = [asyncio.ensure_future(one(client, answer)) for answer in answers]
        _, late = await asyncio.wait(tasks, timeout=seconds) if tasks else ((), ())
        for task in late:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for answer, outcome in zip(answers, outcomes, strict=True):
        if isinstance(outcome, asyncio.CancelledError):
            answer.error = f"no answer within {seconds:g} s"
        elif isinstance(outcome, BaseException):
            raise outcome
    return answers


def send_now(url: str, model: str, asks: Iterable[Ask], **options: Any) -> list[Answer]:
    """`send`, for callers without an event loop."""
    return asyncio.run(send(url, model, asks, **options))


async def _exchange(client: httpx.AsyncClient, model: str, answer: Answer) -> None:
    """Send one request and fill in its answer as it comes, so that an interrupted one holds what was there."""
    ask = answer.ask
    path = "/v1/chat/completions" if ask.chat else "/v1/completions"
    body = {"model": model, "return_token_ids": True, **ask.body}
    if not body.get("stream"):
        response = await client.post(path, json=body, headers=ask.headers)
        if response.status_code != 200:
            answer.error = f"HTTP {response.status_code}: {response.text[:300]}"
        else:
            _take(answer, response.json())
        return
    async with client.stream("POST", path, json=body, headers=ask.headers) as response:
        if response.status_code != 200:
            answer.error = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}"
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            _take(answer, json.loads(line.removeprefix("data: ")))
            if ask.hang_up_after is not None and answer.tokens >= ask.hang_up_after:
                answer.hung_up = True
                return  # leaving the stream closes its connection


def _take(answer: Answer, message: Mapping[str, Any]) -> None:
    """Add a whole response, or one chunk of a streamed one, to an answer."""
    if "error" in message:
        answer.error = f"error in the stream: {message['error']}"
        return
    answer.response_id = message["id"]
    for choice in message["choices"]:
        sequence = _sequence(answer.sequences, choice["index"])
        sequence.token_ids += choice.get("token_ids") or ()
        said = choice.get("message") or choice.get("delta")
        sequence.text += (said.get("content") if said else choice.get("text")) or ""
        sequence.finish_reason = choice.get("finish_reason") or sequence.finish_reason
        if choice.get("stop_reason") is not None:
            sequence.stop_reason = choice["stop_reason"]
    answer.usage = message.get("usage") or answer.usage
    answer.speculation = (message.get("metrics") or {}).get("speculative_decoding") or answer.speculation


def _sequence(sequences: list[Received], index: int) -> Received:
    """The sequence with this index; chunks of several come in any order."""
    for sequence in sequences:
        if sequence.index == index:
            return sequence
    sequence = Received(index)
    sequences.append(sequence)
    sequences.sort(key=lambda one: one.index)
    return sequence


def sequences(answers: Sequence[Answer]) -> list[tuple[Answer, Received]]:
    """Every sequence with at least one token, beside its answer: what the engine calls a generation."""
    return [(answer, sequence) for answer in answers for sequence in answer.sequences if sequence.token_ids]
