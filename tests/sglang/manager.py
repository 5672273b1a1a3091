"""SGLang's real `TokenizerManager` without an engine: messages that a scheduler would have sent, one by one.

Real are the class and its response path, its message classes, `ReqState`, `GenerateReqInput` and the configuration;
made here are the attributes that need sockets, a tokenizer or processes. What a test says in a message is what the
scheduler would say.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import AbortReq, BatchStrOutput, BatchTokenIDOutput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.runtime_context import get_context

from otel_specdec import SGLangSpecDecInstrumentor
from tests.unit.collected import Meter

LENGTH = {"type": "length", "length": 100}
ABORT = {"type": "abort", "message": "Aborted"}
NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
CHAIN: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_eagle_topk": 1,
    "speculative_num_steps": 3,
    "speculative_num_draft_tokens": 4,
}


@dataclass(frozen=True)
class Says:
    """One row of a message, cumulative as the scheduler sends it."""

    rid: str
    completion: int
    verify: int = 0
    accepted: int = 0
    reason: Any = None
    retractions: int = 0
    histogram: Sequence[int] = ()
    rank: int | None = None


def message(*rows: Says, kind: Any = BatchStrOutput, **columns: Any) -> Any:
    """A real message with these rows; `columns` replace whole columns of it."""
    values: dict[str, Any] = dict.fromkeys(kind.__struct_fields__)
    values.update(
        rids=[row.rid for row in rows],
        finished_reasons=[row.reason for row in rows],
        output_strs=["x" for _ in rows],
        output_ids=[array("q", [1]) for _ in rows],
        prompt_tokens=[3 for _ in rows],
        completion_tokens=[row.completion for row in rows],
        reasoning_tokens=[0 for _ in rows],
        cached_tokens=[0 for _ in rows],
        retraction_counts=[row.retractions for row in rows],
        spec_verify_ct=[row.verify for row in rows],
        spec_num_correct_drafts=[row.accepted for row in rows],
        spec_correct_drafts_histogram=[list(row.histogram) for row in rows],
        spec_cap_lens_histogram=[[] for _ in rows],
        dp_ranks=[row.rank for row in rows] if any(row.rank is not None for row in rows) else None,
    )
    values.update(columns)
    return kind(**{name: value for name, value in values.items() if name in kind.__struct_fields__})


class _Silent:
    """In the place of the request logger and of the exporter of request metrics."""

    def log_received_request(self, *_: Any, **__: Any) -> None: ...

    def log_finished_request(self, *_: Any, **__: Any) -> None: ...

    def exporter_enabled(self) -> bool:
        return False


class Rig:
    """A real manager, instrumented for a provider with an in-memory reader, under these settings of the server.

    Use it as a context manager: it publishes the configuration and instruments, and puts all back.
    """

    def __init__(self, *, provider: MeterProvider | None = None, instrument: bool = True, **settings: Any) -> None:
        self.meter = Meter(resource={"service.instance.id": "here"})
        self.provider = provider or self.meter.provider
        self.instrument = instrument
        self.settings = {"served_model_name": "tiny", **(settings or NGRAM)}
        self.answers: dict[str, dict[str, Any]] = {}
        self.loop = asyncio.new_event_loop()

    def __enter__(self) -> Rig:
        self._context = get_context().override_server_args(**self.settings)
        self._context.__enter__()
        if self.instrument:
            SGLangSpecDecInstrumentor().instrument(meter_provider=self.provider)
        self.manager = self.new_manager()
        return self

    def __exit__(self, *_: object) -> None:
        if SGLangSpecDecInstrumentor().is_instrumented_by_opentelemetry:
            SGLangSpecDecInstrumentor().uninstrument()
        self._context.__exit__(None, None, None)
        self.loop.close()

    def new_manager(self) -> Any:
        manager = TokenizerManager.__new__(TokenizerManager)
        manager.rid_to_state = {}
        manager.served_model_name = self.settings["served_model_name"]
        manager.enable_metrics = manager.enable_lora = manager.enable_trace = False
        manager.skip_tokenizer_init = manager.incremental_streaming_output = False
        manager.dump_requests_folder = ""
        manager.crash_dump_folder = None
        manager.disaggregation_mode = DisaggregationMode.NULL
        manager.request_logger = manager.request_metrics_exporter_manager = _Silent()
        manager.encoder_dispatch_ready = {}
        return manager

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 30))

    def add(self, rid: str | list[str], *, stream: bool = False, **request: Any) -> Any:
        """Make the state of a request as the manager does; returns the request."""
        sampling = request.pop("sampling_params", {"max_new_tokens": 100})
        prompt = (
            {} if "input_embeds" in request else {"input_ids": [1, 2, 3] if isinstance(rid, str) else [[1]] * len(rid)}
        )
        obj = GenerateReqInput(rid=rid, sampling_params=sampling, stream=stream, **prompt, **request)
        obj.normalize_batch_and_arguments()
        self.manager._init_req_state(obj)
        return obj

    def says(self, *rows: Says, **settings: Any) -> None:
        """Let the manager handle a message; the answers that it finished are in `answers`, as the client gets them."""
        self.handle(message(*rows, **settings))

    def handle(self, received: Any) -> None:
        states = dict(self.manager.rid_to_state)
        self.run(self.manager._handle_batch_output(received))
        for rid in received.rids:
            if rid in states and rid not in self.manager.rid_to_state:
                self.answers[rid] = states[rid].out_list[-1]["meta_info"]

    def abort_in_queue(self, rid: str) -> None:
        self.manager._handle_abort_req(AbortReq(rid=rid))

    def counted(self) -> dict[str, int]:
        """Totals so far, of those counters that have points."""
        return self.meter.totals()


TOKEN_IDS = BatchTokenIDOutput
