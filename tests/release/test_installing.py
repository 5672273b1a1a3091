"""The wheel alone, in clean environments on every Python found: without an SDK, with the oldest, with the newest."""

from __future__ import annotations

import json
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import tomllib

from otel_specdec import __version__
from tests.release.building import ROOT, UV, Built, run
from tests.run import SUPPORTED, find_python

PYTHONS = {version: python for version in SUPPORTED if (python := find_python(version))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def pins(environment: str) -> dict[str, str]:
    text = (ROOT / "tests" / "environments" / f"{environment}.txt").read_text("utf-8")
    return dict(re.findall(r"^([\w-]+)==(\S+)", text, re.MULTILINE))


OPENTELEMETRY = {
    release: {name: pins(release)[name] for name in ("opentelemetry-api", "opentelemetry-instrumentation")}
    for release in ("oldest", "dev")
}

USE_IT = textwrap.dedent("""
    import importlib.metadata, importlib.resources, json, sys

    import otel_specdec
    from otel_specdec import GenerationReport, SpecCounts, SpecDecRecorder, pool

    told = {
        "where": otel_specdec.__file__,
        "version": otel_specdec.__version__,
        "python": "{}.{}".format(*sys.version_info),
        "typed": importlib.resources.files("otel_specdec").joinpath("py.typed").is_file(),
        "points": sorted(
            [point.group, point.name] for point in importlib.metadata.distribution("otel-specdec").entry_points
        ),
        "loaded": [
            getattr(point.load(), "__name__", "")
            for point in importlib.metadata.distribution("otel-specdec").entry_points
            if point.group != "console_scripts"
        ],
        "installed": {
            name: importlib.metadata.version(name) for name in ("opentelemetry-api", "opentelemetry-instrumentation")
        },
        "engines": [name for name in ("vllm", "sglang", "torch") if name in sys.modules],
    }
    reports = [
        GenerationReport("a", SpecCounts(accepted=1, proposed=2, verify=1, completion=4), provider="vllm", model="m"),
        GenerationReport("b", SpecCounts(accepted=9, proposed=10, verify=3, completion=12), provider="vllm", model="m"),
    ]
    try:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    except ImportError:
        recorder = SpecDecRecorder()
    else:
        reader = InMemoryMetricReader()
        provider = MeterProvider(
            [reader], views=otel_specdec.views(), exemplar_filter=otel_specdec.GenerationExemplarFilter()
        )
        recorder = SpecDecRecorder(provider)
        assert all(hasattr(otel_specdec, name) for name in otel_specdec.__all__)
    told["summary"] = recorder.record_batch(reports).ratios["accept_rate"]
    if "opentelemetry.sdk.metrics" in sys.modules:
        (pooled,) = pool(reader.get_metrics_data())
        told["pooled"] = pooled.ratios["accept_rate"]
        told["totals"] = pooled.totals
    print(json.dumps(told))
    """)


class Environment:
    """A clean environment with the wheel in it."""

    def __init__(self, folder: Path, version: str, built: Built) -> None:
        self.folder = folder
        self._version = version
        self._wheel = built.wheel
        run(UV, "venv", "--quiet", "--python", PYTHONS[version], folder)

    def install(self, release: str, extra: str = "") -> None:
        """The wheel, with OpenTelemetry as pinned in the environment `release`."""
        pinned = [f"{name}=={version}" for name, version in OPENTELEMETRY[release].items()]
        if extra:
            pinned.append(f"opentelemetry-sdk=={pins(release)['opentelemetry-sdk']}")
        if release == "dev":  # all of it as locked; of the oldest, not everything has a wheel for a new Python
            pinned += ["--constraint", str(ROOT / "tests" / "environments" / "dev.txt")]
        run(UV, "pip", "install", "--quiet", "--python", self.folder, f"{self._wheel}{extra}", *pinned)
        run(UV, "pip", "check", "--quiet", "--python", self.folder)

    def use(self) -> dict[str, Any]:
        """What the package says there, from another folder and with nothing of ours on the path."""
        bin_folder = self.folder / ("Scripts" if os.name == "nt" else "bin")
        told: dict[str, Any] = json.loads(
            run(bin_folder / "python", "-I", "-c", USE_IT, cwd=self.folder).splitlines()[-1]
        )
        return told


def check(told: dict[str, Any], environment: Environment, version: str, release: str) -> None:
    assert Path(told["where"]).is_relative_to(environment.folder)
    assert (told["version"], told["python"], told["typed"]) == (__version__, version, True)
    scripts = {"console_scripts": PROJECT["scripts"]} if "scripts" in PROJECT else {}
    groups = {**PROJECT["entry-points"], **scripts}
    assert told["points"] == sorted([group, name] for group, names in groups.items() for name in names)
    assert all(told["loaded"])
    assert told["installed"] == OPENTELEMETRY[release]
    assert told["engines"] == []
    assert told["summary"] == 10 / 12


@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_works_with_the_oldest_opentelemetry(version: str, built: Built, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv", version, built)
    environment.install("oldest", "[sdk]")
    told = environment.use()
    check(told, environment, version, "oldest")
    assert (told["pooled"], told["totals"]["completion"]) == (10 / 12, 16)


@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_works_without_an_sdk_and_with_the_newest(version: str, built: Built, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv", version, built)
    environment.install("dev")
    told = environment.use()
    check(told, environment, version, "dev")
    assert "pooled" not in told
    environment.install("dev", "[sdk]")
    told = environment.use()
    check(told, environment, version, "dev")
    assert (told["pooled"], told["totals"]["completion"]) == (10 / 12, 16)


def test_the_oldest_that_is_tried_is_the_lower_bound_of_the_project() -> None:
    bounds = dict(re.findall(r"^([\w-]+) >= ([\w.]+)", "\n".join(PROJECT["dependencies"]), re.MULTILINE))
    for name, version in OPENTELEMETRY["oldest"].items():
        assert version.removesuffix(".0") == bounds[name]
    assert SUPPORTED[0] == PROJECT["requires-python"].removeprefix(">= ")
