"""Two tokenizer workers: each counts its own requests, and together they count what one would."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from examples.vllm_demo.tiny_model import Models
from otel_specdec.names import Metric
from tests.sglang.serving import KNOWN, check_points, serving, told


def test_two_tokenizer_workers_count_the_same_totals(models: Models, tmp_path: Path) -> None:
    # A worker imports for longer than the 5 s that uvicorn would give it on a busy machine.
    env = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "300"}
    with serving(models, tmp_path, env=env, tokenizer_worker_num=2) as served:
        # The server is healthy when one of its workers is; the other comes when it comes.
        assert served.receiver.wait(lambda receiver: len(receiver.streams(Metric.COMPLETION.value)) == 2, 200)
        with ThreadPoolExecutor(4) as clients:
            asked = [
                clients.submit(served.generate, KNOWN if n % 2 else "the cat", sampling={"max_new_tokens": 5 + n})
                for n in range(24)
            ]
            answers = [answer for each in asked for answer in each.result()]
        answers += served.generate([KNOWN, "12"], rid=["r0", "r1"], sampling={"max_new_tokens": 20})
        answers += served.generate(KNOWN, sampling={"max_new_tokens": 20, "n": 2})
        totals = served.settle(len(answers), seconds=30)
        assert totals == told(answers)
        processes = {str(point.attributes["specdec.process"]) for point in served.points()}
        assert len(processes) == 2
        by_process = [served.totals(**{"specdec.process": process})["generations"] for process in processes]
        assert sum(by_process) == len(answers)
        assert min(by_process) > 0  # connections are spread over both
        check_points(served, processes=2)  # scheduler and detokenizer stay silent
