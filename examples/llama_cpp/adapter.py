"""Counts speculative decoding of a llama.cpp server from its answers. One file, to be copied into a client or gateway.

A llama.cpp server (`llama-server`) has no process of Python's to hook into; what it tells of a generation is the object
`timings` of its answers (ggml-org/llama.cpp, tools/server/server-task.cpp, `result_timings::to_json`):

    draft_n             draft tokens that the model verified                               proposed
    draft_n_accepted    those of them that it accepted, without the bonus token            accepted
    predicted_n         tokens of the generation                                           completion
    draft_rounds        verify steps; only from mlx-vlm's server, which speaks alike       verify

The two draft counters are left out where they are 0, be it that nothing was drafted yet or that the server does not
speculate at all: unknown, which is not 0. Make the recorder with `speculation=True` where the server speculates; then
such generations are counted too, and coverage shows them.

What the answers of build 10434 look like, which is what the tests have:

- `/completion` has no id and, for several prompts or n > 1, a list; each element has its own `timings`. Pass the id of
  the request for exemplars to name; without one a generation is named at random.
- `/v1/completions`, `/v1/chat/completions`: one `timings`, and one usage, **of one sequence alone** also where n > 1.
  Which one it does not say, so all of them are unknown. Streamed, every sequence has its own.
- Streams: `timings` is in each sequence's last chunk (in the chunk without choices where usage was asked for), and with
  `timings_per_token` in all of them, cumulative. A client that hangs up before has counted nothing, or up to there.
- `/v1/responses`, `/v1/messages`: no `timings`, nothing to count.

Builds differ in how they count a draft that was accepted in part where the target's cache cannot be rolled back (SWA,
recurrent and hybrid models): ggml-org/llama.cpp#25682.

Thread-safe as far as the recorder is; a `Stream` belongs to one stream.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from otel_specdec import GenerationReport, SpecCounts, SpecDecRecorder

PROVIDER = "llama.cpp"
LARGEST = 2**63 - 1  # what OTLP carries


class LlamaCpp:
    """Hands a server's answers to a recorder.

    `model`: its name, where that is not the one in the answers (an alias, or what the client asked for). `method`: the
    drafting method (`--spec-type`), which only the native answers tell.
    """

    def __init__(self, recorder: SpecDecRecorder, *, model: str | None = None, method: str | None = None) -> None:
        self._recorder = recorder
        self._model = model
        self._method = method

    def count(self, answer: object, *, request_id: str | None = None) -> None:
        """Count a whole answer: JSON text, or what it stands for. Never raises for what it says."""
        Stream(self, request_id or uuid.uuid4().hex).take(_parsed(answer))

    def stream(self, *, request_id: str | None = None) -> Stream:
        """For a streamed answer: `add` each line of it, as it passes."""
        return Stream(self, request_id or uuid.uuid4().hex)

    def record(self, base: str, index: int, finished: bool, counts: SpecCounts, message: Mapping[str, Any]) -> None:
        model = self._model or message.get("model")
        report = GenerationReport(
            generation_id=base if index == 0 else f"{base}#{index}",  # as the package's own reader names them
            counts=counts,
            model=model if isinstance(model, str) else None,
            provider=PROVIDER,
            method=self._method or _method_of(message),
            finished=finished,
        )
        self._recorder.record(report)


class Stream:
    """The messages of one answer."""

    def __init__(self, server: LlamaCpp, request_id: str) -> None:
        self._server = server
        self._request_id = request_id
        self._without_choice = 0

    def add(self, line: str | bytes) -> None:
        """Take a line of the event stream. Never raises for what it says."""
        text = line.decode("utf-8", errors="replace") if isinstance(line, bytes) else line
        self.take(_parsed(text.strip().removeprefix("data:")))

    def take(self, message: object) -> None:
        """Take a message: an answer, or a chunk of one."""
        for each in message if isinstance(message, list) else [message]:
            if isinstance(each, dict):
                for index, finished, counts in self._generations(each):
                    given = each.get("id")
                    base = given if isinstance(given, str) and given else self._request_id
                    self._server.record(base, index, finished, counts, each)

    def _generations(self, message: Mapping[str, Any]) -> Iterator[tuple[int, bool, SpecCounts]]:
        """Index, whether it is finished, and counts of each generation that the message tells of."""
        timings, choices = message.get("timings"), message.get("choices")
        if not isinstance(timings, dict):
            return
        counts = counts_of(timings)
        if not isinstance(choices, list):  # the native endpoint
            finished = message.get("stop") is not False
            index = message.get("index")
        elif len(choices) > 1:  # whole, n > 1
            yield from ((i, True, SpecCounts()) for i in range(len(choices)))
            return
        elif not choices:  # the chunk with the usage; with n > 1 there is one for each, without its index
            finished, index = True, self._without_choice
            self._without_choice += 1
        elif isinstance(choices[0], dict):
            finished = choices[0].get("finish_reason") is not None
            index = choices[0].get("index")
        else:
            return
        # While it runs, drafts that are not there may be none yet: said now, they would be unknown for good.
        if finished or counts.accepted is not None:
            yield index if isinstance(index, int) else 0, finished, counts


def counts_of(timings: Mapping[str, Any]) -> SpecCounts:
    """What `timings` tells; accepted and proposed only both together."""
    accepted, proposed = _count(timings, "draft_n_accepted"), _count(timings, "draft_n")
    if accepted is None or proposed is None:
        accepted = proposed = None
    return SpecCounts(accepted, proposed, _count(timings, "draft_rounds"), _count(timings, "predicted_n"))


def _count(timings: Mapping[str, Any], name: str) -> int | None:
    value = timings.get(name)
    return value if type(value) is int and 0 <= value <= LARGEST else None


def _method_of(message: Mapping[str, Any]) -> str | None:
    """The one method in use, from the native answer's `generation_settings`; several are nobody's."""
    settings = message.get("generation_settings")
    types = settings.get("speculative.types") if isinstance(settings, dict) else None
    used = [each for each in types.split(",") if each != "none"] if isinstance(types, str) else []
    return used[0] if len(used) == 1 else None


def _parsed(answer: object) -> object:
    if not isinstance(answer, (str, bytes)):
        return answer
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):  # `[DONE]`, an empty line, an answer that broke off
        return None
