"""Counts and reports from what engines answer: one table of their names, one reader for all of them.

Pure but for the log; runs wherever the application calls it, some ten microseconds a payload. Nothing that a payload
says makes it raise, and what it reads of one is bounded: never the text, never deeper than the table or the search for
unknown names goes. A new engine, or new names of an old one, is one more row of `FAMILIES`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Final, NamedTuple

from otel_specdec import names
from otel_specdec.counts import LARGEST, LONGEST_LABEL, GenerationReport, SpecCounts, carried

logger = logging.getLogger("otel_specdec")

Path = tuple[str, ...]


class Family(NamedTuple):
    """The names that an engine gives its counters, from one version on until it renames them.

    Attributes:
        provider: the engine, as `gen_ai.provider.name`.
        places: the objects of a payload in which they may stand; `()` is the payload itself.
        accepted, proposed, verify: the counters' names, all three of the same object.
        histogram: where a step that accepted j drafts adds 1 to element j; "" where there is none.
        step_drafts: a list with each step's number of drafts; "" where there is none.
        most: the highest number of drafts that a step can have; "" where every step of a request has the same number.
    """

    provider: str
    places: tuple[Path, ...]
    accepted: str
    proposed: str
    verify: str
    histogram: str = ""
    step_drafts: str = ""
    most: str = ""


# meta_info: the native /generate, and `choices[].meta_info` of the chat endpoint. The payload itself: what a framework
# has stored of a meta_info. sglext: the OpenAI endpoints, asked with `return_spec_tokens_details`
# (srt/entrypoints/openai/protocol.py).
_SGLANG: Final = (("meta_info",), (), ("sglext", "spec_tokens_details"))

FAMILIES: Final = (
    # SGLang, srt/managers/tokenizer_manager.py. 0.5.12 has the names of 0.5.11 beside its own. Its proposed is not
    # counted but computed, verify steps × (draft tokens of the configuration − 1): each step has the same number.
    Family(
        "sglang", _SGLANG, "spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_verify_ct",
        histogram="spec_correct_drafts_histogram",
    ),
    Family(
        "sglang", _SGLANG, "spec_accepted_drafts", "spec_proposed_drafts", "spec_verify_ct",
        histogram="spec_accept_histogram",
    ),
    Family(
        "sglang", _SGLANG, "spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct",
        histogram="spec_accept_histogram",
    ),
    # vLLM 0.30 on, with --per-request-spec-decode-metrics (v1/metrics/stats.py: RequestSpecDecodeMetrics.to_dict).
    Family(
        "vllm", (("metrics", "speculative_decoding"),),
        "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_steps",
        histogram="acceptance_histogram", step_drafts="per_step_drafted", most="num_spec_tokens",
    ),
    # llama.cpp, tools/server; mlx-vlm follows it and adds draft_rounds.
    Family("llama.cpp", (("timings",),), "draft_n_accepted", "draft_n", "draft_rounds"),
)  # fmt: skip
"""Newest names of an engine first. The design contract has the same table."""

COMPLETIONS: Final[tuple[Path, ...]] = (
    ("meta_info", "completion_tokens"),
    ("completion_tokens",),
    ("usage", "completion_tokens"),
    ("timings", "predicted_n"),
)
"""Where the completion tokens may stand; they are those of all choices together."""

_IDS: Final[tuple[Path, ...]] = (("id",), ("meta_info", "id"), ("request_id",))


def counts_from_payload(payload: object) -> SpecCounts:
    """What a response says about its generations, unknown where it does not say it. Pure, and never raises.

    Args:
        payload: a whole response, or the last message of a streamed one: a mapping, a JSON text (str or bytes), or an
            object that has the same names as attributes. A list is taken for several responses.

    Returns:
        accepted and proposed from one and the same family of names (`FAMILIES`), the newest that has both; verify from
        that family; completion from wherever it stands. `emitted` is in no engine's response. A boolean, a negative, a
        float, a text or a number above 2**63 - 1 is unknown, never 0. With several choices the counts are those of all
        of them together, and a count that one of them lacks is unknown.
    """
    found = read_safely(payload)
    warn_of(found.problem)
    return found.counts


def check_texts(**arguments: object) -> None:
    """TypeError where an argument is neither a string nor None: what the caller says is not excused as payloads are."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} must be a string or None, not {type(value).__name__}")


