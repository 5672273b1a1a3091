"""Every command on every page: run here where it can be, else checked against what it calls."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import opentelemetry.sdk.environment_variables as sdk_variables
import pytest
from opentelemetry.instrumentation import environment_variables as instrumentation_variables
from packaging.requirements import Requirement

from otel_specdec.cli import migrate
from tests.docs.pages import PAGES, ROOT, blocks, commands, prose
from tests.unit import dashboards

PROMETHEUS, PROMTOOL, COLLECTOR = (ROOT / "build" / name for name in ("prometheus", "promtool", "otelcol-specdec"))


COMMANDS = commands()


def of(*heads: str) -> list[Any]:
    found = [
        pytest.param(words, id=f"{block.page}:{block.line}:{Path(words[0]).name}-{number}")
        for number, (block, words) in enumerate(COMMANDS)
        if kind(words) in heads
    ]
    assert found, heads
    return found


def kind(words: list[str]) -> str:
    """What a command is, by its first words: assignments before it are its environment."""
    program, *arguments = words
    if re.fullmatch(r"[A-Z_][A-Z_0-9]*=.*", program):
        return kind(arguments) if arguments and not re.match(r"[A-Z_0-9]+=", arguments[0]) else "export"
    if Path(program).name == "python" and arguments[:1] == ["-m"]:
        return "module"
    return Path(program).name


KNOWN = {
    "pip", "export", "make", "module", "python", "bash",
    "prometheus", "otelcol-specdec", "opentelemetry-instrument", "curl", "otel-specdec",
}  # fmt: skip


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    assert {kind(words) for _, words in COMMANDS} <= KNOWN
    assert len(COMMANDS) > 25


# Installed


def distributions() -> set[str]:
    """What the locked environments hold, and the engines."""
    locked = (path.read_text() for path in (ROOT / "tests/environments").glob("*.txt"))
    return {match[1] for text in locked for match in re.finditer(r"^([a-z0-9-]+)==", text, re.MULTILINE)}


@pytest.mark.parametrize("words", of("pip"))
def test_what_is_installed_exists_with_its_extras(words: list[str]) -> None:
    assert words[:2] == ["pip", "install"]
    extras = importlib.metadata.metadata("otel-specdec").get_all("Provides-Extra") or []
    for each in words[2:]:
        requirement = Requirement(each)
        if requirement.name == "otel-specdec":
            assert requirement.extras <= {*extras}
        else:
            assert requirement.name in distributions()


# The environment


def variables() -> set[str]:
    """Those that OpenTelemetry's packages, the engines (by our tests) and our configurations know."""
    known = {
        value
        for name, value in {**vars(sdk_variables), **vars(instrumentation_variables)}.items()
        if name[:4] == "OTEL"
    }
    paths = [path for folder in ("examples", "tests/sglang", "collector") for path in (ROOT / folder).rglob("*.*")]
    texts = [path.read_text() for path in paths if path.suffix in (".py", ".yaml", ".yml")]
    return known | {match for text in texts for match in re.findall(r"\b[A-Z][A-Z_0-9]{5,}\b", text)}


@pytest.mark.parametrize("words", of("export", "otelcol-specdec"))
def test_variables_are_known(words: list[str]) -> None:
    names = [word.split("=")[0] for word in words if re.match(r"[A-Z_0-9]+=", word)]
    assert names
    assert {*names} <= variables()


def test_variables_in_the_text_are_known() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(OTEL_[A-Z_]+[A-Z])\b", prose(page))}
    assert len(named) > 5
    assert named <= variables() | {"OTEL_METRICS_EXPORTER"}


# make and Python


@functools.cache
def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("words", of("make"))
def test_a_target_exists(words: list[str]) -> None:
    assert {word for word in words[1:] if "=" not in word} <= targets()


def test_targets_modules_and_paths_in_the_text_exist() -> None:
    named = [(page.name, code) for page in PAGES for code in re.findall(r"`([^`\n]+)`", prose(page))]
    assert len(named) > 300
    assert [each for each in named if not exists(each[1])] == []


OURS = "collector|docs|examples|otel_specdec|tests"


