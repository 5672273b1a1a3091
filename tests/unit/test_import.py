"""What comes with `import otel_specdec`, and that everything works where there is no SDK."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from tests.unit import vllm_stand_in
from tests.unit.fake_distributions import install
from tests.unit.scripts import run

NO_SDK = """
import importlib.abc, json, logging, sys

class NoSdk(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "opentelemetry.sdk" or name.startswith("opentelemetry.sdk."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, NoSdk())
assert not [name for name in sys.modules if name.startswith("opentelemetry.sdk")]
"""


def test_the_package_brings_no_engine_and_no_sdk_along() -> None:
    brought = run("""
import json, sys
import opentelemetry.instrumentation.instrumentor
before = set(sys.modules)
import otel_specdec
[getattr(otel_specdec, name) for name, module in otel_specdec._MODULES.items() if module != "sdk_exemplars"]
tops = {name.split(".")[0] for name in set(sys.modules) - before}
sdk = [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
print(json.dumps([sorted(tops - set(sys.stdlib_module_names)), sdk]))
""").value
    allowed = {"__mp_main__", "opentelemetry", "otel_specdec", "wrapt"}  # the first is multiprocessing's own alias
    # What wrapt, or the metadata of older Pythons and SDKs, may need.
    allowed |= {"deprecated", "importlib_metadata", "packaging", "typing_extensions", "zipp", "_distutils_hack"}
    assert set(brought[0]) <= allowed
    assert brought[1] == []


def test_auto_instrumentation_loads_nothing_of_the_recorders() -> None:
    loaded = run("""
import json, sys
import otel_specdec.instrumentors
print(json.dumps([name for name in sys.modules if name.startswith(("otel_specdec.", "multiprocessing"))]))
""").value
    assert not {"otel_specdec.payloads", "otel_specdec.recorder", "otel_specdec.batches", "multiprocessing"} & set(
        loaded
    )


def test_every_public_name_is_its_modules_own() -> None:
    import otel_specdec

    assert set(otel_specdec.__all__) == {*otel_specdec._MODULES, "__version__"}
    for name, module in otel_specdec._MODULES.items():
        assert getattr(otel_specdec, name) is getattr(importlib.import_module(f"otel_specdec.{module}"), name)
        assert name in dir(otel_specdec)


def test_importing_sets_no_variable_and_starts_no_thread() -> None:
    assert run("""
import json, os, threading
before = dict(os.environ)
import otel_specdec
[getattr(otel_specdec, name) for name in otel_specdec.__all__]
print(json.dumps(dict(os.environ) == before and threading.active_count() == 1))
""").value


def test_importing_does_not_make_the_process_look_auto_instrumented() -> None:
    assert (
        run("""
import json
import otel_specdec, otel_specdec.instrumentors
from otel_specdec.provider import is_auto_instrumented
print(json.dumps(is_auto_instrumented()))
""").value
        is False
    )


def test_without_an_sdk_a_recorder_works_and_emits_nothing() -> None:
    ended = run(
        NO_SDK
        + """
from otel_specdec import GenerationReport, SpecCounts, SpecDecRecorder, pool
recorder = SpecDecRecorder(speculation=True)
for n in range(100):
    recorder.record(GenerationReport(str(n), SpecCounts(1, 2, 1, 3, 2), finished=n % 2 == 0))
    recorder.record(GenerationReport(str(n), SpecCounts(1, 2, 1, 3, 2)))
recorder.record(None)
print(json.dumps([pool(None), [name for name in sys.modules if name.startswith("opentelemetry.sdk")]]))
"""
    )
    assert ended.value == [[], []]
    assert ended.log.count("\n") == 1  # the one about None


def test_without_an_sdk_an_instrumented_engine_works_and_emits_nothing(tmp_path: Path) -> None:
    vllm_stand_in.write(tmp_path)
    ended = run(
        NO_SDK
        + """
from otel_specdec import VLLMSpecDecInstrumentor
VLLMSpecDecInstrumentor().instrument()
import vllm.v1.core.sched.scheduler as module
from tests.unit.vllm_stand_in import Steps
steps = Steps(module)
steps.add("a")
print(json.dumps(steps.step(a=(4, 3)) is steps.scheduler.returned))
""",
        path=tmp_path,
    )
    assert ended.value is True
    assert ended.log == ""


def test_without_an_sdk_the_plugin_says_in_one_line_what_is_missing(tmp_path: Path) -> None:
    vllm_stand_in.write(tmp_path)
    install(tmp_path, "vllm", "0.1.dev1")
    ended = run(
        NO_SDK
        + """
from otel_specdec.instrumentors import vllm_plugin
vllm_plugin()
import vllm.v1.core.sched.scheduler as module
from tests.unit.vllm_stand_in import Steps
for _ in range(2):
    steps = Steps(module)
    steps.add("a")
    assert steps.step(a=(4, 3)) is steps.scheduler.returned
print("true")
""",
        env={"OTEL_METRICS_EXPORTER": "otlp"},
        path=tmp_path,
    )
    (line,) = ended.log.splitlines()
    assert "OpenTelemetry SDK" in line
    assert "otel-specdec[sdk]" in line


def test_the_plugin_costs_a_process_without_metrics_no_import_of_an_sdk() -> None:
    assert (
        run("""
import json, sys
from otel_specdec.instrumentors import vllm_plugin
vllm_plugin()
print(json.dumps([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "vllm"))]))
""").value
        == []
    )


def test_the_tests_run_the_package_of_this_folder() -> None:
    import otel_specdec

    assert Path(otel_specdec.__file__).parents[1] == Path(__file__).parents[2]
    assert os.path.exists(sys.executable)
