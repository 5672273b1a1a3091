"""`migrate`: every query on an engine's own metrics is rewritten or said to be left, and nothing else is touched."""

from __future__ import annotations

import copy
import json
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from collector.mixin import recording
from collector.mixin.prometheus_names import POOL, counter
from otel_specdec.cli import migrate, queries
from otel_specdec.names import Metric
from tests.unit import dashboards
from tests.unit.scripts import run as run_script

OURS = 'gen_ai_provider_name="vllm",specdec_source="engine"'
CHOSEN = f'{{{OURS},gen_ai_request_model=~"$model_name"}}'
RECORDED = {
    rule.record
    for rules in (recording.pool_rules, recording.ratio_rules, recording.position_rules)
    for rule in rules()
}  # fmt: skip


def rewritten(query: str, **labels: str) -> str:
    return queries.rewrite(query, labels).query


def halves(ratio: str, chosen: str = CHOSEN, by: str = "") -> str:
    above, below = (f"sum{by}(specdec:{ratio}:{half}_rate5m{chosen})" for half in ("numerator", "denominator"))
    return f"{above} / ({below} > 0)"


def exprs(dashboard: Any) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def test_each_query_of_vllms_own_board_becomes_one_on_pooled_sums() -> None:
    result = migrate.migrate(dashboards.vllm())
    assert not result.left
    assert (len(result.rewritten), result.others) == (13, 1)
    by_model, by_position = " by (gen_ai_request_model)", " by (specdec_position)"
    accepted, proposed = (f"sum(specdec:accept_rate:{half}_rate5m{CHOSEN})" for half in ("numerator", "denominator"))
    assert exprs(result.dashboard)[:10] == [
        halves("accept_rate"),
        halves("acceptance_length"),
        accepted,
        proposed,
        f"sum(specdec:acceptance_length:denominator_rate5m{CHOSEN})",
        f"{accepted} / (sum(specdec:tokens_per_verify:numerator_rate5m{CHOSEN}) > 0)",
        halves("accept_rate", by=by_model),
        halves("acceptance_length", by=by_model),
        halves("position_accept_rate", by=by_position),
        exprs(result.dashboard)[9],
    ]
    # Split by what no recorded name is split by: the raw counters, of complete pairs.
    assert exprs(result.dashboard)[9].startswith(
        "sum by (instance, specdec_engine_index)(rate(specdec_accepted_tokens_total{specdec_ratio_set=~"
    )
    assert exprs(result.dashboard)[10:13] == [proposed, accepted, f"{proposed} - {accepted}"]
    legends = [target["legendFormat"] for panel in result.dashboard["panels"] for target in panel.get("targets", ())]
    assert legends[6:10] == [
        "{{gen_ai_request_model}}",
        "{{gen_ai_request_model}}",
        "position {{specdec_position}}",
        "{{instance}} · engine {{specdec_engine_index}}",
    ]


def test_nothing_but_queries_and_legends_changes() -> None:
    before, after = dashboards.vllm(), migrate.migrate(dashboards.vllm()).dashboard

    def without(dashboard: Any) -> Any:
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                del target["expr"], target["legendFormat"]
        return dashboard

    assert after["panels"][-1] == before["panels"][-1]
    assert without(after) == without(before)


@pytest.mark.parametrize(("query", "what"), dashboards.AVERAGES.items(), ids=dashboards.AVERAGES.values())
def test_other_shapes_have_a_counterpart_too(query: str, what: str) -> None:
    new = rewritten(query)
    assert not queries.asked(new)
    promql_parser.parse(re.sub(r"\[\$\w+\]", "[5m]", new).replace("$__range_s", "3600"))


def test_what_it_cannot_rewrite_stays_and_the_reason_is_given() -> None:
    before = dashboards.others()
    result = migrate.migrate(copy.deepcopy(before))
    assert {query.old for query in result.left} == dashboards.HOPELESS.keys()
    for query in result.left:
        assert query.why_not is not None
        assert dashboards.HOPELESS[query.old] in query.why_not
        assert f"left as it is: {query.why_not}" in result.report()
    assert exprs(result.dashboard)[len(dashboards.AVERAGES) :] == exprs(before)[len(dashboards.AVERAGES) :]


@pytest.mark.parametrize("dashboard", [dashboards.vllm, dashboards.others])
def test_a_second_run_changes_nothing(dashboard: Callable[[], Any]) -> None:
    once = migrate.migrate(dashboard())
    twice = migrate.migrate(copy.deepcopy(once.dashboard))
    assert once.rewritten
    assert not twice.rewritten
    assert twice.dashboard == once.dashboard
    assert [query.old for query in twice.left] == [query.old for query in once.left]


