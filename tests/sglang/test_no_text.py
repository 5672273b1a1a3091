"""No prompt, no output and no setting in words is in any exported byte, exemplars included."""

from __future__ import annotations

from array import array

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

from otel_specdec import GenerationExemplarFilter, views
from tests.sglang.manager import CHAIN, LENGTH, Rig, Says
from tests.unit.collected import Meter

CANARY = "canary-7f3a: the prompt or the answer"


def test_no_text_of_a_request_or_a_message_is_in_any_exported_byte() -> None:
    meter = Meter(views=views(), exemplar_filter=GenerationExemplarFilter())
    with Rig(provider=meter.provider, **CHAIN) as rig:
        for rid, settings in (("a", {}), ("b", {"json_schema": CANARY}), ("c", {"regex": CANARY})):
            rig.add(rid, stream=True, sampling_params={"max_new_tokens": 100, "stop": [CANARY], **settings})
            rig.manager.rid_to_state[rid].obj.text = CANARY
        for completion, reason in ((3, None), (9, {**LENGTH, "message": CANARY, "matched": CANARY})):
            rig.says(
                *(Says(rid, completion, verify=2, accepted=1, reason=reason) for rid in ("a", "b", "c")),
                output_strs=[CANARY] * 3,
                output_ids=[array("q", [77777777777])] * 3,
            )
            data = meter.reader.get_metrics_data()
            assert data is not None
            sent = encode_metrics(data).SerializeToString()
            assert b"canary" not in sent
            assert b"specdec.completion_tokens" in sent
        assert b"gen_ai.response.id" in sent
        assert meter.totals()["generations"] == 3
