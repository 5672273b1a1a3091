"""The same calls where only the OpenTelemetry API is installed: right summaries, no error, nothing emitted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import importlib.abc, json, logging, sys

class NoSdk(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("opentelemetry.sdk") or name.startswith("opentelemetry.exporter"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoSdk())
for name in [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]:
    del sys.modules[name]

from otel_specdec import BatchSummary, GenerationReport, RolloutSession, SpecCounts, SpecDecRecorder, StreamedResponse
from otel_specdec import counts_from_payload, pool, reports_from_payload

recorder = SpecDecRecorder()
payload = {"meta_info": {"id": "r", "completion_tokens": 15, "spec_verify_ct": 5, "spec_num_correct_drafts": 9,
                         "spec_num_proposed_drafts": 15}}
assert counts_from_payload(payload) == SpecCounts(9, 15, 5, 15)
(report,) = recorder.record_payload(payload)
recorder.record(report)
stream = StreamedResponse()
stream.add(json.dumps(payload))
assert reports_from_payload(stream.payload)[0].counts == SpecCounts(9, 15, 5, 15)
session = RolloutSession("s")
branch = session.branch()
branch.add(GenerationReport("g", SpecCounts(1, 2, 1, 2)))
branch.commit()
summary = recorder.record_batch(session.reports() * 2 + [GenerationReport("h", SpecCounts(9, 10, 2, 11))])
assert pool(None) == []
assert not any(name.startswith("opentelemetry.sdk") for name in sys.modules)
print(json.dumps(summary.as_dict()))
"""


def test_without_an_sdk_summaries_are_right_and_nothing_is_raised() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    data = json.loads(ran.stdout)
    assert data["spec/accept_rate"] == 10 / 12
    assert data["spec/unique_generation_count"] == 2
    assert data["spec/duplicate_record_count"] == 1
