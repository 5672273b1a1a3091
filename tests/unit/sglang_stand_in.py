"""A package `sglang` in `sys.modules`: a tokenizer manager with the shape of the real one and none of its work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from otel_specdec.engines import sglang as adapter

COLUMNS = (
    "rids", "finished_reasons", "completion_tokens", "spec_verify_ct", "spec_num_correct_drafts",
    "spec_correct_drafts_histogram", "retraction_counts", "dp_ranks",
)  # fmt: skip


def tokenizer_manager() -> Any:
    """A new class each time; what its methods do and return is what its instance's `outcome` does and returns."""

    class TokenizerManager:
        def __init__(self, server_args: Any) -> None:
            self.server_args = server_args
            self.served_model_name = "served"
            self.rid_to_state: Any = {}
            self.outcome: Callable[[], Any] = lambda: None

        def _handle_batch_output(self, recv_obj: Any) -> Any:
            return self.outcome()

        def _handle_abort_req(self, recv_obj: Any) -> Any:
            return self.outcome()

    return TokenizerManager


@contextmanager
def importable() -> Iterator[Any]:
    """Yields the manager's class, as if sglang had been imported. Takes the modules back."""
    messages = ModuleType("sglang.srt.managers.io_struct")
    fields = dict.fromkeys(COLUMNS)
    messages.BatchTokenIDOutput = type("BatchTokenIDOutput", (), {"__dataclass_fields__": fields})  # type: ignore[attr-defined]
    module = ModuleType(adapter.TOKENIZER_MODULE)
    manager = module.TokenizerManager = tokenizer_manager()  # type: ignore[attr-defined]  # made here, as the one above
    made = {each.__name__: each for each in (ModuleType("sglang"), messages, module)}
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield manager
    finally:
        for name, was in before.items():
            if was is None:
                del sys.modules[name]
            else:
                sys.modules[name] = was


def settings(**fields: Any) -> SimpleNamespace:
    told: dict[str, Any] = {
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 1,
        "speculative_num_steps": 3,
        "speculative_num_draft_tokens": 4,
        "dp_size": 2,
    }
    known = dict.fromkeys(
        ("disaggregation_mode", "speculative_adaptive", "decoupled_spec_role", "enable_mixed_chunk",
         "disable_overlap_schedule", "model_path", "served_model_name"),
    )  # fmt: skip
    return SimpleNamespace(**(known | told | fields))


def state(**fields: Any) -> SimpleNamespace:
    """What the manager keeps of a request."""
    obj = SimpleNamespace(sampling_params={}, input_embeds=None, session_id=None)
    return SimpleNamespace(**({"finished": False, "obj": obj, "time_stats": None} | fields))