def reports_from_payload(
    payload: object, *, session_id: str | None = None, generation_id: str | None = None
) -> list[GenerationReport]:
    """One report for each generation that a response tells about. Never raises for what the payload says.

    With several choices (n > 1, several prompts) each is a generation of its own, `<id>#<choice>` (`split_choice`). A
    usage summed over them belongs to none of them: their completion is unknown, and so are their drafts, unless the
    engine gives each choice its own (SGLang: `choices[].meta_info`, or `sglext.spec_tokens_details` as a list).

    Chunks of a streamed response that hold no counters give no report, and the one with the usage gives the final
    report. Where a stream spreads its counters over several chunks (SGLang's OpenAI endpoints), or has several choices,
    `StreamedResponse` puts them together first.

    Args:
        payload: as for `counts_from_payload`.
        session_id: the session, rollout step or batch in which the response's id is unique.
        generation_id: instead of the response's id, or where it has none. A response with counters and no id at all
            gives no report, because it could not be told from a second reading of the same; a warning says so once.

    Raises:
        TypeError: `session_id` or `generation_id` is neither a string nor None.
    """
    check_texts(session_id=session_id, generation_id=generation_id)
    found = read_safely(payload, session_id=session_id, generation_id=generation_id)
    warn_of(found.problem or found.unidentified)
    return found.reports


def split_choice(generation_id: str) -> tuple[str, str | None]:
    """The response's id and the choice, of an id that `reports_from_payload` made for one of several choices.

    The choice is `<prompt>.<child>`, as in the exemplars of an engine, where the response shows that it has one prompt:
    every chat, and SGLang's list of details. Elsewhere it is the choice's index, which is the prompt's unless n > 1.
    """
    response_id, mark, choice = generation_id.rpartition("#")
    return (response_id, choice) if mark and choice.replace(".", "", 1).isdecimal() else (generation_id, None)


class Read(NamedTuple):
    """What was read of a payload.

    Attributes:
        counts: of all its generations together.
        reports: one for each of them.
        problem: what could not be read and should have been; empty if all is well.
        unidentified: why there are counts and no report; empty otherwise.
    """

    counts: SpecCounts
    reports: list[GenerationReport]
    problem: str = ""
    unidentified: str = ""


_NOTHING: Final = SpecCounts()


def read(payload: object, *, session_id: str | None = None, generation_id: str | None = None) -> Read:
    """Counts, reports and what is wrong with the payload, in one go; see the two public functions."""
    message = parsed(payload)
    if isinstance(message, (list, tuple)):
        return _read_list(message, session_id, generation_id)
    if message is None or isinstance(message, (str, int, float)):
        return Read(_NOTHING, [], f"it is no response ({type(payload).__name__})")
    return _read_message(message, session_id, generation_id)


def read_safely(payload: object, *, session_id: str | None = None, generation_id: str | None = None) -> Read:
    """As `read`, whatever the payload does when it is read: it may be foreign code, with properties and numbers."""
    try:
        return read(payload, session_id=session_id, generation_id=generation_id)
    except Exception as error:
        return Read(_NOTHING, [], f"reading it failed ({type(error).__name__})")


_warned: set[str] = set()


def warn_of(problem: str) -> None:
    """Log what is wrong with payloads, each problem once and at most 32 of them: their names are the payloads' own."""
    if problem and problem not in _warned and len(_warned) < 32:
        _warned.add(problem)
        logger.warning(
            "otel_specdec: a payload's speculative decoding could not be read: %s. This is shown once; "
            "`record_payload` counts every one under %s, %s=%s.",
            problem, names.Metric.DROPPED_REPORTS.value, names.REASON, names.INVALID,
        )  # fmt: skip


# One message


class _Reading(NamedTuple):
    """What one object says about one generation."""

    counts: SpecCounts = _NOTHING
    provider: str | None = None
    positions: tuple[Sequence[int], Sequence[int]] | None = None
    has_pair: bool = False


def _read_list(messages: Sequence[object], session_id: str | None, generation_id: str | None) -> Read:
    counts: SpecCounts | None = None
    reports: list[GenerationReport] = []
    problem = unidentified = ""
    for number, message in enumerate(messages):
        if isinstance(message, (list, tuple)):
            continue  # no engine nests them, and nesting has no end
        given = f"{generation_id}#{number}" if generation_id and len(messages) > 1 else generation_id
        found = read(message, session_id=session_id, generation_id=given)
        counts = found.counts if counts is None else _sum(counts, found.counts)
        reports += found.reports
        problem, unidentified = problem or found.problem, unidentified or found.unidentified
    return Read(counts or _NOTHING, reports, problem, unidentified)


