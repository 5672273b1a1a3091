"""A server's command line, as people write it."""

from __future__ import annotations

import shlex

import pytest

from otel_specdec.cli.server_command import ServerCommand


def read(line: str) -> ServerCommand:
    return ServerCommand.read(shlex.split(line))


def test_variables_wrappers_and_the_engine_are_told_apart() -> None:
    command = read(
        "OTEL_SERVICE_NAME=a env B=2 opentelemetry-instrument --metrics_exporter otlp --service_name=b vllm serve m -x"
    )
    assert command.instrumented
    assert command.engine == "vllm"
    assert command.words == ["vllm", "serve", "m", "-x"]
    assert command.variables["B"] == "2"
    assert command.variables["OTEL_METRICS_EXPORTER"] == "otlp"
    assert command.variables["OTEL_SERVICE_NAME"] == "b"  # the option comes over the variable


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("vllm serve m", "vllm"),
        ("/opt/venv/bin/vllm serve m", "vllm"),
        ("python3 -m vllm.entrypoints.openai.api_server --model m", "vllm"),
        ("python -m sglang.launch_server --model-path m", "sglang"),
        ("sglang serve --model-path m", "sglang"),
        ("python serve.py", None),
    ],
)
def test_the_engine_is_named_by_its_program_or_module(line: str, engine: str | None) -> None:
    assert read(line).engine == engine
    assert not read(line).instrumented


def test_a_wrapper_that_is_not_known_hides_nothing() -> None:
    command = read("uv run opentelemetry-instrument vllm serve m")
    assert command.instrumented
    assert command.engine == "vllm"


def test_options_are_found_in_every_spelling_and_the_last_one_counts() -> None:
    command = read("vllm serve m --a-b 1 --a_b=2 --flag --last")
    assert command.option("a-b") == "2"
    assert command.option("flag") == ""
    assert command.option("last") == ""
    assert command.option("b") is None
    assert read("sglang x --tokenizer-worker-num 3").number("tokenizer-worker-num") == 3
    assert read("sglang x").number("tokenizer-worker-num") == 1


@pytest.mark.parametrize(
    ("line", "speculates"),
    [
        ("vllm serve m", False),
        ("vllm serve m --speculative-config '{}'", True),
        ("vllm serve m --speculative_config='{}'", True),
        ("vllm serve m --speculative-config.method ngram", True),
        ("vllm serve m -sc '{}'", True),
        ("vllm serve m --spec-method ngram", True),
        ("vllm serve m --config c.yaml", None),
        ("python -m sglang.launch_server --speculative-algorithm EAGLE3", True),
        ("python -m sglang.launch_server --speculative-algo=NGRAM", True),
        ("python -m sglang.launch_server --speculative-num-steps 3", False),
    ],
)
def test_whether_it_speculates(line: str, speculates: bool | None) -> None:
    assert read(line).speculates is speculates
