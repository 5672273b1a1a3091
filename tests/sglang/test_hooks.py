"""The hooks themselves: put on once, taken off again, never in SGLang's way; collections in the middle of messages."""

from __future__ import annotations

import functools
import inspect
import random
import threading
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from otel_specdec import SGLangSpecDecInstrumentor
from otel_specdec.engines import sglang as adapter
from otel_specdec.engines.hooking import is_hook
from otel_specdec.instrumentors import sglang_plugin
from tests.sglang.manager import CHAIN, LENGTH, NGRAM, Rig, Says, message
from tests.unit.collected import Meter, counted

METHODS = ("__init__", "_handle_batch_output", "_handle_abort_req", "abort_request")


def methods() -> dict[str, Any]:
    return {name: vars(TokenizerManager)[name] for name in METHODS}


def test_hooks_come_off_again_and_leave_what_was_counted() -> None:
    before = methods()
    with Rig() as rig:
        hooked = methods()
        assert hooked["abort_request"] is before["abort_request"]  # there is a handler of aborts, so it is not needed
        assert all(hooked[name] is not before[name] for name in METHODS[:3])
        assert TokenizerWorker._handle_batch_output is TokenizerManager._handle_batch_output
        rig.add("a")
        rig.says(Says("a", 4, verify=1, accepted=2, reason=LENGTH))
        SGLangSpecDecInstrumentor().uninstrument()
        assert methods() == before
        rig.add("b")
        rig.says(Says("b", 4, verify=1, accepted=2, reason=LENGTH))
        assert rig.counted()["generations"] == 1


def test_the_hooked_method_stays_what_it_was_for_whoever_looks() -> None:
    with Rig() as rig:
        hooked, original = TokenizerManager._handle_batch_output, inspect.unwrap(TokenizerManager._handle_batch_output)
        assert hooked.__name__ == "_handle_batch_output"
        assert inspect.signature(hooked) == inspect.signature(original)
        coroutine = rig.manager._handle_batch_output(message())
        assert inspect.iscoroutine(coroutine)
        assert coroutine.cr_code is original.__code__  # SGLang's own, not one around it
        rig.run(coroutine)


def test_both_entry_points_together_wrap_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    with Rig() as rig:
        sglang_plugin()
        assert not is_hook(inspect.unwrap(TokenizerManager._handle_batch_output))
        wrapped = vars(TokenizerManager)["_handle_batch_output"].__wrapped__
        assert not is_hook(wrapped)
        rig.add("a")
        rig.says(Says("a", 4, verify=1, accepted=2, reason=LENGTH))
        assert rig.counted()["generations"] == 1


def test_another_plugins_wrapper_on_top_of_ours_is_left_alone_and_counts_once() -> None:
    with Rig() as rig:
        ours = vars(TokenizerManager)["_handle_batch_output"]

        @functools.wraps(ours)  # as SGLang's hook registry does; it copies the attributes of ours
        def theirs(self: Any, recv_obj: Any) -> Any:
            return ours(self, recv_obj)

        TokenizerManager._handle_batch_output = theirs
        try:
            SGLangSpecDecInstrumentor().uninstrument()
            assert vars(TokenizerManager)["_handle_batch_output"] is theirs
            SGLangSpecDecInstrumentor().instrument(meter_provider=rig.provider)
            rig.add("a")
            rig.says(Says("a", 4, verify=1, accepted=2, reason=LENGTH))
            assert rig.counted()["generations"] == 1
        finally:
            TokenizerManager._handle_batch_output = ours


def test_instrumented_again_in_the_middle_of_a_generation_counts_it_once() -> None:
    with Rig() as rig:
        rig.add("a", stream=True)
        rig.says(Says("a", 2))
        rig.says(Says("a", 4, verify=1, accepted=2))
        SGLangSpecDecInstrumentor().uninstrument()
        rig.says(Says("a", 7, verify=2, accepted=4))
        later = Meter()
        SGLangSpecDecInstrumentor().instrument(meter_provider=later.provider)
        rig.says(Says("a", 9, verify=3, accepted=5, reason=LENGTH))
        first, second = rig.counted(), later.totals()
        assert first == {"accepted": 2, "verify": 1, "completion": 4, "emitted": 3, "generations": 0}
        assert second == {"accepted": 3, "verify": 2, "completion": 5, "emitted": 5, "generations": 1}


def test_an_error_of_ours_never_reaches_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig() as rig:
        rig.says()

        def fail(*_: Any) -> None:
            raise RuntimeError("ours")

        monkeypatch.setattr(adapter.RankTally, "_message", fail)
        monkeypatch.setattr(adapter.Watch, "ended_unseen", fail)
        rig.add(["a", "b"])
        rig.says(Says("a", 4, verify=1, accepted=2, reason=LENGTH))
        rig.abort_in_queue("b")
        assert rig.answers["a"]["completion_tokens"] == 4
        assert rig.manager.rid_to_state == {}
        assert rig.meter.errors() == {"RuntimeError": 2}


