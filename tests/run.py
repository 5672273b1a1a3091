"""Runs suites of tests, each part in a pytest process of its own, to the end, and sums up on the last line.

    python tests/run.py unit pythons vllm collector

`make` calls it, with the Python that it makes environments with. A test module with a real engine gets a process of
its own because the engine stays in it (or in a server that it starts), as do the metrics' global providers.

As many parts run at once as TEST_JOBS says, two by default: most of an engine's start is one core's work. What a part
prints is shown whole when it ends, at once where only one runs at a time.

Needs nothing but the standard library. Fails if a test failed, a part ran out of time or a part ran no test at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
VENVS = Path("build/venvs")
REPORTS = Path("build/reports")
RELEASES = Path("tests/environments")
LIMIT_S = float(os.environ.get("TEST_LIMIT_S", 20 * 60))
"""What one part may take, in seconds."""
JOBS = int(os.environ.get("TEST_JOBS") or min(2, os.cpu_count() or 1))
"""How many parts run at once. An engine needs up to 4 GB and, while it starts, a core."""
STILL_RUNNING_S = 60.0
"""How often it is said what runs, in seconds."""

ALONE = {Path("tests/vllm/test_server_tensor_parallel.py")}
"""What runs after the others, with nothing beside it. The two workers wait for each other by turning in circles on all
the cores of a small machine: beside them an engine has taken minutes to start, and their own steps take seconds."""

SUPPORTED = ("3.10", "3.11", "3.12", "3.13", "3.14")
STARTED = time.monotonic()


class Part(NamedTuple):
    """One pytest process."""

    name: str
    venv: Path
    target: Path
    python: str | None = None
    """The Python to make `venv` with, where make has not done so before."""
    also: tuple[Path, ...] = ()
    """More targets of the same process."""


def say(text: str) -> None:
    # Flushed, so that it stands before the output of the process that follows.
    print(f"[{time.monotonic() - STARTED:6.0f} s] {text}", flush=True)


def unit() -> Iterator[Part]:
    yield Part("unit", VENVS / "dev", Path("tests/unit"))


def pythons() -> Iterator[Part]:
    """The unit tests on every other supported Python of this machine."""
    for version in SUPPORTED:
        if version == "{}.{}".format(*sys.version_info):
            continue  # the suite `unit` runs on that one
        if python := find_python(version):
            yield Part(f"unit on {version}", VENVS / f"python{version}", Path("tests/unit"), python)
        else:
            say(f"unit on {version}: NOT RUN, this machine has no python{version}")


def pythons_in_ci() -> Iterator[Part]:
    """A part of it, for every change: the oldest Python, with the oldest OpenTelemetry, and the newest that is here."""
    found = list(pythons())
    yield from dict.fromkeys([*found[:1], *found[-1:]])


def docs() -> Iterator[Part]:
    """The site and all that stands on its pages, as far as no engine is needed for it."""
    yield Part("docs", VENVS / "docs", Path("tests/docs"))


def vllm() -> Iterator[Part]:
    return modules(Path("tests/vllm"), VENVS / "vllm")


def versions() -> Iterator[Part]:
    """Every release of vLLM: its scheduler with the step tables, and its engine where that speculates on a CPU."""
    releases = (path.stem for path in RELEASES.glob("vllm-[0-9]*.txt"))
    for name in sorted(releases, key=lambda name: [*map(int, re.findall(r"\d+", name))]):
        yield scheduler_of(name)
    yield scheduler_of("vllm")
    for name in ("vllm-0.22.1", "vllm-0.26.0", "vllm"):
        yield engine_of(name)


def versions_in_ci() -> Iterator[Part]:
    """A part of it, for every change: the release that differs most, and an engine of some months ago."""
    yield scheduler_of("vllm-0.11.2")
    yield engine_of("vllm-0.22.1")


def scheduler_of(name: str) -> Part:
    tests = Path("tests/vllm")
    also = (tests / "test_versions.py",)
    return Part(f"{name} scheduler", VENVS / name, tests / "test_scheduler_steps.py", sys.executable, also)


def engine_of(name: str) -> Part:
    return Part(f"{name} engine", VENVS / name, Path("tests/vllm/test_engine_ngram.py"), sys.executable)


def collector() -> Iterator[Part]:
    """A real collector and a real Prometheus; with a real vLLM too where the module's name says so."""
    for part in modules(Path("tests/collector"), VENVS / "downstream"):
        yield part._replace(venv=VENVS / "vllm") if "vllm" in part.target.stem else part


