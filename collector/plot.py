"""Pictures of a real vLLM server's speculation, plotted from the data of a real Prometheus: `make images`.

    python -m collector.plot run DIR       a server, a Prometheus with our rules, five kinds of traffic; DIR/data.json
    python -m collector.plot draw DIR OUT  OUT/acceptance.png and OUT/averages.png from DIR/data.json alone

Two steps, because the first runs where vLLM is installed and the second where matplotlib is. Windows of the exact rules
are 5 s instead of a minute, so that three minutes show something. In acceptance.png nothing is drawn that Prometheus
did not answer; averages.png sets the same traffic's averages beside it: those over the clients' answers, and what
vLLM's own metrics page gives.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

RATIO = "specdec:acceptance_length:ratio_increase1m"
POSITIONS = "specdec:position_accept_rate:ratio_rate5m"
BEST_K = "specdec:best_k_acceptance_length:ratio_rate5m"
PHASE_S = 25.0
EXPORT_S = 3.0
"""Until what an export interval of one second brought can be asked for."""


def run(folder: Path) -> int:
    """Serve, ask, and keep what Prometheus says of it."""
    import random

    from collector.mixin import recording
    from examples.vllm_demo.server import NGRAM, VllmServer, otlp_environment, total
    from examples.vllm_demo.tiny_model import LETTERS, ensure_models
    from examples.vllm_demo.traffic import Ask, complete, send_now
    from tests.collector.processes import BUILD, COLLECTOR, Prometheus

    folder.mkdir(parents=True, exist_ok=True)
    rules = folder / "exact.rules.yml"
    rules.write_text(recording.exact_file("5s", "8s"))
    dice = random.Random(1)

    def broken() -> str:
        """A text in which drafts are right for a few tokens and then not."""
        parts = [LETTERS[s : s + dice.randint(3, 7)] + dice.choice("0123456789") for s in dice.sample(range(19), 8)]
        begin = dice.randrange(24)
        return "".join(parts) + LETTERS[begin : begin + 2]

    misleading = "9".join(LETTERS[:15]) + "9a"
    phases: dict[str, list[Ask]] = {
        "drafts right": [complete("right", LETTERS + "ab", 60) for _ in range(6)],
        "right for a while": [complete("partly", broken(), 24) for _ in range(12)],
        "half of the requests misled": [
            *(complete("wrong", misleading, 12) for _ in range(4)),
            *(complete("right", LETTERS + "ab", 30) for _ in range(4)),
        ],
        "short answers": [complete("short", LETTERS + "ab", 3) for _ in range(16)],
        "half end at a stop string": [
            *(complete("right", LETTERS + "ab", 30) for _ in range(4)),
            *(complete("stop", LETTERS + "ab", 40, stop=["ij"]) for _ in range(4)),
        ],
    }
    started = time.time()
    with Prometheus(
        folder / "prometheus", [rules, COLLECTOR / "prometheus" / "rules" / "specdec.rules.yml"]
    ) as prometheus:
        server = VllmServer(
            ensure_models(BUILD / "models").target,
            speculative={**NGRAM, "num_speculative_tokens": 5},
            instrument=True,
            work_dir=folder / "vllm",
            env=otlp_environment(prometheus.otlp, service="vllm", interval_ms=1000),
            extra_args=["--disable-uvicorn-access-log", "--per-request-spec-decode-metrics", "summary"],
            start_seconds=400,
        )

        def totals() -> dict[str, float]:
            """What has been counted until now, by us and by vLLM."""
            samples = server.metrics()
            return {
                "emitted": prometheus.value("sum(specdec_emitted_tokens_total)") or 0,
                "verify": prometheus.value("sum(specdec_verify_steps_total)") or 0,
                "accepted": total(samples, "vllm:spec_decode_num_accepted_tokens_total") or 0,
                "drafts": total(samples, "vllm:spec_decode_num_drafts_total") or 0,
            }

        spans, averaged = [], []
        with server:
            time.sleep(12)
            for name, asks in phases.items():
                before, began, answers = totals(), time.time(), []
                while time.time() < began + PHASE_S:
                    answers += send_now(server.url, "tiny", asks, at_once=4)
                    time.sleep(0.5)
                spans.append((name, began, time.time()))
                time.sleep(EXPORT_S)
                reported = [answer.speculation["mean_acceptance_length"] for answer in answers if answer.speculation]
                sums = {key: after - before[key] for key, after in totals().items()}
                averaged.append({"phase": name, "requests": len(answers), "reported": reported, **sums})
            time.sleep(15)
            seconds = int(time.time() - started)
            data = {
                "phases": spans,
                "averaged": averaged,
                "acceptance_length": prometheus.samples(RATIO, seconds),
                "positions": [(value.labels["specdec_position"], value.value) for value in prometheus.query(POSITIONS)],
                "best_k": [(value.labels["k"], value.value) for value in prometheus.query(BEST_K)],
                "emitted": prometheus.value("sum(specdec_emitted_tokens_total)"),
                "verify": prometheus.value("sum(specdec_verify_steps_total)"),
                "exemplars": [
                    {"time": one["timestamp"], "tokens": float(one["value"]), "id": one["labels"]["gen_ai.response.id"]}
                    for one in prometheus.exemplars("specdec_emitted_tokens_total", seconds)
                ],
            }
    (folder / "data.json").write_text(json.dumps(data, indent=1))
    return 0


def draw(folder: Path, images: Path) -> int:
    """Plot what `run` kept."""
    import matplotlib as mpl

    mpl.use("Agg")
    images.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = json.loads((folder / "data.json").read_text())
    _draw_acceptance(data, images / "acceptance.png")
    _draw_averages(data, images / "averages.png")
    return 0


def _draw_acceptance(data: Mapping[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    began = data["phases"][0][1]
    figure, (over_time, by_position, by_k) = pyplot.subplots(
        1, 3, figsize=(13, 4.2), width_ratios=[2.4, 1, 1], constrained_layout=True
    )

    for number, (name, start, end) in enumerate(data["phases"]):
        if number % 2 == 0:
            over_time.axvspan(start - began, end - began, color="0.95")
        over_time.text((start + end) / 2 - began, 6.55, name, ha="center", va="top", fontsize=7)
    for _, samples in data["acceptance_length"]:
        over_time.step([at - began for at, _ in samples], [value for _, value in samples], where="pre", color="C0")
    over_time.scatter(
        [one["time"] - began for one in data["exemplars"]], [1.05] * len(data["exemplars"]), s=7, color="C1", marker="D"
    )
    over_time.text(0, 1.15, "exemplars: each names a generation", fontsize=8, color="C1")
    over_time.set(
        xlim=(-5, data["phases"][-1][2] - began + 5), ylim=(1, 6.7),
        xlabel="seconds (vLLM on a CPU, a model whose answers are known; data of Prometheus)",
        ylabel="tokens per verify step",
        title="acceptance length, windows of 5 s (k = 5)",
    )  # fmt: skip

    positions = sorted((int(position), value) for position, value in data["positions"])
    bars = by_position.bar([str(each) for each, _ in positions], [value for _, value in positions], color="C0")
    by_position.bar_label(bars, fmt="%.2f", fontsize=8, color="white", padding=-14)
    by_position.set(ylim=(0, 1), xlabel="draft position", title="accept rate by position, all of it")

    best = sorted((int(k), value) for k, value in data["best_k"])
    bars = by_k.bar([str(k) for k, _ in best], [value for _, value in best], color="C2")
    by_k.bar_label(bars, fmt="%.2f", fontsize=8, color="white", padding=-14)
    now = data["emitted"] / data["verify"]
    by_k.axhline(now, color="0.2", lw=1, ls="--")
    by_k.set(
        ylim=(1, None),
        xlabel=f"k (dashed: measured, trimmed, {now:.2f})",
        title="acceptance length for every k",
    )

    figure.savefig(path, dpi=110, metadata={"Software": None})


def ways(phases: list[Mapping[str, Any]]) -> dict[str, float]:
    """The acceptance length of the same traffic: as a quotient of sums, and as what is shown instead of it."""
    summed = {key: sum(phase[key] for phase in phases) for key in ("emitted", "verify", "accepted", "drafts")}
    reported = [value for phase in phases for value in phase["reported"]]
    return {
        "pooled: Σ emitted / Σ verify": summed["emitted"] / summed["verify"],
        "mean over the requests that report": fmean(reported),
        "the same, silent requests as 0.0": sum(reported) / sum(phase["requests"] for phase in phases),
        "vLLM's own: 1 + accepted / drafts": 1 + summed["accepted"] / summed["drafts"],
    }


def _draw_averages(data: Mapping[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    phases = data["averaged"]
    groups = [*((phase["phase"], [phase]) for phase in phases), ("all of it", phases)]
    figure, axes = pyplot.subplots(figsize=(13, 4.2), constrained_layout=True)
    colors = ("C0", "C1", "C3", "0.6")
    for number, (color, way) in enumerate(zip(colors, ways(phases), strict=True)):
        at = [group + (number - 1.5) * 0.2 for group in range(len(groups))]
        bars = axes.bar(at, [ways(of)[way] for _, of in groups], 0.19, color=color, label=way)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axvspan(len(groups) - 1.5, len(groups) - 0.5, color="0.95", zorder=0)
    axes.set_xticks(range(len(groups)), [name for name, _ in groups])
    axes.set(
        xlim=(-0.5, len(groups) - 0.5), ylim=(0, 7.4), ylabel="tokens per verify step",
        title="acceptance length of the same traffic, four ways (k = 5)",
    )  # fmt: skip
    axes.legend(ncols=4, fontsize=8, loc="upper center")
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"] and len(sys.argv) == 3:
        sys.exit(run(Path(sys.argv[2]).absolute()))
    if sys.argv[1:2] == ["draw"] and len(sys.argv) == 4:
        sys.exit(draw(Path(sys.argv[2]), Path(sys.argv[3])))
    sys.exit("usage: python -m collector.plot run DIR | draw DIR OUT")
