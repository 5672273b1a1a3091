"""Dashboards that ask for the engines' own metrics, in the shapes of those that are out there.

`vllm()` has the queries of vLLM's board for speculative decoding (vllm-project/vllm at 8aed4e5,
examples/observability/dashboards/grafana/vllm_speculative_decoding.json), panel by panel; `others()` those that vLLM's
and SGLang's documentation, Ray Serve's names and boards of users have. SGLang's own board (sgl-project/sglang at
bac2cc6, examples/monitoring/grafana/dashboards/json/sglang-dashboard.json) asks for none of speculation.
"""

from __future__ import annotations

from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN = ", ".join(f'{name}=~"${name}"' for name in ("job", "model_name", "instance", "engine"))


def rate(name: str, window: str = "$__rate_interval", chosen: str = CHOSEN) -> str:
    return f"rate(vllm:{name}_total{{{chosen}}}[{window}])"


ACCEPTED = rate("spec_decode_num_accepted_tokens")
PROPOSED = rate("spec_decode_num_draft_tokens")
DRAFTS = rate("spec_decode_num_drafts")
BY_POSITION = rate("spec_decode_num_accepted_tokens_per_pos")
GENERATED = rate("generation_tokens")


def panel(title: str, *targets: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "datasource": DATASOURCE,
        "targets": [
            {"expr": expr, "legendFormat": legend, "refId": chr(ord("A") + number)}
            for number, (expr, legend) in enumerate(targets)
        ],
        "fieldConfig": {"defaults": {"unit": "short", "custom": {"lineWidth": 1}}, "overrides": []},
        "gridPos": {"h": 8, "w": 12, "x": 0, "y": 0},
        **more,
    }


def vllm() -> dict[str, Any]:
    rejected = f"sum({PROPOSED}) - sum({ACCEPTED})"
    panels = [
        panel("Draft acceptance rate", (f"sum({ACCEPTED}) / (sum({PROPOSED}) > 0)", "__auto")),
        panel("Acceptance length", (f"1 + sum({ACCEPTED}) / (sum({DRAFTS}) > 0)", "__auto")),
        panel("Accepted tokens / s", (f"sum({ACCEPTED})", "__auto")),
        panel("Draft tokens / s", (f"sum({PROPOSED})", "__auto")),
        panel("Drafts / s", (f"sum({DRAFTS})", "__auto")),
        panel("Output from drafts", (f"sum({ACCEPTED}) / (sum({GENERATED}) > 0)", "__auto")),
        {"type": "row", "title": "Acceptance", "collapsed": False, "panels": []},
        panel(
            "Draft acceptance rate by model",
            (f"sum by (model_name) ({ACCEPTED}) / (sum by (model_name) ({PROPOSED}) > 0)", "{{model_name}}"),
        ),
        panel(
            "Mean acceptance length",
            (f"1 + sum by (model_name) ({ACCEPTED}) / (sum by (model_name) ({DRAFTS}) > 0)", "{{model_name}}"),
        ),
        panel(
            "Acceptance rate by draft position",
            (
                f"sum by (position) ({BY_POSITION}) / on () group_left () (sum({DRAFTS}) > 0)",
                "position {{position}}",
            ),
        ),
        panel(
            "Draft acceptance rate by engine",
            (
                f"sum by (instance, engine) ({ACCEPTED}) / (sum by (instance, engine) ({PROPOSED}) > 0)",
                "{{instance}} · engine {{engine}}",
            ),
        ),
        panel("Token flow", (f"sum({PROPOSED})", "proposed"), (f"sum({ACCEPTED})", "accepted"), (rejected, "rejected")),
        panel(
            "Inter-token latency",
            (f"histogram_quantile(0.5, sum by (le) ({rate('inter_token_latency_seconds_bucket')}))", "p50"),
        ),
    ]
    for number, each in enumerate(panels):
        each["id"] = number + 1
    return {
        "annotations": {"list": [{"builtIn": 1, "datasource": {"type": "grafana", "uid": "-- Grafana --"}}]},
        "description": "Draft acceptance → token flow",
        "editable": True,
        "id": None,
        "panels": panels,
        "schemaVersion": 39,
        "templating": {
            "list": [
                {"name": "model_name", "type": "query", "query": "label_values(vllm:num_requests_running, model_name)"},
                {"name": "filters", "type": "adhoc", "filters": []},
            ]
        },
        "time": {"from": "now-1h", "to": "now"},
        "title": "vLLM / Speculative Decoding",
        "version": 1,
    }


AVERAGES = {
    "avg(sglang:spec_accept_length{model_name=~\"$model_name\"})": "a gauge of each scheduler, averaged",
    "sglang:spec_accept_rate": "a gauge as it is",
    "avg by (model_name) (avg_over_time(sglang:spec_accept_length[1h]))": "and over time",
    "vllm:spec_decode_draft_acceptance_rate{model_name=\"$model\"}": "vLLM's first engine",
    f"{ACCEPTED} / {PROPOSED}": "vLLM's documentation: engine by engine",
    f"1 + ({ACCEPTED} / {DRAFTS})": "and its acceptance length",
    f"{BY_POSITION} / ignoring (position) group_left {DRAFTS}": "and by position",
    "100 * sum(rate(ray_vllm_spec_decode_num_accepted_tokens_total[1m])) "
    "/ sum(rate(ray_vllm_spec_decode_num_draft_tokens_total[1m]))": "Ray Serve's names, in percent",
    "(sum(rate(vllm:spec_decode_num_accepted_tokens_total[5m]))"
    " / sum(rate(vllm:spec_decode_num_draft_tokens_total[5m]))) "
    "or sglang:spec_accept_rate": "one panel for two engines",
    "sum(rate(sglang:generation_tokens_total[5m]))"
    " / sum(rate(sglang:spec_verify_calls_total[5m]))": "tokens per verify",
    "sum(increase(vllm:spec_decode_num_accepted_tokens_total[$__range]))": "how many in all",
}  # fmt: skip
"""Queries that have a pooled counterpart."""

HOPELESS = {
    "vllm:spec_decode_efficiency": "no counter knows k",
    "sglang:spec_num_steps": "a setting",
    "max(sglang:spec_accept_length)": "the max of a gauge that is an average already",
    "sum(vllm:spec_decode_num_drafts_total)": "without rate() or increase()",
    "sum by (pod) (rate(vllm:spec_decode_num_drafts_total[5m]))": "grouped by pod",
    "sum without (engine) (rate(vllm:spec_decode_num_drafts_total[5m]))": "`without`",
    "sum(increase(vllm:spec_decode_num_drafts_total[$__interval]))": "ask for rate()",
    "avg(rate(vllm:spec_decode_num_drafts_total[5m]))": "ask for the sum",
    "rate(vllm:spec_decode_num_drafts_total[5m]": "cannot be read",
    'label_replace(sglang:spec_accept_rate, "model", "$1", "model_name", "(.*)")': "under other names",
    f"{BY_POSITION} - ignoring (position) group_left {DRAFTS}": "matched on position",
    "sum(rate(vllm:spec_decode_num_drafts_total[5m] @ end()))": "at a fixed time",
    'sum(rate({__name__="vllm:spec_decode_num_drafts_total"}[5m]))': "in a form that is not known",
}
"""Queries that have none, and a part of the reason that is given."""


def others() -> dict[str, Any]:
    exprs = [*AVERAGES, *HOPELESS]
    return {"title": "others", "panels": [panel(f"panel {n}", (expr, "")) for n, expr in enumerate(exprs)]}