def test_every_name_that_is_asked_for_is_recorded_or_a_counter_of_ours() -> None:
    asked = set()
    for dashboard in (dashboards.vllm(), dashboards.others()):
        new = [query.new for query in migrate.migrate(dashboard).rewritten]
        asked |= set(re.findall(r"specdec[:_]\w+(?::\w+)*(?=[{\[])", " ".join(filter(None, new))))
    counters = {counter(Metric.ACCEPTED), counter(Metric.PROPOSED)}
    assert len(asked) > 8
    assert asked <= RECORDED | counters
    assert queries.POOL == POOL


def test_a_recorded_ratio_is_asked_for_where_nothing_is_summed() -> None:
    assert rewritten("sglang:spec_accept_length") == (
        'specdec:acceptance_length:ratio_rate5m{gen_ai_provider_name="sglang",specdec_source="engine"}'
    )


def test_the_denominator_of_a_rate_is_of_its_own_position() -> None:
    one = 'sum(rate(vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}[5m]))'
    drafts = "sum(rate(vllm:spec_decode_num_drafts_total[5m]))"
    assert rewritten(f"{one} / {drafts}") == halves("position_accept_rate", f'{{{OURS},specdec_position="0"}}')
    # Of all positions together it is no accept rate, but tokens a step, as it was.
    every = "sum(rate(vllm:spec_decode_num_accepted_tokens_per_pos_total[5m]))"
    assert rewritten(f"{every} / {drafts}") == (
        f"sum(specdec:position_accept_rate:numerator_rate5m{{{OURS}}})"
        f" / (sum(specdec:acceptance_length:denominator_rate5m{{{OURS}}}) > 0)"
    )


@pytest.mark.parametrize(
    ("window", "inner"),
    [
        ("1m", "{}"),
        ("5m", "{}"),
        ("$__interval", "{}"),
        ("1h", "avg_over_time({}[1h])"),
        ("$range", "avg_over_time({}[$range])"),
        ("${__range}", "avg_over_time({}[${{__range}}])"),
    ],
)
def test_a_window_is_the_recorded_one_or_a_longer_one_over_it(window: str, inner: str) -> None:
    query = f"sum(rate(vllm:spec_decode_num_drafts_total[{window}]))"
    series = f"specdec:acceptance_length:denominator_rate5m{{{OURS}}}"
    assert rewritten(query) == f"sum({inner.format(series)})"


def test_an_increase_over_a_range_is_a_rate_times_its_seconds() -> None:
    for window, seconds in (("1d", "86400"), ("$__range", "$__range_s")):
        query = f"sum(increase(vllm:spec_decode_num_drafts_total[{window}]))"
        series = f"specdec:acceptance_length:denominator_rate5m{{{OURS}}}"
        assert rewritten(query) == f"sum(avg_over_time({series}[{window}])) * {seconds}"


def test_an_offset_and_a_comparison_stay() -> None:
    query = "sum(rate(vllm:spec_decode_num_drafts_total[5m] offset 1d)) > 0"
    assert rewritten(query) == f"sum(specdec:acceptance_length:denominator_rate5m{{{OURS}}} offset 1d) > 0"


def test_a_text_in_quotes_stays_as_it_is_written() -> None:
    query = r"""sum(rate(vllm:spec_decode_num_drafts_total{model_name=~"a\\.b|\"c\"|${model:regex}"}[5m]))"""
    assert r'gen_ai_request_model=~"a\\.b|\"c\"|${model:regex}"}' in rewritten(query)


def test_filters_that_name_a_scrape_are_left_out_and_said() -> None:
    new = queries.rewrite('sum(rate(vllm:spec_decode_num_drafts_total{job="a", instance="b:8000"}[5m]))')
    assert new.query == f"sum(specdec:acceptance_length:denominator_rate5m{{{OURS}}})"
    assert [note for note in new.notes if "job, instance" in note]


def test_a_label_that_ours_have_too_is_kept_under_its_name() -> None:
    query = 'sum by (pod) (rate(vllm:spec_decode_num_drafts_total{namespace="a"}[5m]))'
    assert rewritten(query, pod="instance", namespace="job") == (
        "sum by (instance)(rate(specdec_verify_steps_total"
        f'{{specdec_ratio_set=~"(.+,)?acceptance_length(,.+)?",{OURS},job="a"}}[5m]))'
    )


def test_rows_exports_library_panels_annotations_and_the_newer_schema_are_looked_into() -> None:
    query = {"expr": "sglang:spec_accept_rate", "refId": "A"}
    newer = {
        "kind": "Panel",
        "spec": {"title": "newer", "data": {"spec": {"queries": [{"spec": {"spec": {**query}}}]}}},
    }
    dashboard = {
        "dashboard": {
            "panels": [{"type": "row", "title": "row", "panels": [{"title": "inner", "targets": [{**query}]}]}],
            "annotations": {"list": [{"name": "note", **query}]},
            "elements": {"panel-1": newer},
        },
        "meta": {"folderId": 1},
    }
    result = migrate.migrate(dashboard)
    assert sorted(query.panel for query in result.rewritten) == ["inner", "newer", "note"]
    assert "spec_accept_rate" not in json.dumps(dashboard)