def test_an_unknown_sglang_is_left_as_it_is_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Other:
        def _handle_batch_output(self, something_else: Any) -> None: ...

    hooks = adapter.Hooks(None)  # type: ignore[arg-type]  # never called
    with caplog.at_level("WARNING"):
        hooks._wrap(type("module", (), {"TokenizerManager": Other}))
    assert [record.name for record in caplog.records] == ["sglang.otel_specdec"]
    assert "_handle_batch_output(self, something_else) is not as expected" in caplog.text
    assert not is_hook(vars(Other)["_handle_batch_output"])


def test_a_message_never_waits_for_a_collection_and_is_counted_after_it() -> None:
    with Rig() as rig:
        rig.add(["a", "b"], stream=True)
        rig.says(Says("a", 4, verify=1, accepted=2), Says("b", 4, verify=1, accepted=2))
        tally = rig.manager._otel_specdec_watch._tallies[0]
        with tally._reading:  # as a collection holds it
            rig.says(Says("a", 6, verify=2, accepted=3, reason=LENGTH))
            rig.add("a")
            rig.says(Says("a", 1))
            rig.says(Says("a", 3, verify=1, accepted=1, reason=LENGTH))
            rig.manager._handle_abort_req(AbortReq(rid="b"))
        assert rig.counted() == {"accepted": 6, "verify": 4, "completion": 13, "emitted": 10, "generations": 3}


def test_a_last_message_during_a_collection_is_not_taken_for_a_state_that_went_without_a_word() -> None:
    """The collection looks up whose state is gone; the last message arrives between that and what was put aside."""
    with Rig() as rig:
        rig.add("a", stream=True)
        rig.says(Says("a", 4, verify=1, accepted=2))
        tally = rig.manager._otel_specdec_watch._tallies[0]
        with tally._reading:
            rig.says(Says("a", 6, verify=2, accepted=3, reason=LENGTH))  # put aside; its state is deleted
        assert "a" in tally._live
        assert rig.counted() == {"accepted": 3, "verify": 2, "completion": 6, "emitted": 5, "generations": 1}
        assert tally._live == {}


def test_a_last_message_between_the_look_at_the_states_and_the_count_is_counted_once() -> None:
    with Rig() as rig:
        rig.add("a", stream=True)
        rig.says(Says("a", 4, verify=1, accepted=2))
        watch = rig.manager._otel_specdec_watch
        states = watch.states

        class Arriving:
            """The states, with a last message that comes just when a collection looks for one."""

            get = staticmethod(states.get)

            def __contains__(self, rid: str) -> bool:
                if rid in states:
                    rig.says(Says("a", 6, verify=2, accepted=3, reason=LENGTH))
                return rid in states

            def __len__(self) -> int:
                return len(states)

        watch.states = Arriving()
        assert rig.counted() == {"accepted": 3, "verify": 2, "completion": 6, "emitted": 5, "generations": 1}
        assert rig.counted()["generations"] == 1


def test_the_engine_is_forgotten_when_its_manager_is() -> None:
    with Rig() as rig:
        rig.add("a")
        rig.says(Says("a", 4, verify=1, accepted=2, reason=LENGTH))
        watch = rig.manager._otel_specdec_watch
        del rig.manager
        assert watch.ended
        assert rig.counted()["generations"] == 1


