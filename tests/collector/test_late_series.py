"""A series that nobody expected begins inside a collection, with its first increment in it: Prometheus has all of it.

With the features of docs/downstream.md Prometheus puts a zero at a series' start, if that is before its first sample,
in whole milliseconds: the pool sees to that (`sums._await_next_millisecond`).
"""

from __future__ import annotations

import time
from pathlib import Path

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

from tests.collector.processes import Prometheus, post
from tests.unit.collected import Meter
from tests.unit.engine_stand_in import HandTally
from tests.unit.test_sums import engine_of

SETS = ("accept_rate", "acceptance_length", "tokens_per_verify")


def test_a_series_that_begins_inside_a_collection_loses_nothing(tmp_path: Path) -> None:
    with Prometheus(tmp_path) as prometheus:
        began = time.time()
        time.sleep(1)
        for number in range(12):
            meter = Meter(resource={"service.name": "s", "service.instance.id": f"replica-{number}"})
            tally: HandTally = engine_of(meter.provider)
            for holding in SETS:  # each a new set of ratios, three times
                tally.put(3, 8, 2, 6, 5, generations=1, ratios=frozenset({holding}))
                data = meter.reader.get_metrics_data()
                assert data is not None
                assert post(f"{prometheus.otlp}/v1/metrics", encode_metrics(data).SerializeToString()) == 200
                time.sleep(0.05)
        time.sleep(1)
        window = f"[{int(time.time() - began) + 1}s] anchored"
        for name, each in (("completion_tokens", 6), ("proposed_tokens", 8), ("generations", 1)):
            (found,) = prometheus.query(f"sum(increase(specdec_{name}_total{window}))")
            assert found.value == 12 * len(SETS) * each, name
