"""Data parallelism on the real server: each engine counts once, its index on the points."""

from __future__ import annotations

from pathlib import Path

from examples.vllm_demo.tiny_model import Models
from otel_specdec.names import Metric
from tests.vllm.serving import (
    check_attributes,
    check_no_id_left,
    check_two_hundred_of_three_tokens,
    check_what_clients_got,
    serving,
)


def test_two_engines_behind_two_api_servers_in_one_pod(models: Models, tmp_path: Path) -> None:
    # As Kubernetes has it: every process of the pod gets the same instance id, and the resource stays the user's.
    pod = {"service.instance.id": "pod-7", "k8s.pod.name": "pod-7"}
    with serving(
        models,
        tmp_path,
        extra_args=["--data-parallel-size", "2"],
        api_servers=2,
        env={"OTEL_RESOURCE_ATTRIBUTES": ",".join(f"{key}={value}" for key, value in pod.items())},
    ) as served:
        check_two_hundred_of_three_tokens(served)
        check_what_clients_got(served)
        check_attributes(served, {0, 1}, front_ends=2)  # each stream once, told apart by `specdec.process` alone
        check_no_id_left(served)
        for filters in [{"specdec.engine.index": index} for index in (0, 1)]:
            assert served.receiver.totals(Metric.GENERATIONS.value, **filters) > 0
        for point in served.points():
            assert pod.items() <= point.resource_attributes.items()