@pytest.mark.parametrize("settings", [NGRAM, CHAIN], ids=["NGRAM", "chain"])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_counts_what_a_plain_count_says(settings: dict[str, Any], seed: int) -> None:
    """Lives of random length, retracted, aborted, reused, in messages of random rows, with collections in between.

    As on a real engine, many messages are of the same generations as those before them.
    """
    rng = random.Random(seed)
    truth = dict.fromkeys(("accepted", "verify", "completion", "emitted", "generations"), 0)
    positions = [0, 0, 0]
    with Rig(**settings) as rig:
        running: dict[str, Says] = {}
        histograms: dict[str, list[int]] = {}
        rids: list[str] = []
        for turn in range(300):
            while len(running) < 5 or (len(running) < 40 and rng.random() < 0.5):
                rid = f"{rng.choice('abc')}{turn}" if rng.random() < 0.7 else str(rng.randrange(30))
                if rid not in running:
                    rig.add(rid, stream=rng.random() < 0.5)
                    running[rid], histograms[rid] = Says(rid, 0), [0, 0, 0, 0]
            rows = []
            if not (rids and rng.random() < 0.7 and running.keys() >= set(rids)):
                rids = rng.sample(list(running), rng.randint(1, len(running)))
            ending = rng.choice((0, 0, 0.2))
            for rid in rids:
                row = running[rid]
                if not row.completion:
                    row = Says(rid, 1)
                verify, accepted, completion, retractions = row.verify, row.accepted, row.completion, row.retractions
                for _ in range(rng.randint(0, 8)):
                    number = rng.randint(0, 3)
                    verify, accepted, completion = verify + 1, accepted + number, completion + number + 1
                    histograms[rid][number] += 1
                    if rng.random() < 0.03:
                        retractions, completion = retractions + 1, completion + 1
                reason = LENGTH if rng.random() < ending else None
                row = Says(rid, completion, verify, accepted, reason, retractions, histograms[rid][:])
                rows.append(row)
                running[rid] = row
            rig.says(*rows)
            ended = [row for row in rows if row.reason]
            if rng.random() < 0.1:
                queued = rng.choice(list(running))
                if queued not in {row.rid for row in ended}:
                    rig.abort_in_queue(queued)
                    ended.append(running[queued])
            for row in ended:
                del running[row.rid]
                if row.completion:
                    truth["accepted"] += row.accepted
                    truth["verify"] += row.verify
                    truth["completion"] += row.completion
                    truth["emitted"] += row.completion - 1 - row.retractions
                    truth["generations"] += 1
                    for position in range(3):
                        positions[position] += sum(histograms[row.rid][position + 1 :])
            if rng.random() < 0.1:
                rig.counted()
        for rid, row in running.items():
            if row.completion:
                truth["accepted"] += row.accepted
                truth["verify"] += row.verify
                truth["completion"] += row.completion
                truth["emitted"] += row.completion - 1 - row.retractions
                for position in range(3):
                    positions[position] += sum(histograms[rid][position + 1 :])
        totals = rig.counted()
        proposed = totals.pop("proposed", None)
        assert totals == truth
        assert rig.meter.errors() == {}
        if settings is CHAIN:
            assert proposed == 3 * truth["verify"]
            assert rig.meter.at_positions() == (positions, [truth["verify"]] * 3)
        tally = rig.manager._otel_specdec_watch._tallies[0]
        assert set(tally._live) == {rid for rid, row in running.items() if row.completion}
        assert set(tally._lives) <= set(tally._live)


def test_who_is_passed_over_once_stays_so_in_messages_of_the_same_generations() -> None:
    with Rig() as rig:
        rig.add(["HEALTH_CHECK_1", "a"], stream=True)
        for step in range(1, 4):
            rig.says(Says("HEALTH_CHECK_1", 1), Says("a", 1 + 3 * step, verify=step, accepted=2 * step))
        rig.says(Says("a", 11, verify=4, accepted=6, reason=LENGTH))
        assert rig.counted() == {"accepted": 6, "verify": 4, "completion": 11, "emitted": 10, "generations": 1}
        assert rig.manager._otel_specdec_watch._tallies[0]._live == {}


def test_whose_state_went_is_not_counted_again_in_a_message_of_the_same_generations() -> None:
    with Rig() as rig:
        rig.add(["a", "b"], stream=True)
        for step in range(1, 4):
            rig.says(*(Says(rid, 1 + 3 * step, verify=step, accepted=2 * step) for rid in "ab"))
        del rig.manager.rid_to_state["a"]
        assert rig.counted() == {"accepted": 12, "verify": 6, "completion": 20, "emitted": 18, "generations": 1}
        for step in range(4, 6):  # its last rows were on their way
            rig.says(*(Says(rid, 1 + 3 * step, verify=step, accepted=2 * step) for rid in "ab"))
        rig.says(Says("b", 19, verify=6, accepted=12, reason=LENGTH))
        assert rig.counted() == {"accepted": 18, "verify": 9, "completion": 29, "emitted": 27, "generations": 2}


def test_a_message_of_the_same_generations_comes_after_what_was_put_aside() -> None:
    with Rig() as rig:
        rig.add(["a", "b"], stream=True)
        for step in range(1, 4):
            rig.says(*(Says(rid, 1 + 3 * step, verify=step, accepted=2 * step) for rid in "ab"))
        with rig.manager._otel_specdec_watch._tallies[0]._reading:
            rig.says(Says("a", 13, verify=4, accepted=8))
        rig.says(*(Says(rid, 16, verify=5, accepted=10) for rid in "ab"))
        assert rig.counted() == {"accepted": 20, "verify": 10, "completion": 32, "emitted": 30, "generations": 0}


