"""Exemplars that name the generation: what they say within 128 characters, and how it travels.

Ids travel in the `Context` of `Counter.add`, never as attributes: where no view of ours is installed nothing leaks,
and the SDK's own reservoir still finds the request's trace. Needs the OpenTelemetry API alone; the SDK's side is in
`sdk_exemplars`. Runs at a collection, for at most 4 generations of each attribute set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from otel_specdec import names
from otel_specdec.engines import Picked, TraceIds

BUDGET: Final = 128
"""Characters (runes) that Prometheus allows to all labels of an exemplar, names and values; above it drops all of
them."""

_TRACE_LABEL: Final = len("trace_id") + 32
_SPAN_LABEL: Final = len("span_id") + 16

_GENERATION: Final = otel_context.create_key("otel_specdec.generation")

NO_GENERATION: Final = otel_context.set_value(otel_context.create_key("otel_specdec.no_generation"), True, Context())
"""The context of everything that is not one generation's. It holds no span, and it is not empty: an empty one is falsy,
and the SDK then takes the current context, so that a collection inside somebody's span would give our points its
trace."""


@dataclass(frozen=True, slots=True)
class ExemplarLabels:
    """What an exemplar says, cut down to `BUDGET`.

    Attributes:
        attributes: the filtered attributes.
        trace_id: the request's trace, or None.
        span_id: its span; 0 (which OTLP and Prometheus take for none) where only the trace id fitted; None without
            trace.
        time_unix_nano: when the generation finished, moved to a millisecond of its own.
        order: the generation's random number; of several, the lowest are kept.
        lowest_rate: its accept rate, if it was picked for having the lowest.
    """

    attributes: Mapping[str, str]
    trace_id: int | None
    span_id: int | None
    time_unix_nano: int
    order: float
    lowest_rate: float | None = None


def labels_of(picked: Picked, span: trace.SpanContext | None, time_unix_nano: int) -> ExemplarLabels:
    """Keep what fits, dropping in this order: the mark of the lowest accept rate, session, span id, choice, trace id.

    A choice `0` goes before all but that mark: the request's other sequences, if any, have their own choices, and an
    adapter may not know whether there are others (vLLM's scheduler does not). An id is never truncated. One that does
    not even fit alone is left out, and the choice with it, which says nothing then.
    """
    attributes = {names.RESPONSE_ID: picked.response_id}
    if _length(attributes) > BUDGET:
        attributes = {}
    choice = {names.CHOICE: picked.choice} if picked.choice is not None and attributes else {}
    session = {names.CONVERSATION_ID: picked.session_id} if picked.session_id else {}
    pick = {names.PICK: names.LOWEST} if picked.lowest_rate is not None else {}
    has_trace = has_span = span is not None
    for drop in ("nothing", "pick", "choice 0", "session", "span", "choice", "trace"):
        if drop == "pick":
            pick = {}
        elif drop == "choice 0" and picked.choice == "0":
            choice = {}
        elif drop == "session":
            session = {}
        elif drop == "span":
            has_span = False
        elif drop == "choice":
            choice = {}
        elif drop == "trace":
            has_trace = False
        kept = attributes | choice | session | pick
        if _length(kept) + has_trace * _TRACE_LABEL + has_span * _SPAN_LABEL <= BUDGET:
            break
    return ExemplarLabels(
        attributes=kept,
        trace_id=span.trace_id if span is not None and has_trace else None,
        span_id=(span.span_id if has_span else 0) if span is not None and has_trace else None,
        time_unix_nano=time_unix_nano,
        order=picked.order,
        lowest_rate=picked.lowest_rate,
    )


def _length(attributes: Mapping[str, str]) -> int:
    return sum(len(key) + len(value) for key, value in attributes.items())


def context_of(picked: Picked, time_unix_nano: int) -> Context:
    """The context to add this generation's counts in: its labels, and its span for whoever looks for that alone."""
    span = _span_of(picked)
    labels = labels_of(picked, span, time_unix_nano)
    context = otel_context.set_value(_GENERATION, labels, NO_GENERATION)
    if span is not None:
        context = trace.set_span_in_context(trace.NonRecordingSpan(span), context)
    return context


def labels_in(context: Context | None) -> ExemplarLabels | None:
    """The labels that `context_of` put into this context, if it did."""
    labels = otel_context.get_value(_GENERATION, context) if context else None
    return labels if isinstance(labels, ExemplarLabels) else None


def _span_of(picked: Picked) -> trace.SpanContext | None:
    if isinstance(picked.trace, TraceIds):
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if picked.trace.sampled else trace.TraceFlags.DEFAULT)
        span = trace.SpanContext(picked.trace.trace_id, picked.trace.span_id, is_remote=True, trace_flags=flags)
    elif picked.trace:
        headers = {key.lower(): value for key, value in picked.trace.items()}
        extracted = TraceContextTextMapPropagator().extract(headers, Context())
        span = trace.get_current_span(extracted).get_span_context()
    else:
        return None
    return span if span.is_valid else None
