"""The real SGLang server as a child process that is always put away again: `examples.vllm_demo.server`, for SGLang.

    with SglangServer(model, instrument=True, env=otlp_environment(...)) as server:
        ...

`instrument` puts `opentelemetry-instrument` in front, which is all that a server needs for our counters. A model, its
device and its drafting are the caller's, in `extra_args`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from examples.vllm_demo.server import LOOPBACK, VllmServer


@dataclass
class SglangServer(VllmServer):
    """One SGLang server; see `VllmServer` for what the fields mean that are not vLLM's own."""

    @property
    def log_path(self) -> Path:
        """Where the server's output goes; RuntimeError before the first start."""
        return super().log_path.with_name("sglang.log")

    def command(self) -> list[str]:
        """The command line of the server."""
        python = Path(self.python).absolute()
        return [
            *([str(python.with_name("opentelemetry-instrument"))] if self.instrument else []),
            str(python), "-m", "sglang.launch_server",
            "--model-path", str(self.model.absolute()),
            "--served-model-name", self.served_name,
            "--host", LOOPBACK,
            "--port", str(self.port),
            "--enable-metrics",
            *self.extra_args,
        ]  # fmt: skip
