"""Every metric, attribute and ratio name, spelled here and nowhere else. Source: the project's design contract.

Runs at import in every instrumented process: constants only.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

METER: Final = "otel_specdec"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.37.0"
"""The semantic conventions that the ``gen_ai.*`` attributes are taken from (1.37 brought ``gen_ai.provider.name``)."""

# Point attributes. All have few values; an id or a text is never one of them.
PROVIDER: Final = "gen_ai.provider.name"
MODEL: Final = "gen_ai.request.model"
METHOD: Final = "specdec.method"
SOURCE: Final = "specdec.source"
ENGINE_INDEX: Final = "specdec.engine.index"
PROCESS: Final = "specdec.process"
RATIO_SET: Final = "specdec.ratio_set"
POSITION: Final = "specdec.position"
REASON: Final = "specdec.reason"
ERROR_TYPE: Final = "error.type"
OVERFLOW: Final = "otel.metric.overflow"

# Attributes of exemplars: ids live there and nowhere else.
RESPONSE_ID: Final = "gen_ai.response.id"
CHOICE: Final = "specdec.choice"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
PICK: Final = "specdec.pick"

# Values of `SOURCE`: the same generation may be counted by both, so nothing ever sums over this attribute.
ENGINE: Final = "engine"
RESPONSE: Final = "response"

# The value of `PICK`: of all that finished, the one with the lowest accept rate. Others are picked by chance.
LOWEST: Final = "lowest"

# Values of `REASON`.
DUPLICATE: Final = "duplicate"
CONFLICT: Final = "conflict"
INVALID: Final = "invalid"

# Ratios, computed downstream only, and the value of `RATIO_SET` for a point that may enter none of them.
ACCEPTANCE_LENGTH: Final = "acceptance_length"
ACCEPT_RATE: Final = "accept_rate"
TOKENS_PER_VERIFY: Final = "tokens_per_verify"
NONE: Final = "none"

MAX_POSITIONS: Final = 32
"""Draft positions 0 to 31 have series of their own; accepted and proposed count the tokens beyond them all the same."""


class Metric(str, Enum):
    """The monotonic integer counters that this package emits: name, unit and meaning, side by side."""

    unit: str
    description: str

    def __new__(cls, name: str, unit: str, description: str) -> Metric:
        """Keep unit and description beside the name, which is the member's value."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.unit = unit
        member.description = description
        return member

    ACCEPTED = (
        "specdec.accepted_tokens",
        "{token}",
        "Draft tokens that verification accepted, without the bonus token and before stop-trimming.",
    )
    PROPOSED = (
        "specdec.proposed_tokens",
        "{token}",
        "Valid draft tokens put to verification: no padding, none that the grammar invalidated.",
    )
    VERIFY = (
        "specdec.verify_steps",
        "{step}",
        "Steps in which the target model verified at least one valid draft token of a generation.",
    )
    COMPLETION = (
        "specdec.completion_tokens",
        "{token}",
        "Output tokens that the engine committed to a generation.",
    )
    EMITTED = (
        "specdec.emitted_tokens",
        "{token}",
        "Tokens that verify steps really emitted, after trimming at EOS, stop token or length.",
    )
    GENERATIONS = (
        "specdec.generations",
        "{generation}",
        "Finished generations (output sequences with at least one token).",
    )
    POSITION_ACCEPTED = (
        "specdec.position.accepted_tokens",
        "{token}",
        "Accepted draft tokens by draft position.",
    )
    POSITION_PROPOSED = (
        "specdec.position.proposed_tokens",
        "{token}",
        "Proposed draft tokens by draft position.",
    )
    TRIMMED = (
        "specdec.trimmed_tokens",
        "{token}",
        "Completed tokens that the front end did not hand on: behind a stop string, or after the client had gone.",
    )
    DROPPED_REPORTS = (
        "specdec.dropped_reports",
        "{report}",
        "Reports handed to a recorder that were not counted, by reason.",
    )
    ERRORS = (
        "specdec.instrumentation.errors",
        "{error}",
        "Failures inside this instrumentation, all kept from the engine.",
    )


DRAIN: Final = "specdec.drain"
"""The observable whose callback moves the pool's sums into the counters. It observes nothing, so nothing is
exported."""

RATIOS: Final[dict[str, tuple[Metric, Metric]]] = {
    ACCEPTANCE_LENGTH: (Metric.EMITTED, Metric.VERIFY),
    ACCEPT_RATE: (Metric.ACCEPTED, Metric.PROPOSED),
    TOKENS_PER_VERIFY: (Metric.COMPLETION, Metric.VERIFY),
}
"""Each ratio's numerator and denominator. The one to look at first comes first."""


# What a `BatchSummary` is called in an experiment tracker: flat names under one prefix, by the fields of `SpecCounts`
# or by ratio. Numerators, denominators and covered generations are what ranks are merged by.
TRACKED_TOTALS: Final = {
    field: f"spec/{field}_total" for field in ("accepted", "proposed", "verify", "completion", "emitted")
}
TRACKED_RATIOS: Final = {ratio: f"spec/{ratio}" for ratio in RATIOS}
TRACKED_COVERAGE: Final = {ratio: f"spec/coverage/{ratio}" for ratio in RATIOS}
TRACKED_NUMERATORS: Final = {ratio: f"spec/numerator/{ratio}" for ratio in RATIOS}
TRACKED_DENOMINATORS: Final = {ratio: f"spec/denominator/{ratio}" for ratio in RATIOS}
TRACKED_COVERED: Final = {ratio: f"spec/covered/{ratio}" for ratio in RATIOS}
TRACKED_GENERATIONS: Final = "spec/unique_generation_count"
TRACKED_REPORTS: Final = "spec/record_occurrence_count"
TRACKED_DUPLICATES: Final = "spec/duplicate_record_count"
TRACKED_CONFLICTS: Final = "spec/conflicting_generation_count"
TRACKED_SAMPLES: Final = "spec/sample_count"

PER_SAMPLE: Final = {"spec_accept_rate": ACCEPT_RATE, "spec_accept_length": TOKENS_PER_VERIFY}
"""What slime, miles and vime call their means over samples, and the ratio that each is a mean of."""

TRACKED_SAMPLE_SUMS: Final = {mean: f"spec/sample_sum/{mean}" for mean in PER_SAMPLE}
TRACKED_SAMPLE_FRACTIONS: Final = {mean: f"spec/sample_sum_fraction/{mean}" for mean in PER_SAMPLE}
"""A sum is exact, and split into whole and fraction so that each half fits into the tracker's 64-bit float."""


def ratio_set(metric: Metric, holding: frozenset[str]) -> str:
    """The value of `RATIO_SET` for a point of `metric` whose increment may enter the ratios `holding`.

    Names are sorted and joined by commas; a counter names only ratios that it is a half of (`specdec.generations`:
    any of them, for the coverage); `none` where nothing is left.
    """
    names = sorted(r for r in holding if metric is Metric.GENERATIONS or metric in RATIOS[r])
    return ",".join(names) or NONE
