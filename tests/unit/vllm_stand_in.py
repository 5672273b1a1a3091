"""A package `vllm` in a folder of its own: a scheduler with the shape of the real one and none of its work.

Hooks are tested on it in ways that the real one can't show: methods that are missing, renamed or of another kind,
modules imported early or late, and versions that are not installed here. The counts of a real vLLM are tested there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import wrapt.importer  # type: ignore[import-untyped, unused-ignore]  # typed in some releases, not in others

MODULE = "vllm.v1.core.sched.scheduler"

SOURCE = '''
from types import SimpleNamespace


class Request:
    def __init__(self, request_id, limit):
        self.request_id, self.limit = request_id, limit
        self.num_output_tokens, self.finished = 0, False
        self.session_id = self.trace_headers = None

    def is_finished(self):
        return self.finished


class Scheduler:
    def __init__(self, vllm_config, log_stats=False):
        self.vllm_config = vllm_config
        self.requests = {}
        self.running = []
        self.finished_req_ids = set()
        self.finished_with = []

    def update_from_output(self, scheduler_output, model_runner_output):
        """Emits what was sampled, trimmed in place where a request comes to its limit."""
        outputs = []
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            tokens = model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[request_id]]
            tokens = TRIM(tokens, request.limit - request.num_output_tokens)
            request.num_output_tokens += len(tokens)
            request.finished = request.num_output_tokens >= request.limit
            reason = "length" if request.finished else None
            outputs.append(SimpleNamespace(request_id=request_id, new_token_ids=list(tokens), finish_reason=reason))
            if request.finished:
                self.free(request)
        self.returned = RETURN(SimpleNamespace(outputs=outputs))
        return self.returned

    def finish_requests(self, request_ids, finished_status="aborted"):
        self.finished_with.append((type(request_ids), finished_status))
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        self.finished = [self.requests[each] for each in dict.fromkeys(request_ids) if each in self.requests]
        for request in self.finished:
            request.finished = True
            self.free(request)
        return self.finished

    def free(self, request):
        del self.requests[request.request_id]
        self.finished_req_ids.add(request.request_id)
        if request in self.running:
            self.running.remove(request)


class AsyncScheduler(Scheduler):
    """Inherits everything, as the real one does."""


def TRIM(tokens, room):
    del tokens[room:]
    return tokens


def RETURN(outputs):
    return {0: outputs}
'''


def write(folder: Path, source: str = SOURCE) -> None:
    package = folder / "vllm" / "v1" / "core" / "sched"
    package.mkdir(parents=True)
    for parent in (package, *package.parents[:3]):
        (parent / "__init__.py").touch()
    (package / "scheduler.py").write_text(source)


@contextmanager
def importable(folder: Path) -> Iterator[Callable[[], ModuleType]]:
    """Puts the folder first on the import path; yields what imports the scheduler's module. Takes both back."""
    forget()
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield lambda: importlib.import_module(MODULE)
    finally:
        sys.path.remove(str(folder))
        forget()


def forget() -> None:
    # wrapt 1.14 takes a module that was imported once for imported ever since.
    hooks = getattr(wrapt.importer, "_post_import_hooks", {})
    for name in [name for name in hooks if name.split(".")[0] == "vllm"]:
        del hooks[name]
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def config(*, speculation: bool = True, k: int = 4, **parallel: int) -> SimpleNamespace:
    speculative = SimpleNamespace(method="ngram", num_speculative_tokens=k) if speculation else None
    return SimpleNamespace(
        speculative_config=speculative,
        model_config=SimpleNamespace(served_model_name="served", model="/models/path"),
        parallel_config=SimpleNamespace(**({"data_parallel_index": 0} | parallel)),
    )


class Steps:
    """Drives a scheduler of the stand-in."""

    def __init__(self, module: ModuleType, name: str = "AsyncScheduler", **settings: Any) -> None:
        self.module = module
        self.scheduler: Any = getattr(module, name)(config(**settings))

    def add(self, *request_ids: str, limit: int = 100) -> None:
        for request_id in request_ids:
            self.scheduler.requests[request_id] = self.module.Request(request_id, limit)

    def step(self, by_keyword: bool = False, **lengths: tuple[int, int]) -> Any:
        """One step: by request, how many drafts it had and how many tokens came out of the model."""
        self.scheduler.finished_req_ids = set()
        for request_id in lengths:
            if self.scheduler.requests[request_id] not in self.scheduler.running:
                self.scheduler.running.append(self.scheduler.requests[request_id])
        sampled = [self.row(generated) for _, generated in lengths.values()]
        step = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(lengths, 1),
            scheduled_spec_decode_tokens={name: [-1] * drafts for name, (drafts, _) in lengths.items() if drafts},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        )
        index = {name: row for row, name in enumerate(lengths)}
        output = SimpleNamespace(sampled_token_ids=sampled, req_id_to_index=index)
        if by_keyword:
            return self.scheduler.update_from_output(model_runner_output=output, scheduler_output=step)
        return self.scheduler.update_from_output(step, output)

    @staticmethod
    def row(length: int) -> Any:
        return list(range(length))
