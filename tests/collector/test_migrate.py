"""A migrated dashboard on a real Prometheus: every rewritten query is taken, and says what the counters say."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

from otel_specdec.cli import migrate
from tests.collector.conftest import RULES
from tests.collector.fleet import Replica
from tests.collector.processes import Prometheus, eventually
from tests.unit import dashboards


def as_grafana_asks(query: str) -> str:
    """With "All" for every variable of labels, and values for those of time."""
    for name, value in (("$__range_s", "3600"), ("[$__range]", "[1h]"), ("$model_name", ".*"), ("$model", "m")):
        query = query.replace(name, value)
    assert "$" not in re.sub(r'"\$1"', "", query), query
    return query


def test_each_rewritten_query_answers_with_the_pooled_truth(tmp_path: Path) -> None:
    queries = [
        query
        for dashboard in (dashboards.vllm(), dashboards.others())
        for query in migrate.migrate(dashboard).rewritten
    ]
    replicas = [
        Replica("a", method="ngram", positions=3),
        Replica("b", method="ngram", positions=3),
        Replica("c", model="m", provider="sglang", method="eagle3", positions=3),
    ]
    with Prometheus(tmp_path / "prometheus", [RULES / "specdec.rules.yml"], features=()) as prometheus:

        def answer(query: str) -> list[float]:
            return [value.value for value in prometheus.query(as_grafana_asks(query)) if math.isfinite(value.value)]

        for _ in range(8):
            for number, replica in enumerate(replicas):
                # Two vLLM replicas of very different ratios, 9/10 and 1/10 of twice as many: pooled it is 11/30.
                accepted, proposed = ((9, 10), (2, 20), (9, 10))[number]
                replica.add(
                    accepted=accepted, proposed=proposed, verify=5, emitted=accepted + 4, completion=20, generations=1
                )
                for position, taken in enumerate([3, 2, 1]):
                    replica.add_position(position, taken, 5)
                replica.export(prometheus.otlp)
            time.sleep(0.7)
        assert eventually(lambda: all(answer(query.new or "") for query in queries), 20, 1), [
            query.new for query in queries if not answer(query.new or "")
        ]
        truths = {
            "Draft acceptance rate": {round(11 / 30, 3)},
            "Acceptance length": {round((13 + 6) / 10, 3)},  # 1 + accepted / drafts would say 1 + 11/10
            "Draft acceptance rate by model": {round(11 / 30, 3)},
            "Acceptance rate by draft position": {0.6, 0.4, 0.2},
            "Draft acceptance rate by engine": {0.9, 0.1},
            "Output from drafts": {round(11 / 40, 3)},
        }
        for query in queries:
            if query.panel in truths:
                assert {round(value, 3) for value in answer(query.new or "")} == truths[query.panel], query
