"""A real Prometheus and a real collector as child processes on loopback, put away again whatever happens.

Each gets free ports and a folder of its own; only what was started here is ever stopped, by its process id.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
COLLECTOR = ROOT / "collector"
LOOPBACK = "127.0.0.1"
EXACT_FEATURES = ("created-timestamp-zero-ingestion", "promql-extended-range-selectors")

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def eventually(what: Callable[[], bool], seconds: float, every: float = 0.1) -> bool:
    """Whether `what` became true within `seconds`."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(every)
    return True


class Child:
    """One process, its output in a file."""

    def __init__(self, command: Sequence[str | Path], log: Path, env: Mapping[str, str], cwd: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                cwd=cwd,
            )

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        if not eventually(lambda: self.process.poll() is not None or ready(), seconds):
            self.stop()
            raise RuntimeError(f"not ready within {seconds} s:\n{self.tail()}")
        if self.process.poll() is not None:
            raise RuntimeError(f"ended with {self.process.returncode}:\n{self.tail()}")

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, how: signal.Signals = signal.SIGTERM, seconds: float = 20) -> None:
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Resident memory, without pages of mapped files."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no RssAnon")


def answers(url: str) -> bool:
    """Whether a GET succeeds right now."""
    try:
        with _DIRECT.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@dataclass
class Collector:
    """The collector with one of our configurations: `with Collector(folder, backend) as collector:`.

    `config` may be several files, merged in order, as on its command line. A stop and a start keep ports and queue.
    """

    folder: Path
    backend: str
    config: Sequence[Path] = (COLLECTOR / "pipeline.yaml",)
    window: str = "2s"
    env: Mapping[str, str] = field(default_factory=dict)
    grpc_port: int = 0
    http_port: int = 0
    health_port: int = 0
    child: Child | None = field(default=None, init=False)

    def __enter__(self) -> Collector:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def http(self) -> str:
        return f"http://{LOOPBACK}:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"{LOOPBACK}:{self.grpc_port}"

    def start(self) -> Collector:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.grpc_port = self.grpc_port or free_port()
        self.http_port = self.http_port or free_port()
        self.health_port = self.health_port or free_port()
        self.child = Child(
            [BUILD / "otelcol-specdec", *(part for each in self.config for part in ("--config", each))],
            self.folder / "collector.log",
            {
                "SPECDEC_OTLP_GRPC": self.grpc,
                "SPECDEC_OTLP_HTTP": f"{LOOPBACK}:{self.http_port}",
                "SPECDEC_HEALTH": f"{LOOPBACK}:{self.health_port}",
                "SPECDEC_BACKEND": self.backend,
                "SPECDEC_WINDOW": self.window,
                "SPECDEC_QUEUE_DIR": str(self.folder / "queue"),
                **self.env,
            },
            self.folder,
        )
        self.child.wait_until(self.healthy, 30)
        return self

    def healthy(self) -> bool:
        return answers(f"http://{LOOPBACK}:{self.health_port}/")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.child is not None:
            self.child.stop(how)
            self.child = None

    def log(self) -> str:
        return (self.folder / "collector.log").read_text(errors="replace")


@dataclass(frozen=True)
class Value:
    """One series of an answer."""

    labels: Mapping[str, str]
    value: float
    time: float = 0


@dataclass
class Prometheus:
    """Prometheus with our prometheus.yml: `with Prometheus(folder) as prometheus:`.

    `rules` replace its rule files; the evaluation interval is a second, so that tests need not wait for one.
    """

    folder: Path
    rules: Sequence[Path] = ()
    features: Sequence[str] = EXACT_FEATURES
    scrape: Mapping[str, str] = field(default_factory=dict)
    """Job name to `host:port`."""
    evaluation: str = "1s"
    port: int = 0
    child: Child | None = field(default=None, init=False)

    def __enter__(self) -> Prometheus:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def otlp(self) -> str:
        """The base for OTLP/HTTP; an exporter adds /v1/metrics."""
        return f"{self.url}/api/v1/otlp"

    def start(self) -> Prometheus:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        config = yaml.safe_load((COLLECTOR / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": self.evaluation}
        config["rule_files"] = [str(path.absolute()) for path in self.rules]
        config["scrape_configs"] = [
            {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in self.scrape.items()
        ]
        path = self.folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        self.child = Child(
            [
                BUILD / "prometheus",
                f"--config.file={path}",
                f"--storage.tsdb.path={self.folder / 'data'}",
                f"--web.listen-address={LOOPBACK}:{self.port}",
                "--web.enable-otlp-receiver",
                f"--enable-feature={','.join(['exemplar-storage', *self.features])}",
            ],
            self.folder / "prometheus.log",
            {},
            self.folder,
        )
        self.child.wait_until(lambda: answers(f"{self.url}/-/ready"), 60)
        return self

    def stop(self) -> None:
        if self.child is not None:
            self.child.stop()
            self.child = None

    def api(self, path: str, **parameters: object) -> Any:
        """The data of an API call; RuntimeError with what Prometheus says is wrong."""
        url = f"{self.url}/api/v1/{path}"
        body = urllib.parse.urlencode(parameters).encode() if parameters else None
        try:
            with _DIRECT.open(urllib.request.Request(url, data=body), timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{parameters}: {error.read().decode(errors='replace')}") from None

    def query(self, expression: str, at: float | None = None) -> list[Value]:
        """An instant query, now or at a time."""
        data = self.api("query", query=expression, **({} if at is None else {"time": f"{at:.3f}"}))
        assert data["resultType"] == "vector", data
        return [Value(each["metric"], float(each["value"][1]), each["value"][0]) for each in data["result"]]

    def value(self, expression: str, at: float | None = None) -> float | None:
        """The value of an expression with one result; None where there is none."""
        values = self.query(expression, at)
        assert len(values) <= 1, values
        return values[0].value if values else None

    def samples(self, selector: str, seconds: int) -> list[tuple[Mapping[str, str], list[tuple[float, float]]]]:
        """The raw samples of the last `seconds`, by series."""
        data = self.api("query", query=f"{selector}[{seconds}s]")
        return [(each["metric"], [(float(t), float(v)) for t, v in each["values"]]) for each in data["result"]]

    def exemplars(self, selector: str, seconds: float = 3600) -> list[Mapping[str, Any]]:
        """Every exemplar of the last `seconds`, with the labels of its series."""
        now = time.time()
        data = self.api("query_exemplars", query=selector, start=now - seconds, end=now + 60)
        return [{**one, "series": each["seriesLabels"]} for each in data for one in each["exemplars"]]


def post(url: str, body: bytes, headers: Mapping[str, str] | None = None, timeout: float = 10) -> int:
    """POST protobuf; the status, 0 where the connection failed."""
    request = urllib.request.Request(
        url, data=body, headers={"Content-Type": "application/x-protobuf", **(headers or {})}
    )
    try:
        with _DIRECT.open(request, timeout=timeout) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def run(command: Iterable[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """A command to its end, its output as text."""
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=120, check=False, **options
    )
