"""Exemplars of SGLang's generations: the id that the client saw, and the trace of the request's own span."""

from __future__ import annotations

from typing import Any

import pytest

from otel_specdec import GenerationExemplarFilter, views
from tests.sglang.manager import LENGTH, Rig, Says
from tests.unit.collected import Meter

TRACE = "0af7651916cd43dd8448eb211c80319c"
COUNTERS = {
    "specdec.accepted_tokens",
    "specdec.verify_steps",
    "specdec.completion_tokens",
    "specdec.emitted_tokens",
    "specdec.generations",
}


@pytest.fixture
def meter() -> Meter:
    return Meter(resource={"service.instance.id": "here"}, views=views(), exemplar_filter=GenerationExemplarFilter())


def exemplars(meter: Meter) -> dict[str, list[Any]]:
    return {point.name: list(point.exemplars) for point in meter.points() if point.exemplars}


def test_a_finished_generation_is_named_on_each_of_its_counters(meter: Meter) -> None:
    with Rig(provider=meter.provider) as rig:
        rig.add("visible", session_id="turn-7")
        rig.add("other")
        rig.says(Says("visible", 4, verify=1, accepted=2), Says("other", 1))
        assert exemplars(meter) == {}  # nobody has finished
        rig.says(Says("visible", 9, verify=3, accepted=5, reason=LENGTH))
        found = exemplars(meter)
        assert set(found) == COUNTERS
        for each in found.values():
            (exemplar,) = each
            assert dict(exemplar.filtered_attributes) == {
                "gen_ai.response.id": "visible",
                "gen_ai.conversation.id": "turn-7",
            }
        # The value is what it added since the last collection.
        assert {name: each[0].value for name, each in found.items()} == {
            "specdec.accepted_tokens": 3,
            "specdec.verify_steps": 2,
            "specdec.completion_tokens": 5,
            "specdec.emitted_tokens": 5,
            "specdec.generations": 1,
        }


def test_four_of_many_are_named_and_no_id_is_an_attribute(meter: Meter) -> None:
    with Rig(provider=meter.provider) as rig:
        rids = [f"id-{n}" for n in range(500)]
        for start in range(0, 500, 50):
            part = rids[start : start + 50]
            rig.add(part)
            rig.says(*(Says(rid, 9, verify=3, accepted=5, reason=LENGTH) for rid in part))
        points = meter.points()
        (generations,) = [point for point in points if point.name == "specdec.generations"]
        assert generations.value == 500
        named = {exemplar.filtered_attributes["gen_ai.response.id"] for exemplar in generations.exemplars}
        assert len(named) == 4
        assert named <= set(rids)
        for point in points:
            assert not any(str(value).startswith("id-") for value in point.attributes.values())


def test_the_trace_is_that_of_the_requests_own_span_read_before_it_ends(meter: Meter) -> None:
    from sglang.srt.observability.trace import process_tracing_init

    process_tracing_init("127.0.0.1:9", "tests")  # nobody listens there; the ids are there all the same
    with Rig(provider=meter.provider) as rig:
        rig.manager.enable_trace = True
        header = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        rig.add("streamed", stream=True, external_trace_header=header)
        rig.add("at once", external_trace_header=header)
        rig.manager.enable_trace = False
        rig.add("untraced")
        spans = {
            rid: rig.manager.rid_to_state[rid].time_stats.trace_ctx.root_span.get_span_context().span_id
            for rid in ("streamed", "at once")
        }
        rig.says(Says("streamed", 1))
        for rid in ("streamed", "at once", "untraced"):
            rig.says(Says(rid, 9, verify=3, accepted=5, reason=LENGTH))
        found = exemplars(meter)["specdec.generations"]
        traces = {each.filtered_attributes["gen_ai.response.id"]: (each.trace_id, each.span_id) for each in found}
        assert traces["streamed"] == (int(TRACE, 16), spans["streamed"])
        assert traces["at once"] == (int(TRACE, 16), spans["at once"])
        assert not traces["untraced"][0]


def test_a_request_whose_end_came_during_a_collection_keeps_its_trace(meter: Meter) -> None:
    from sglang.srt.observability.trace import process_tracing_init

    process_tracing_init("127.0.0.1:9", "tests")
    with Rig(provider=meter.provider) as rig:
        rig.says()
        rig.manager.enable_trace = True
        rig.add("a", external_trace_header={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"})
        with rig.manager._otel_specdec_watch._tallies[0]._reading:
            rig.says(Says("a", 9, verify=3, accepted=5, reason=LENGTH))
        (exemplar,) = exemplars(meter)["specdec.generations"]
        assert exemplar.trace_id == int(TRACE, 16)
