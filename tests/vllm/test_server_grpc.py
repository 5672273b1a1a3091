"""The real server with two API servers in front of one engine, under `opentelemetry-instrument`, OTLP over gRPC."""

from __future__ import annotations

from pathlib import Path

from examples.vllm_demo.tiny_model import Models
from tests.vllm.serving import check_attributes, check_no_id_left, check_two_hundred_of_three_tokens, serving


def test_two_api_servers_count_each_generation_once(models: Models, tmp_path: Path) -> None:
    with serving(models, tmp_path, protocol="grpc", api_servers=2) as served:
        check_two_hundred_of_three_tokens(served)
        check_attributes(served, {0}, front_ends=2)
        check_no_id_left(served)