def exists(code: str) -> bool:
    """Whether a piece of code in a sentence, if it is a target, a module or a path of ours, is there."""
    words = code.split()
    if words[0] == "make" and len(words) == 2:
        return words[1] in targets()
    if module := re.search(rf"-m ((?:{OURS})[\w.]*)", code):
        return importlib.util.find_spec(module[1]) is not None
    if re.fullmatch(rf"(?:{OURS})/[\w./-]*\w/?", code) and "X.Y.Z" not in code:
        return (ROOT / code).exists()
    return True


@pytest.mark.parametrize("words", of("module"))
def test_a_module_exists_and_is_a_program(words: list[str]) -> None:
    module = words[words.index("-m") + 1]
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin)
    if source.name == "__init__.py":
        source = source.with_name("__main__.py")
    assert "__main__" in source.read_text() or source.name == "__main__.py"


# Downstream


@pytest.mark.parametrize("words", of("prometheus"))
def test_prometheus_takes_its_flags_and_its_configuration(words: list[str]) -> None:
    flags = {name: value for name, _, value in (word.partition("=") for word in words[1:])}
    known = run(PROMETHEUS, "--help-long").stdout
    for flag in flags:
        assert re.search(rf"{flag.removeprefix('--')}\b", known), flag
    for feature in flags["--enable-feature"].split(","):
        assert feature in known
    checked = run(PROMTOOL, "check", "config", ROOT / flags["--config.file"])
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("words", of("otelcol-specdec"))
def test_the_collector_takes_its_configuration(words: list[str], tmp_path: Path) -> None:
    environment = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    environment["SPECDEC_QUEUE_DIR"] = str(tmp_path)
    assert str(ROOT / words[len(environment)]) == str(COLLECTOR)
    checked = run(COLLECTOR, "validate", *words[len(environment) + 1 :], env=environment)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("words", of("curl"))
def test_a_question_to_prometheus_names_what_is_recorded(words: list[str]) -> None:
    (query,) = (word.removeprefix("query=") for word in words if word.startswith("query="))
    rules = (ROOT / "collector/prometheus/rules/specdec.rules.yml").read_text()
    assert f"record: {query}\n" in rules


def run(*command: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(each) for each in command],
        cwd=ROOT, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


# Engines: their own parsers judge these in tests/vllm/test_docs.py and tests/sglang/test_docs.py


@pytest.mark.parametrize("words", of("opentelemetry-instrument"))
def test_a_server_is_started_by_a_program_that_is_there(words: list[str]) -> None:
    assert Path(sys.executable).with_name(words[0]).exists()
    assert words[1:3] == ["vllm", "serve"] or words[1:4] == ["python", "-m", "sglang.launch_server"]
    if "--speculative-config" in words:
        assert json.loads(words[words.index("--speculative-config") + 1])["num_speculative_tokens"] > 0


# Our own


def ours() -> Iterator[tuple[list[str], Path]]:
    for block, words in COMMANDS:
        if kind(words) == "otel-specdec":
            yield words, ROOT / "docs" / block.page


def test_migrate_prints_what_its_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((words, page),) = ((words, page) for words, page in ours() if words[1] == "migrate")
    query = (
        '1 + sum(rate(vllm:spec_decode_num_accepted_tokens_total{job=~"$job"}[$__rate_interval]))'
        ' / sum(rate(vllm:spec_decode_num_drafts_total{job=~"$job"}[$__rate_interval]))'
    )
    board = {
        "panels": [
            dashboards.panel("Acceptance length", (query, "")),
            dashboards.panel("Efficiency", ("vllm:spec_decode_efficiency", "")),
        ]
    }
    (tmp_path / "dashboard.json").write_text(json.dumps(board))
    arguments = [str(tmp_path / word) if word.endswith(".json") else word for word in words[2:]]
    assert migrate.main(arguments) == migrate.LEFT
    assert (tmp_path / "dashboard.specdec.json").exists()
    printed = capsys.readouterr().err
    (shown,) = (block.text for block in blocks("text") if block.page == page.name)
    assert printed == shown
