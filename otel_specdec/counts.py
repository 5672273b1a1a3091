"""The raw counts of a generation, known or unknown, and which ratios an increment of them may enter.

Engine-neutral and free of OpenTelemetry; pure functions on small values. Meanings: the project's design contract.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from itertools import compress, product
from typing import TYPE_CHECKING, Any, Final

from otel_specdec import names

if TYPE_CHECKING:
    from opentelemetry.context import Context

LARGEST: Final = 2**63 - 1
"""OTLP carries a count as a signed 64-bit integer."""

LONGEST_LABEL: Final = 512
"""Characters of a model, provider or method; a longer one is no name, and no label."""


def carried(value: object, longest: int = 0) -> str | None:
    """A text that OTLP can carry, None where it is none, empty, or longer than `longest` characters (0: any length)."""
    if not isinstance(value, str) or not value or (longest and len(value) > longest):
        return None
    # JSON can spell half a surrogate pair, which no UTF-8 has: one such model name would fail every export.
    return value.encode("utf-8", errors="replace").decode()


def _count(owner: str, name: str, value: object) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{owner}.{name} must be an integer or None, not a boolean")
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # the TypeError is what we ask for
    except TypeError:
        raise TypeError(f"{owner}.{name} must be an integer or None, not {type(value).__name__}") from None
    if not 0 <= number <= LARGEST:
        # Python refuses to print an integer of more than 4,300 digits.
        shown = number if number.bit_length() <= 128 else f"an integer of {number.bit_length()} bits"
        raise ValueError(f"{owner}.{name} must lie in 0 … 2**63 - 1, not {shown}")
    return number


@dataclass(frozen=True, slots=True)
class SpecCounts:
    """Counts of one generation, or of any sum of generations. `None` is unknown, which is not zero.

    Attributes:
        accepted: draft tokens that verification accepted, bonus token excluded, before stop-trimming (tokens, ≥ 0).
        proposed: valid draft tokens put to verification (tokens, ≥ 0).
        verify: steps in which the target model verified at least one valid draft token (steps, ≥ 0).
        completion: output tokens committed to the generation (tokens, ≥ 0).
        emitted: tokens that the verify steps emitted after trimming (tokens, ≥ 0).

    Raises:
        TypeError: a count is neither an integer nor None (booleans are refused).
        ValueError: a count is negative or does not fit into a signed 64-bit integer.

    Source of the definitions: the table "The counters" of the design contract, repeated in the README.
    """

    accepted: int | None = None
    proposed: int | None = None
    verify: int | None = None
    completion: int | None = None
    emitted: int | None = None

    def __post_init__(self) -> None:
        for name in COUNT_FIELDS:
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                object.__setattr__(self, name, _count("SpecCounts", name, value))
            elif value is not None and not 0 <= value <= LARGEST:
                _count("SpecCounts", name, value)

    @property
    def knows_drafts(self) -> bool:
        """Whether anything about drafts is known: the number of completion tokens alone says nothing of them."""
        return not (self.accepted is None and self.proposed is None and self.verify is None)

    def plus(self, other: SpecCounts, *, missing_did_not_run: bool = False) -> SpecCounts:
        """The counts of a generation that was resumed: these, and those of its next part.

        A sum is known only where both parts are: what one of them did not report is not zero. With
        `missing_did_not_run` the caller vouches that whatever is unknown in one part never happened in it (a part that
        was aborted in the queue), and the known half is the sum. What both do not know stays unknown.

        Raises:
            ValueError: a sum does not fit into a signed 64-bit integer.
        """

        def total(one: int | None, two: int | None) -> int | None:
            if one is not None and two is not None:
                return one + two
            return (two if one is None else one) if missing_did_not_run else None

        return SpecCounts(*map(total, counts_of(self), counts_of(other)))

    def as_dict(self) -> dict[str, int | None]:
        """These counts by name, for JSON: an unknown one is there as None, which is not 0."""
        return dict(zip(COUNT_FIELDS, counts_of(self), strict=True))


COUNT_FIELDS: Final = tuple(f.name for f in fields(SpecCounts))

counts_of: Final[Callable[[SpecCounts], tuple[int | None, ...]]] = operator.attrgetter(*COUNT_FIELDS)
"""The counts in the order of `COUNT_FIELDS`, as cheap as it gets."""

METRIC_OF_FIELD: Final = {
    "accepted": names.Metric.ACCEPTED,
    "proposed": names.Metric.PROPOSED,
    "verify": names.Metric.VERIFY,
    "completion": names.Metric.COMPLETION,
    "emitted": names.Metric.EMITTED,
}


def ratios_holding(increment: SpecCounts) -> frozenset[str]:
    """The ratios that this increment may enter: both halves known, and consistent with each other.

    `accept_rate` wants accepted ≤ proposed; `acceptance_length` wants emitted ≤ accepted + verify and
    emitted ≤ completion, each where known; `tokens_per_verify` has no bound of its own.
    """
    accepted, proposed, verify = increment.accepted, increment.proposed, increment.verify
    completion, emitted = increment.completion, increment.emitted
    return _SETS[
        accepted is not None and proposed is not None and accepted <= proposed,
        completion is not None and verify is not None,
        emitted is not None
        and verify is not None
        and (accepted is None or emitted <= accepted + verify)
        and (completion is None or emitted <= completion),
    ]


ALL_RATIOS: Final = frozenset(names.RATIOS)

# The eight sets there are: a batch of a hundred thousand reports asks for them as often.
_SETS: Final = {
    held: frozenset(compress((names.ACCEPT_RATE, names.TOKENS_PER_VERIFY, names.ACCEPTANCE_LENGTH), held))
    for held in product((False, True), repeat=len(names.RATIOS))
}

RATIO_SETS: Final = tuple(_SETS.values())
"""The same in an order that never changes within a process, so that a number can stand for each."""


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """What one response tells about one generation. Counts are cumulative over the generation's life.

    Attributes:
        generation_id: the generation's id, unique within its session; never empty, never a metric attribute.
        counts: its counts so far (`finished=False`) or in all (`finished=True`).
        session_id: the session, rollout step or batch in which `generation_id` is unique; None is a session too.
        sample_id: the training sample that the generation belongs to, if any.
        model: the model's name as the engine reports it (`gen_ai.request.model`).
        provider: the engine (`gen_ai.provider.name`): `vllm`, `sglang`, …
        method: the drafting method (`specdec.method`): `ngram`, `eagle3`, …
        engine_index: data-parallel rank of the engine (`specdec.engine.index`, ≥ 0).
        finished: whether this is the generation's last report.
        accepted_by_position: accepted draft tokens by draft position, cumulative (tokens, ≥ 0).
        proposed_by_position: proposed draft tokens by draft position, cumulative, of the same length.
        context: the OpenTelemetry context of the request; it is not part of the report's identity or equality.

    Raises:
        TypeError, ValueError: a field has the wrong type or range; the message names it.
    """

    generation_id: str
    counts: SpecCounts
    session_id: str | None = None
    sample_id: str | None = None
    model: str | None = None
    provider: str | None = None
    method: str | None = None
    engine_index: int | None = None
    finished: bool = True
    accepted_by_position: Sequence[int] | None = None
    proposed_by_position: Sequence[int] | None = None
    context: Context | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.generation_id, str) or not self.generation_id:
            raise ValueError(f"generation_id must be a non-empty string, not {type(self.generation_id).__name__}")
        if not isinstance(self.counts, SpecCounts):
            raise TypeError(f"counts must be SpecCounts, not {type(self.counts).__name__}")
        for name in ("session_id", "sample_id", "model", "provider", "method"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} must be a string or None, not {type(value).__name__}")
        if self.engine_index is not None:
            object.__setattr__(self, "engine_index", _count("GenerationReport", "engine_index", self.engine_index))
        if not isinstance(self.finished, bool):
            raise TypeError(f"finished must be a boolean, not {type(self.finished).__name__}")
        for name in ("accepted_by_position", "proposed_by_position"):
            value = getattr(self, name)
            if value is not None:
                if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping, Set)):
                    raise TypeError(f"{name} must be a sequence of integers or None, not {type(value).__name__}")
                checked = tuple(_count("GenerationReport", name, each) for each in value)
                object.__setattr__(self, name, checked)

    def as_dict(self) -> dict[str, object]:
        """This report for JSON: unknown counts as None, other fields only where they are known, no `context`."""
        data: dict[str, object] = {
            "generation_id": self.generation_id,
            "counts": self.counts.as_dict(),
            "finished": self.finished,
        }
        data.update((name, value) for name in _OPTIONAL if (value := getattr(self, name)) is not None)
        data.update((name, list(value)) for name in _POSITIONS if (value := getattr(self, name)) is not None)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GenerationReport:
        """The report that `as_dict` gave, also after a trip through JSON; names that it does not know are ignored.

        Counts that were stored as an engine named them are read too, whatever the form (`counts_from_payload`): under
        `counts`, or beside the other fields where there is no `counts`.

        Raises:
            TypeError, ValueError: a field is missing or has the wrong type or range; the message names it.
        """
        stored = data.get("counts")
        if isinstance(stored, Mapping) and not stored.keys().isdisjoint(COUNT_FIELDS):
            counts = SpecCounts(**{name: stored.get(name) for name in COUNT_FIELDS})
        else:
            from otel_specdec.payloads import counts_from_payload  # which makes reports, and so imports this module

            counts = counts_from_payload(data if stored is None else stored)
        return cls(
            generation_id=data.get("generation_id", ""),
            counts=counts,
            finished=data.get("finished", True),
            **{name: data.get(name) for name in (*_OPTIONAL, *_POSITIONS)},
        )


_OPTIONAL: Final = ("session_id", "sample_id", "model", "provider", "method", "engine_index")
_POSITIONS: Final = ("accepted_by_position", "proposed_by_position")