def sglang() -> Iterator[Part]:
    return modules(Path("tests/sglang"), VENVS / "sglang")


def drift() -> Iterator[Part]:
    """Whether the newest releases on the registry are as the hooks know them."""
    return modules(Path("tests/drift"), VENVS / "dev")


def ray() -> Iterator[Part]:
    return modules(Path("tests/ray"), VENVS / "ray")


def modules(folder: Path, venv: Path) -> Iterator[Part]:
    # Of an empty folder the folder itself, so that its pytest fails for want of tests.
    for module in sorted(folder.glob("test_*.py")) or [folder]:
        yield Part(f"{folder.name} {module.stem.removeprefix('test_')}", venv, module)


def release() -> Iterator[Part]:
    """The files to be released, and the wheel alone on each Python of this machine."""
    for version in SUPPORTED:
        if not find_python(version):
            say(f"release on {version}: NOT RUN, this machine has no python{version}")
    yield Part("release", VENVS / "dev", Path("tests/release"))


SUITES: dict[str, Callable[[], Iterator[Part]]] = {
    "unit": unit,
    "pythons": pythons,
    "pythons-in-ci": pythons_in_ci,
    "docs": docs,
    "vllm": vllm,
    "versions": versions,
    "versions-in-ci": versions_in_ci,
    "sglang": sglang,
    "collector": collector,
    "drift": drift,
    "ray": ray,
    "release": release,
}


def find_python(version: str) -> str | None:
    pyenv = Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python")
    for python in [f"python{version}", *map(str, sorted(pyenv))]:
        # Asked, not only found: pyenv has a shim on PATH for every version, and those not chosen fail.
        if version_of(python) == version:
            return python
    return None