def _read_message(message: object, session_id: str | None, generation_id: str | None) -> Read:
    choices = _choices(message)
    details = at(message, ("sglext", "spec_tokens_details"))
    listed = details if isinstance(details, (list, tuple)) else ()
    if max(len(choices or ()), len(listed)) > 1 or listed:
        # An object instead of a list is the first prompt's alone (SGLang: n == 1 and several prompts).
        readings = _of_each(choices or (), listed if details is None or listed else [details])
        counts = _together(message, readings)
    else:
        readings = [_of_one(message, choices or ())]
        counts = readings[0].counts
    problem = "" if any(reading.has_pair for reading in readings) else _unread_names(message, choices or [])
    if not _is_report(message, choices, counts):
        return Read(counts, [], problem)
    base = generation_id or next(filter(None, (carried(at(message, path)) for path in _IDS)), None)
    if base is None:
        why = "it has counters but no id; pass generation_id" if counts != _NOTHING else ""
        return Read(counts, [], problem, why)
    finished = _is_finished(message, choices)
    model = carried(get(message, "model"), LONGEST_LABEL)
    rank = _count(at(message, ("meta_info", "dp_rank")))
    # Of a response without draft counters only the form tells the engine, and only SGLang's has a form of its own.
    native = "sglang" if get(message, "meta_info") is not None else None
    provider = next((reading.provider for reading in readings if reading.provider), native)
    one_prompt = bool(listed) or _is_chat(message)
    reports = [
        GenerationReport(
            base if len(readings) == 1 else f"{base}#0.{index}" if one_prompt else f"{base}#{index}",
            reading.counts,
            session_id=session_id,
            model=model,
            provider=provider,
            engine_index=rank,
            finished=finished,
            accepted_by_position=reading.positions[0] if reading.positions else None,
            proposed_by_position=reading.positions[1] if reading.positions else None,
        )
        for index, reading in enumerate(readings)
    ]
    return Read(counts, reports, problem)


def _of_one(message: object, choices: Sequence[object]) -> _Reading:
    """A response with one generation: its counters stand at the top, or in the choice's own `meta_info`."""
    reading = _reading(message)
    for choice in choices:
        if not reading.counts.knows_drafts:
            own = _reading(choice)
            if own.counts.knows_drafts:
                completion = own.counts.completion if own.counts.completion is not None else reading.counts.completion
                reading = own._replace(counts=replace(own.counts, completion=completion))
    return reading


def _of_each(choices: Sequence[object], details: Sequence[object]) -> list[_Reading]:
    """A response with several generations: what the engine says of each, in the order of the choices.

    SGLang has no entry in `details` for a choice without a verify step, so a short list may be off by some choices.
    That changes no sum: all of them have the same attributes, and none has a completion of its own.
    """
    readings = [_reading(choice) for choice in choices]
    if any(reading.counts.knows_drafts for reading in readings):
        return readings
    return [_reading(detail) for detail in details] + readings[len(details) :]


def _together(message: object, readings: Sequence[_Reading]) -> SpecCounts:
    """The counts of all generations of a response; the completion may be known for all of them alone."""
    counts = readings[0].counts
    for reading in readings[1:]:
        counts = _sum(counts, reading.counts)
    return counts if counts.completion is not None else replace(counts, completion=_completion(message))


def _sum(one: SpecCounts, two: SpecCounts) -> SpecCounts:
    try:
        return one.plus(two)
    except ValueError:  # a sum above 2**63 - 1
        return _NOTHING


def _reading(message: object) -> _Reading:
    completion = _completion(message)
    verify_alone: _Reading | None = None
    for family in FAMILIES:
        for path in family.places:
            place = at(message, path)
            if place is None:
                continue
            verify = _count(get(place, family.verify))
            accepted, proposed = _count(get(place, family.accepted)), _count(get(place, family.proposed))
            if accepted is not None and proposed is not None:
                counts = SpecCounts(accepted, proposed, verify, completion)
                return _Reading(counts, family.provider, _positions(place, family, counts), has_pair=True)
            if verify is not None and verify_alone is None:
                verify_alone = _Reading(SpecCounts(verify=verify, completion=completion), family.provider)
    return verify_alone or _Reading(SpecCounts(completion=completion))


