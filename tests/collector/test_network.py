"""The overlay for listeners that face a network: no plain text, and nobody without the token."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import trustme

from examples.vllm_demo.otlp_receiver import OtlpReceiver
from otel_specdec.names import Metric
from tests.collector.fleet import Replica
from tests.collector.processes import COLLECTOR, Collector, eventually, post


def test_tls_and_token(tmp_path: Path, receiver: OtlpReceiver) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "tls.crt"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "tls.key"))
    (tmp_path / "token").write_text("open-sesame\n")
    env = {
        "SPECDEC_TLS_CERT": str(tmp_path / "tls.crt"),
        "SPECDEC_TLS_KEY": str(tmp_path / "tls.key"),
        "SPECDEC_TOKEN_FILE": str(tmp_path / "token"),
    }
    config = [COLLECTOR / "pipeline.yaml", COLLECTOR / "network.yaml"]
    with Collector(tmp_path / "collector", receiver.http_endpoint, config, env=env) as collector:
        replica = Replica("a")
        replica.add(accepted=3, proposed=4)
        body = replica.collect()
        assert post(f"{collector.http}/v1/metrics", body) != 200  # no TLS

        def send(token: str | None) -> int:
            headers = {"Content-Type": "application/x-protobuf"}
            if token is not None:
                headers["Authorization"] = f"Bearer {token}"
            trust = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
            opener = urllib.request.build_opener(
                urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust)
            )
            url = collector.http.replace("http:", "https:")
            try:
                with opener.open(urllib.request.Request(f"{url}/v1/metrics", body, headers), timeout=10) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        assert send(None) == 401
        assert send("wrong") == 401
        assert receiver.requests == []
        assert send("open-sesame") == 200
        assert eventually(lambda: receiver.totals(Metric.ACCEPTED) == 3, 10)


def test_grpc_is_no_way_around_it(tmp_path: Path, receiver: OtlpReceiver) -> None:
    import grpc

    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "tls.crt"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "tls.key"))
    (tmp_path / "token").write_text("open-sesame")
    env = {
        "SPECDEC_TLS_CERT": str(tmp_path / "tls.crt"),
        "SPECDEC_TLS_KEY": str(tmp_path / "tls.key"),
        "SPECDEC_TOKEN_FILE": str(tmp_path / "token"),
    }
    config = [COLLECTOR / "pipeline.yaml", COLLECTOR / "network.yaml"]
    with Collector(tmp_path / "collector", receiver.http_endpoint, config, env=env) as collector:
        replica = Replica("a")
        replica.add(accepted=3, proposed=4)
        body = replica.collect()
        trusted = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        with grpc.secure_channel(collector.grpc, trusted) as channel:
            export: Any = channel.unary_unary("/opentelemetry.proto.collector.metrics.v1.MetricsService/Export")
            with pytest.raises(grpc.RpcError) as refused:
                export(body, timeout=10)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            export(body, timeout=10, metadata=[("authorization", "Bearer open-sesame")])
        assert eventually(lambda: receiver.totals(Metric.ACCEPTED) == 3, 10)