def test_a_variable_of_an_engines_metric_is_said_to_be_left() -> None:
    asks = "label_values(vllm:spec_decode_num_drafts_total, model_name)"
    for query in (asks, {"query": asks, "refId": "x"}):
        dashboard = {"templating": {"list": [{"name": "model", "query": query, "definition": asks}]}}
        (left,) = {query.old for query in migrate.migrate(dashboard).left}
        assert left == asks


def test_a_legend_with_a_label_that_is_gone_is_said() -> None:
    dashboard = {"panels": [dashboards.panel("p", ("sum(rate(vllm:spec_decode_num_drafts_total[5m]))", "{{ pod }}"))]}
    result = migrate.migrate(dashboard)
    assert "the legend names pod, which the series do not have" in result.report()


# The command


def command(*arguments: object) -> int:
    return migrate.main([str(each) for each in arguments])


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_the_file_keeps_its_form(tmp_path: Path, indent: int | str | None, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "board.json"
    text = json.dumps(dashboards.vllm(), indent=indent, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o640)
    assert command(path) == migrate.DONE
    printed = capsys.readouterr()
    assert "13 rewritten, 0 left as they are, 1 others untouched" in printed.err
    assert path.read_text(encoding="utf-8") == text  # without -o nothing is written
    assert command(path, "-o", path) == migrate.DONE
    new = path.read_text(encoding="utf-8")
    assert new == printed.out
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert new == json.dumps(json.loads(new), indent=indent, ensure_ascii=False) + "\n"
    assert command(path, "-o", path) == migrate.DONE  # once more
    assert path.read_text(encoding="utf-8") == new
    assert list(tmp_path.iterdir()) == [path]


def test_a_dashboard_without_such_queries_is_given_back_letter_by_letter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "board.json"
    path.write_text('{"panels":   [ {"targets": [{"expr": "up"}], "x": 1e3, "ü": "\\u00fc"} ]}')
    assert command(path) == migrate.DONE
    assert capsys.readouterr().out == path.read_text()


def test_the_status_says_whether_something_is_left(tmp_path: Path) -> None:
    path = tmp_path / "board.json"
    path.write_text(json.dumps(dashboards.others()))
    assert command(path, "-o", tmp_path / "new.json") == migrate.LEFT
    assert command(tmp_path / "new.json", "-o", tmp_path / "newer.json") == migrate.LEFT


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        (b"", "is no JSON"),
        (b"{", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[1]", "is no dashboard"),
        (b'"x"', "is no dashboard"),
        (b'{"a": NaN}', "no JSON"),
        (b'{"panels": [], "panels": []}', "'panels' is there twice"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_bad_input_gets_a_clear_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, says: str
) -> None:
    path = tmp_path / "board.json"
    if content is not None:
        path.write_bytes(content)
    assert command(path, "-o", tmp_path / "new.json") == migrate.BAD_INPUT
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "new.json").exists()


def test_a_place_that_cannot_be_written_to_gets_one_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "board.json"
    path.write_text("{}")
    assert command(path, "-o", tmp_path / "missing" / "new.json") == migrate.BAD_INPUT
    assert "cannot be written" in capsys.readouterr().err
    assert command(path, "--label", "pod") == migrate.BAD_INPUT
    assert "OLD=NEW" in capsys.readouterr().err


def test_without_its_extra_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "board.json"
    path.write_text("{}")
    monkeypatch.setitem(sys.modules, "promql_parser", None)
    monkeypatch.delitem(sys.modules, "otel_specdec.cli.queries")
    monkeypatch.delattr("otel_specdec.cli.queries")
    assert command(path) == migrate.BAD_INPUT
    assert "otel-specdec[migrate]" in capsys.readouterr().err


def test_it_is_a_subcommand_and_a_program(tmp_path: Path) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    migrate.add_parser(parser.add_subparsers())
    path = tmp_path / "board.json"
    path.write_text("{}")
    arguments = parser.parse_args(["migrate", str(path)])
    assert arguments.run(arguments) == migrate.DONE
    ended = run_script(f"import runpy, sys; sys.argv = ['migrate', {str(path)!r}]\ntry:\n"
                       "    runpy.run_module('otel_specdec.cli.migrate', run_name='__main__')\n"
                       "except SystemExit as end:\n    assert end.code == 0")  # fmt: skip
    assert ended.output == "{}"
    assert "0 rewritten" in ended.log