def _completion(message: object) -> int | None:
    return next((count for path in COMPLETIONS if (count := _count(at(message, path))) is not None), None)


def _choices(message: object) -> Sequence[object] | None:
    choices = get(message, "choices")
    return choices if isinstance(choices, (list, tuple)) else None


def _is_chat(message: object) -> bool:
    return str(get(message, "object", "")).startswith("chat.")


def _is_report(message: object, choices: Sequence[object] | None, counts: SpecCounts) -> bool:
    """Whether a message says anything of a generation's counters: most chunks of a streamed response do not."""
    if counts.knows_drafts:
        return True
    if not _is_finished(message, choices):
        return False  # completion so far, if that: the drafts come with the last message
    if choices is None:
        return counts != _NOTHING
    if str(get(message, "object", "")).endswith(".chunk") and choices:
        return False  # continuous usage on the last chunk of content: the usage chunk follows
    return get(message, "usage") is not None


def _is_finished(message: object, choices: Sequence[object] | None) -> bool:
    """Whether this is a generation's last message: its reason to finish is there, or the form has none."""
    if choices is not None:
        return all(get(choice, "finish_reason", "absent") is not None for choice in choices)
    if get(message, "stop") is False:
        return False  # llama.cpp's own endpoint
    place = get(message, "meta_info")
    return get(message if place is None else place, "finish_reason", "absent") is not None


# Positions


def _positions(place: object, family: Family, counts: SpecCounts) -> tuple[Sequence[int], Sequence[int]] | None:
    """Accepted and proposed tokens by draft position, where the histogram agrees with the counters; else None."""
    accepted, proposed, verify = counts.accepted, counts.proposed, counts.verify
    steps = _counts(get(place, family.histogram)) if family.histogram else None
    if steps is None or not verify or accepted is None or proposed is None:
        return None
    if sum(steps) != verify or sum(j * count for j, count in enumerate(steps)) != accepted:
        return None
    drafts = _counts(get(place, family.step_drafts)) if family.step_drafts else None
    if drafts is not None and len(drafts) == verify and sum(drafts) == proposed:
        deepest = min(max(drafts), names.MAX_POSITIONS)
        proposed_at = [sum(count > i for count in drafts) for i in range(deepest)]
    else:
        each, rest = divmod(proposed, verify)
        # Every step has as many drafts: SGLang computes it so, and in vLLM all of them have the most they can.
        if rest or (family.most and _count(get(place, family.most)) != each):
            return None
        proposed_at = [verify] * min(each, names.MAX_POSITIONS)
    accepted_at = [sum(steps[i + 1 :]) for i in range(len(proposed_at))]
    deeper = len(proposed_at) < names.MAX_POSITIONS and any(steps[len(proposed_at) + 1 :])
    if deeper or any(a > p for a, p in zip(accepted_at, proposed_at, strict=True)):
        return None
    return accepted_at, proposed_at


def _counts(value: object) -> list[int] | None:
    """A list of counts; None where it is none, or longer than any engine makes it."""
    if not isinstance(value, (list, tuple)) or not 0 < len(value) <= 65_536:
        return None
    counts = [_count(each) for each in value]
    return None if None in counts else [count for count in counts if count is not None]


# Names that the table does not know: an engine's next renaming

# Not OpenAI's accepted_prediction_tokens: predicted outputs are something else.
_LOOKS_LIKE_DRAFTS: Final = re.compile(
    r"(?:^|_)(?:spec|specdec|speculat[a-z]*|draft[a-z]*)(?:_|$)"
    r"|(?:^|_)accept(?:ed|ance)?_(?:rate|ratio|len|tok|num|count|ct|hist|draft)"
    r"|(?:^|_)verif(?:y|ied|ication)_(?:step|ct|count|num|tok)"
)
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_PAIRS: Final = frozenset(name for family in FAMILIES for name in (family.accepted, family.proposed))
# Read, or made of what is read; without a pair beside them they are no new names.
_KNOWN: Final = frozenset(
    {name for family in FAMILIES for name in (family.verify, family.histogram, family.step_drafts, family.most)}
    | {"spec_accept_rate", "spec_accept_length", "spec_cap_length", "spec_cap_lens_histogram"}
    | {"spec_block_accept_length", "mean_acceptance_length", "draft_acceptance_rate", "per_step_accepted"}
)
_DEEPEST: Final = 4
_MOST_NAMES: Final = 256
_TEXTS: Final = frozenset({"choices", "message", "messages", "delta", "text", "content", "output", "prompt", "error"})


