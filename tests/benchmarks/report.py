"""The overhead report: runs the benchmarks one after the other and writes what they print into docs/performance.md.

    python -m tests.benchmarks.report [NAME ...]

Without names all of them, some 30 minutes on two cores; a name runs one alone and leaves the others' figures as they
are. Nothing else should run on the machine. Needs the environments of `make environments`; it is not a test.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"


@dataclass(frozen=True)
class Benchmark:
    """A module of this folder, the environment that it needs, and its arguments."""

    name: str
    environment: str
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """What a reader would type."""
        return " ".join(("python", "-m", f"tests.benchmarks.{self.name}", *self.arguments))

    def run(self) -> str:
        """What it prints, without the warnings of engines."""
        python = ROOT / "build" / "venvs" / self.environment / "bin" / "python"
        done = subprocess.run(
            [str(python), "-m", f"tests.benchmarks.{self.name}", *self.arguments],
            cwd=ROOT, env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}, stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{self.command} failed ({done.returncode}):\n{done.stdout[-3000:]}")
        lines = [line.rstrip() for line in done.stdout.splitlines()]
        return "\n".join(line for line in lines if line and not re.match(r"(INFO|WARNING|ERROR|Triton) ?", line))


BENCHMARKS = (
    Benchmark("vllm_step", "vllm"),
    Benchmark("vllm_server", "vllm", ("--rounds", "40")),
    Benchmark("sglang_message", "sglang"),
    Benchmark("record_batch", "dev"),
    Benchmark("in_flight", "dev"),
    Benchmark("import_time", "vllm"),
)


def machine() -> str:
    """What the figures were measured on."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return f"{os.cpu_count()} cores of {cpu}, Python {platform.python_version()}, {today}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *(each.name for each in BENCHMARKS)], metavar="NAME")
    names = parser.parse_args().names
    for benchmark in BENCHMARKS:
        if names and benchmark.name not in names:
            continue
        print(f"== {benchmark.command}", flush=True)
        printed = benchmark.run()
        print(printed, flush=True)
        block = f"```text\n$ {benchmark.command}    # {machine()}\n{printed}\n```"
        page = PAGE.read_text()
        marks = re.compile(rf"(<!-- {benchmark.name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not marks.search(page):
            raise SystemExit(f"{PAGE.name} has no place for {benchmark.name}")
        PAGE.write_text(marks.sub(lambda found, block=block: found[1] + block + "\n" + found[2], page))  # type: ignore[misc]


if __name__ == "__main__":
    main()
