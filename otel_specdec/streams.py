"""A streamed response put together again, as far as its counters go. Pure; keeps no text, and no chunk."""

from __future__ import annotations

from typing import Any, Final

from otel_specdec.payloads import at, get, parsed

_IDENTITY: Final = ("id", "request_id", "model")
# vLLM has usage and metrics in one last chunk, llama.cpp its timings in the last one or in every one (cumulative).
_COUNTERS: Final = ("usage", "metrics", "timings", "meta_info")


class StreamedResponse:
    """Takes the chunks of one streamed response as they pass, and says what a whole one would have said of counters.

    Needed because no chunk says it all: SGLang's OpenAI endpoints have the drafts in one and the usage in another, and
    the chunk with the usage does not tell how many choices it was summed over. A client has to ask for them:
    `stream_options={"include_usage": true}`, for SGLang also `return_spec_tokens_details`.

    Holds the few objects with counters, and the reason to finish of each choice. Not thread-safe.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}
        self._finish_reasons: dict[int, object] = {}

    def add(self, chunk: object) -> None:
        """Take a chunk: a mapping, an object with attributes, a JSON text, or a line of the event stream.

        Never raises for what a chunk says. Lines without data, and `[DONE]`, say nothing.
        """
        message = parsed(_data(chunk))
        for name in _IDENTITY:
            # The first: SGLang gives the chunks of each choice an id of their own.
            if (value := get(message, name)) is not None:
                self._kept.setdefault(name, value)
        if isinstance(form := get(message, "object"), str):
            self._kept["object"] = form.removesuffix(".chunk")  # put together, it is none
        for name in _COUNTERS:
            if (value := get(message, name)) is not None:
                self._kept[name] = value
        # SGLang sends token ids under the same name, in a chunk of their own.
        if (details := at(message, ("sglext", "spec_tokens_details"))) is not None:
            self._kept["sglext"] = {"spec_tokens_details": details}
        choices = get(message, "choices")
        for choice in choices if isinstance(choices, (list, tuple)) else ():
            index = get(choice, "index")
            if isinstance(index, int):
                reason = get(choice, "finish_reason")
                self._finish_reasons[index] = self._finish_reasons.get(index) if reason is None else reason

    @property
    def payload(self) -> dict[str, Any]:
        """The response so far, for `record_payload` or `reports_from_payload`; hand it over once, at the end.

        Of a stream that broke off before its usage there is nothing to count, and no report.
        """
        choices = [{"index": i, "finish_reason": reason} for i, reason in sorted(self._finish_reasons.items())]
        return {**self._kept, "choices": choices}


def _data(chunk: object) -> object:
    if isinstance(chunk, (bytes, bytearray)):
        chunk = chunk.decode("utf-8", errors="replace")
    if isinstance(chunk, str):
        chunk = chunk.strip()
        chunk = chunk.removeprefix("data:").strip()
    return chunk