def _unread_names(message: object, choices: Sequence[object]) -> str:
    """Names that look like speculative decoding, in a message whose accepted and proposed tokens could not be read."""
    found: list[str] = []
    for owner in (message, *(get(choice, "meta_info") for choice in choices[:1])):
        for name, value, inside in _walk(owner):
            key = name.rpartition(".")[2]
            if key in _PAIRS:
                unread = value is not None
            else:
                unread = _is_number(value) and key not in _KNOWN and (inside or _looks_like_drafts(key))
            if unread and name not in found:
                found.append(name)
    if not found:
        return ""
    shown = ", ".join(repr(name[:64]) for name in found[:8])
    return f"it has {shown}, but no accepted and proposed draft tokens that can be read under the names of any engine"


def _walk(owner: object) -> Iterator[tuple[str, object, bool]]:
    """Dotted names, values, and whether a name above looks like drafts; nearest first, bounded in depth and number."""
    level: list[tuple[str, object, bool]] = [("", owner, False)]
    left = _MOST_NAMES
    for _ in range(_DEEPEST):
        below: list[tuple[str, object, bool]] = []
        for prefix, each, inside in level:
            for key, value in _items(each):
                if left == 0:
                    return
                left -= 1
                name = f"{prefix}{key[:64]}"
                yield name, value, inside
                if key not in _TEXTS and not isinstance(value, (str, bytes, int, float)):
                    below.append((f"{name}.", value, inside or _looks_like_drafts(key)))
        level = below


def _items(owner: object) -> Iterable[tuple[str, object]]:
    if isinstance(owner, (list, tuple)):
        owner = owner[0] if owner else None  # a list of several generations' counters names them in each
    if type(owner) is not dict and not isinstance(owner, Mapping):
        extra = getattr(owner, "model_extra", None)  # pydantic keeps there what its class does not declare
        owner = {**getattr(owner, "__dict__", {}), **(extra if isinstance(extra, Mapping) else {})}
    return [(key, value) for key, value in _first(owner.items()) if isinstance(key, str)]


def _first(items: Iterable[tuple[object, object]]) -> Iterator[tuple[object, object]]:
    for number, item in enumerate(items):
        if number == _MOST_NAMES:
            return
        yield item


def _looks_like_drafts(key: str) -> bool:
    return _LOOKS_LIKE_DRAFTS.search(_CAMEL.sub("_", key[:64]).lower()) is not None


def _is_number(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# Values


def parsed(payload: object) -> object:
    """A JSON text as the object it stands for, None where it stands for none; anything else as it is."""
    if isinstance(payload, (bytes, bytearray, memoryview)):
        # Broken UTF-8 is in somebody's text, and no reason to lose the counters beside it.
        payload = bytes(payload).decode("utf-8", errors="replace")
    if isinstance(payload, str):
        try:
            return json.loads(payload.lstrip("\ufeff"), parse_int=_parsed_int)
        except (ValueError, RecursionError):
            return None
    return payload


def _parsed_int(digits: str) -> int | None:
    # Python refuses to parse an integer of more than 4,300 digits, and with it the whole text.
    return int(digits) if len(digits) <= 20 else None


def at(owner: object, path: Path) -> Any:
    """What stands at the end of a path of names, None where the path breaks off."""
    for name in path:
        owner = get(owner, name)
    return owner


def get(owner: object, name: str, default: object = None) -> Any:
    """A mapping's value or an object's attribute; `default` where there is none or asking for it fails."""
    if type(owner) is dict:  # nearly always, and far cheaper to ask than the ABC
        return owner.get(name, default)
    try:
        if isinstance(owner, Mapping):
            return owner.get(name, default)
        if owner is None or isinstance(owner, (str, bytes, int, float, list, tuple)):
            return default
        return getattr(owner, name, default)
    except Exception:  # somebody's property or __getitem__
        return default


def _count(value: object) -> int | None:
    """A count, or None where it is not one: booleans, negatives, floats, NaN, text, and what OTLP cannot carry."""
    if value is None:
        return None
    if type(value) is int:
        number = value
    elif isinstance(value, bool) or not isinstance(value, Integral):
        return None
    else:
        number = int(value)
    return number if 0 <= number <= LARGEST else None