def version_of(python: str) -> str | None:
    ask = [python, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class Runner:
    """Runs parts, some at once. Nothing that they started in their process groups outlives it."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._running: dict[str, float] = {}
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._starting = threading.Lock()
        self._printing = threading.Lock()
        self._making: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)

    def run_all(self, parts: list[Part]) -> Counter[str]:
        """Returns how many tests `passed`, `failed` and were `skipped`."""
        total: Counter[str] = Counter()
        with ThreadPoolExecutor(self._jobs) as pool:
            try:
                waiting = {pool.submit(self._run, part) for part in parts}
                while waiting:
                    ended, waiting = wait(waiting, timeout=STILL_RUNNING_S, return_when="FIRST_COMPLETED")
                    for part in ended:
                        total.update(part.result())
                    if not ended:
                        self._say_what_runs(len(waiting))
            except BaseException:  # ctrl-C and SIGTERM too: the pool would wait for its parts
                pool.shutdown(wait=False, cancel_futures=True)
                self._stop()
                raise
        return total

    def _run(self, part: Part) -> Counter[str]:
        say(f"{part.name}: {part.target}")
        started = self._running[part.name] = time.monotonic()
        name = part.name.replace(" ", "-")
        report, log = REPORTS / f"{name}.xml", REPORTS / f"{name}.log"
        report.unlink(missing_ok=True)
        with open(log, "wb") if self._jobs > 1 else contextlib.nullcontext() as output:
            if part.python and not self._make_venv(part, output):
                problem: str | None = f"{part.venv} could not be made with {part.python}"
            else:
                problem = self._run_pytest(part, report, output)
        counts = read_report(report)
        # What is wrong without being one test's fault is one more failure.
        if problem and not counts["failed"]:
            counts["failed"] += 1
        remark = f" ({problem})" if problem else ""
        del self._running[part.name]
        with self._printing:
            if output is not None:
                sys.stdout.flush()
                sys.stdout.buffer.write(log.read_bytes())
                sys.stdout.buffer.flush()
            say(f"{part.name}: {summary(counts)}{remark}, {time.monotonic() - started:.0f} s")
        return counts

    def _make_venv(self, part: Part, output: IO[bytes] | None) -> bool:
        command = ["make", "--silent", f"PYTHON={part.python}", f"{part.venv}/.ready"]
        # Without the settings of the make that may have started this process.
        env = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}}
        with self._making[part.venv]:  # two parts may share it
            return self._wait(self._start(command, output, env)) == 0

    def _run_pytest(self, part: Part, report: Path, output: IO[bytes] | None) -> str | None:
        """Returns what went wrong, if anything did."""
        targets = [part.target, *part.also]
        command: list[str | Path] = [part.venv / "bin/python", "-m", "pytest", *targets, f"--junitxml={report}"]
        # Releases of vLLM overwrite each other's notes on models there, and take 15 s to make their own again.
        env = {**os.environ, "VLLM_CACHE_ROOT": str(ROOT / part.venv / "cache")}
        try:
            process = self._start(command, output, env)
        except OSError as error:
            return str(error)
        try:
            status = self._wait(process, LIMIT_S)
        except subprocess.TimeoutExpired:
            report.unlink(missing_ok=True)  # it would count the test that was cut off as passed
            return f"ended after {LIMIT_S:.0f} s, its limit"
        return {0: None, 5: "no test ran"}.get(status, f"pytest's exit status is {status}")

    def _start(
        self, command: Sequence[str | Path], output: IO[bytes] | None, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with self._starting:
            if self._stopped:
                raise OSError("stopped")
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
            )
            self._processes.add(process)
        return process

    def _wait(self, process: subprocess.Popen[bytes], limit_s: float | None = None) -> int:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            # First as ctrl-C would: pytest says where it was, and the fixtures stop what they started.
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            raise
        finally:
            kill(process)
            process.wait()
            self._processes.discard(process)

    def _stop(self) -> None:
        with self._starting:
            self._stopped = True
        for process in list(self._processes):
            kill(process)

    def _say_what_runs(self, left: int) -> None:
        now = time.monotonic()
        running = [f"{name} ({now - started:.0f} s)" for name, started in list(self._running.items())]
        say(f"... {', '.join(running)}; {left - len(running)} more")


def kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read_report(report: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                counts["failed"] += 1
            elif (skipped := case.find("skipped")) is not None and skipped.get("type") != "pytest.xfail":
                counts["skipped"] += 1
            else:
                counts["passed"] += 1
    return counts


def summary(counts: Counter[str]) -> str:
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    return f"{counts['passed']} passed, {counts['failed']} failed{skipped}"


def main(names: list[str]) -> int:
    if not names or not set(names) <= SUITES.keys():
        print(f"usage: run.py SUITE...   (of {', '.join(SUITES)})", file=sys.stderr)
        return 2
    os.chdir(ROOT)
    REPORTS.mkdir(parents=True, exist_ok=True)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # it makes each process of an engine compile for 20 s
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    parts = [part for name in names for part in SUITES[name]()]
    total: Counter[str] = Counter()
    for jobs, some in (
        (JOBS, [part for part in parts if part.target not in ALONE]),
        (1, [part for part in parts if part.target in ALONE]),
    ):
        if some:
            total += Runner(max(1, min(jobs, len(some)))).run_all(some)
    say("done")
    # Alone on its line and the last one: it is read by machines.
    print(summary(total), flush=True)
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
