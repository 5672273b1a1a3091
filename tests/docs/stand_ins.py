"""What the snippets of the pages have around them: answers of an engine, a tracker, an engine that is only named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any


def answer(name: str, completion: int, steps: int, drafted: int, accepted: int) -> dict[str, Any]:
    counts = {"num_spec_steps": steps, "num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted}
    return {
        "id": name,
        "model": "m",
        "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
        "usage": {"completion_tokens": completion},
        "metrics": {"speculative_decoding": counts},
    }


def generate() -> list[dict[str, Any]]:
    """Two answers of vLLM of very different ratios."""
    return [answer("cmpl-1", 10, 8, 32, 1), answer("cmpl-2", 4000, 1000, 4000, 3000)]


class Stream:
    """A streamed answer, as httpx reads it."""

    def iter_lines(self) -> Iterator[str]:
        first, last = answer("cmpl-3", 4, 2, 8, 2), answer("cmpl-3", 4, 2, 8, 2)
        first["choices"][0]["finish_reason"] = None
        del first["usage"], first["metrics"]
        yield f"data: {json.dumps(first)}"
        yield f"data: {json.dumps(last)}"
        yield "data: [DONE]"


class Tracker:
    """An experiment tracker."""

    logged: Mapping[str, float] = {}

    def log(self, values: Mapping[str, float]) -> None:
        self.logged = values


tracker = Tracker()
sglang = SimpleNamespace(Engine=lambda **settings: SimpleNamespace(**settings))
"""The real one runs in tests/sglang, by the same arguments."""
