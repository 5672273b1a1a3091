"""What the package adds to the start of every process under `opentelemetry-instrument`: `python -X importtime`, in
pairs.

    python -m tests.benchmarks.import_time [--runs 11]

Each pair is the same empty program with our instrumentor and without it (OTEL_PYTHON_DISABLED_INSTRUMENTATIONS). What
we add is the self time of the modules that only the first one imports. Needs the environment `vllm`.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")


def imports(disabled: str) -> dict[str, int]:
    """Self time in microseconds of every module that an instrumented, empty program imports."""
    command = [
        str(Path(sys.executable).with_name("opentelemetry-instrument")),
        sys.executable, "-X", "importtime", "-c", "pass",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment |= {
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_TRACES_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": disabled,
    }
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return {match[2]: int(match[1]) for match in map(_LINE.match, result.stderr.splitlines()) if match}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    runs = parser.parse_args().runs
    added, names = [], set()
    for _ in range(runs):
        with_us, without = imports(""), imports("specdec_vllm,specdec_sglang")
        ours = with_us.keys() - without.keys()
        names |= ours
        added.append(sum(with_us[name] for name in ours) / 1000)
    print(f"{len(names)} modules: {', '.join(sorted(names))}")
    print(f"added: median {statistics.median(added):.1f} ms, {min(added):.1f} … {max(added):.1f} ms over {runs} pairs")
    heavy = {name for name in names if name.split(".")[0] in {"vllm", "torch", "numpy", "sglang"}}
    print(f"engines, torch or numpy among them: {', '.join(sorted(heavy)) or 'none'}")


if __name__ == "__main__":
    main()