def test_a_message_of_the_same_generations_while_one_put_aside_is_counted() -> None:
    """The collection has just begun to count it, and the engine's thread goes on."""
    with Rig() as rig:
        rig.add(["a", "b"], stream=True)
        for step in range(1, 4):
            rig.says(*(Says(rid, 1 + 3 * step, verify=step, accepted=2 * step) for rid in "ab"))
        tally = rig.manager._otel_specdec_watch._tallies[0]
        with tally._reading:
            rig.says(Says("a", 13, verify=4, accepted=8))
        change = tally._aside[0]

        def begun() -> None:
            rig.says(*(Says(rid, 16, verify=5, accepted=10) for rid in "ab"))
            change()

        tally._aside[0] = begun
        assert rig.counted() == {"accepted": 20, "verify": 10, "completion": 32, "emitted": 30, "generations": 0}


@pytest.mark.parametrize("missing", [[], None], ids=["empty", "none"])
def test_a_message_of_the_same_generations_without_one_of_its_columns(missing: Any) -> None:
    with Rig() as rig:
        rig.add(["a", "b"], stream=True)
        for step in range(1, 4):
            rig.says(*(Says(rid, 1 + 3 * step, verify=step, accepted=2 * step) for rid in "ab"))
        rig.says(*(Says(rid, 13, verify=4, accepted=8) for rid in "ab"), spec_num_correct_drafts=missing)
        totals = rig.counted()
        assert totals.get("accepted", 0) == 0  # not known
        assert totals.items() >= {"verify": 8, "completion": 26, "emitted": 24}.items()
        assert rig.meter.errors() == {}


def test_a_collection_while_the_ids_of_a_message_are_compared() -> None:
    with Rig() as rig:
        rig.add(["a", "b"], stream=True)
        for step in range(1, 4):
            rig.says(*(Says(rid, 1 + 3 * step, verify=step, accepted=2 * step) for rid in "ab"))

        class Ids(list[str]):
            """Just after the comparison, a collection counts what was put aside: a message of others."""

            def __ne__(self, other: object) -> bool:
                if not aside:
                    aside.append("a")
                    with rig.manager._otel_specdec_watch._tallies[0]._reading:
                        rig.says(Says("a", 13, verify=4, accepted=8))
                    rig.counted()
                return super().__ne__(other)

        aside: list[str] = []
        received = message(*(Says(rid, 16, verify=5, accepted=10) for rid in "ab"))
        received.rids = Ids(received.rids)
        rig.handle(received)
        assert aside
        assert rig.counted() == {"accepted": 20, "verify": 10, "completion": 32, "emitted": 30, "generations": 0}


@pytest.mark.parametrize("beside", [True, False], ids=["beside a running one", "alone"])
def test_an_id_that_is_used_again_at_once_is_looked_at_again(beside: bool) -> None:
    def says(of_a: Says) -> None:
        rig.says(of_a, *([Says("b", 2)] if beside else []))

    with Rig(**CHAIN) as rig:
        rig.add(["a", "b"], stream=True)
        says(Says("a", 1))
        says(Says("a", 4, verify=1, accepted=2, histogram=[0, 0, 1], reason=LENGTH))
        rig.add("a", stream=True, sampling_params={"max_new_tokens": 9, "regex": "a*"})
        says(Says("a", 1))
        says(Says("a", 4, verify=1, accepted=2, histogram=[0, 0, 1]))
        rig.says(Says("a", 7, verify=2, accepted=4, histogram=[0, 0, 2], reason=LENGTH))
        # Of the second one proposed is unknown: it is bound to a grammar.
        known = {"accepted": 6, "proposed": 3, "verify": 3, "generations": 2}
        assert rig.counted().items() >= known.items()


def test_collections_on_another_thread_lose_and_double_nothing() -> None:
    with Rig(**CHAIN) as rig:
        stop = threading.Event()
        collecting = threading.Thread(target=lambda: [rig.counted() for _ in iter(stop.is_set, True)])
        collecting.start()
        try:
            for number in range(300):
                rids = [f"{number}-{each}" for each in range(8)]
                rig.add(rids, stream=True)
                for tokens in range(2, 5):  # in the end those of one step
                    step = [0, 0, 1] if tokens == 4 else []
                    rig.says(
                        *(
                            Says(rid, tokens, verify=len(step) // 3, accepted=2 * len(step) // 3, histogram=step)
                            for rid in rids
                        )
                    )
                rig.says(*(Says(rid, 8, verify=2, accepted=5, histogram=[0, 0, 1, 1], reason=LENGTH) for rid in rids))
        finally:
            stop.set()
            collecting.join(30)
        expected = counted(accepted=5, proposed=6, verify=2, completion=8, emitted=7, generations=1)
        assert rig.counted() == {name: 2400 * value for name, value in expected.items()}
        assert rig.meter.at_positions() == ([4800, 4800, 2400], [4800, 4800, 4800])
