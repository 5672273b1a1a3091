"""What the doctor says of a real SGLang, and of the sources of released ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from examples.vllm_demo.otlp_receiver import OtlpReceiver
from examples.vllm_demo.server import otlp_environment
from otel_specdec.cli.sources import fields, outline
from otel_specdec.engines import sglang
from tests.sglang import released

VERSIONS = ("0.4.6", "0.4.9", "0.5.1", "0.5.4", "0.5.9", "0.5.14", "0.5.18", released.INSTALLED)


def doctor(*server: str, **variables: str) -> tuple[int, dict[str, Any]]:
    """Its exit status, and its findings by check; it must not import the engine."""
    script = (
        "import sys; from otel_specdec.cli.main import main; status = main(sys.argv[1:]); "
        "assert not {'sglang', 'torch'} & set(sys.modules); sys.exit(status)"
    )
    with OtlpReceiver(grpc=False) as receiver:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        ended = subprocess.run(
            [sys.executable, "-c", script, "doctor", "--json", "--", *server],
            env={**plain, **otlp_environment(receiver.http_endpoint, service="tests"), **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.stderr == ""
    return ended.returncode, {each["check"]: each for each in json.loads(ended.stdout)["findings"]}


SERVER = ("python", "-m", "sglang.launch_server", "--model-path", "m", "--speculative-algorithm", "NGRAM")
TWO = (*SERVER, "--tokenizer-worker-num", "2")


def test_two_tokenizers_are_counted_under_auto_instrumentation_and_not_by_the_plugin() -> None:
    """The seventh setup."""
    status, found = doctor("opentelemetry-instrument", *TWO)
    assert status == 0
    assert found["engine.sglang"]["says"].endswith("Every hook is there, by its source.")
    for check in ("engine.sglang", "speculation", "entry_points", "auto", "children", "endpoint", "exemplars"):
        assert found[check]["state"] == "ok", found[check]
    status, found = doctor(*TWO)
    assert status == 1
    assert found["children"]["state"] == "problem"
    assert found["children"]["do"] == "Start the server under `opentelemetry-instrument`."


def test_modes_in_which_sglang_is_not_seen_are_problems() -> None:
    status, found = doctor("opentelemetry-instrument", *SERVER, "--smg-grpc-mode")
    assert (status, found["sglang.grpc_mode"]["state"]) == (1, "problem")
    status, found = doctor("opentelemetry-instrument", *SERVER, SGLANG_RUST_SERVER="1")
    assert (status, found["sglang.rust_server"]["state"]) == (1, "problem")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_released_version_has_its_hooks_by_its_source(version: str) -> None:
    source = released.sources(version)
    messages = (fields(source["io_struct.py"], name) for name in sglang.MESSAGE_CLASSES)
    columns = next(filter(None, messages))
    manager = outline(source["tokenizer_manager.py"], "TokenizerManager")
    assert sglang.differences(manager, columns) == []
    assert sglang.differences(manager, columns - {"spec_verify_ct"}) == ["its messages have no spec_verify_ct"]
