"""What the real `TokenizerManager` is told by the scheduler, and what becomes of it in our counters."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import BatchEmbeddingOutput, BatchStrOutput, BatchTokenIDOutput, GenerateReqInput

from tests.sglang.manager import ABORT, CHAIN, LENGTH, NGRAM, Rig, Says, message

NGRAM_ONLY = {"accepted": 0, "verify": 0, "completion": 0, "emitted": 0, "generations": 0}


def ngram(**values: int) -> dict[str, int]:
    """Totals of an engine with NGRAM: no proposed tokens at all."""
    return NGRAM_ONLY | values


def test_series_begin_at_zero_before_any_request_and_without_what_cannot_be_known() -> None:
    with Rig() as rig:
        rig.says()  # a manager that was not made by its own __init__ is met with its first message
        assert rig.meter.sets() == {
            ("accepted", "none"): 0,
            ("verify", "acceptance_length,tokens_per_verify"): 0,
            ("completion", "tokens_per_verify"): 0,
            ("emitted", "acceptance_length"): 0,
            ("generations", "acceptance_length,tokens_per_verify"): 0,
        }


def test_a_request_that_is_not_streamed_is_told_at_once() -> None:
    with Rig() as rig:
        rig.add("a")
        rig.says(Says("a", 10, verify=4, accepted=6, histogram=[1, 1, 1, 1], reason=LENGTH))
        assert rig.counted() == ngram(accepted=6, verify=4, completion=10, emitted=9, generations=1)
        assert rig.answers["a"]["spec_verify_ct"] == 4
        assert rig.answers["a"]["spec_num_correct_drafts"] == 6
        # SGLang's own figure of proposed tokens is steps times width, padding included: it is not taken over.
        assert rig.answers["a"]["spec_num_proposed_drafts"] == 12
        assert "proposed" not in rig.counted()


def test_partial_messages_move_the_counters_while_a_generation_runs() -> None:
    with Rig() as rig:
        rig.add("a", stream=True)
        rig.says(Says("a", 1))
        assert rig.counted() == ngram(completion=1)
        rig.says(Says("a", 4, verify=1, accepted=2))
        assert rig.counted() == ngram(accepted=2, verify=1, completion=4, emitted=3)
        rig.says(Says("a", 6, verify=2, accepted=3))
        rig.says(Says("a", 9, verify=4, accepted=4))
        assert rig.counted() == ngram(accepted=4, verify=4, completion=9, emitted=8)
        rig.says(Says("a", 10, verify=5, accepted=4, reason=LENGTH))
        assert rig.counted() == ngram(accepted=4, verify=5, completion=10, emitted=9, generations=1)


def test_a_running_abort_keeps_its_counters() -> None:
    with Rig() as rig:
        rig.add("a")
        rig.says(Says("a", 4, verify=1, accepted=2, reason=ABORT))
        assert rig.counted() == ngram(accepted=2, verify=1, completion=4, emitted=3, generations=1)


def test_an_abort_in_the_queue_is_no_generation() -> None:
    with Rig() as rig:
        rig.add("a")
        rig.add("b")
        rig.says(Says("b", 1))
        rig.abort_in_queue("a")
        rig.says(Says("b", 4, verify=1, accepted=2, reason=LENGTH))
        assert rig.counted() == ngram(accepted=2, verify=1, completion=4, emitted=3, generations=1)


@pytest.mark.parametrize("collected", [False, True])
def test_an_abort_in_the_queue_after_a_retraction_settles_with_what_was_told_last(collected: bool) -> None:
    with Rig() as rig:
        rig.add("a", stream=True)
        rig.says(Says("a", 1))
        rig.says(Says("a", 7, verify=2, accepted=4))
        if collected:
            assert rig.counted() == ngram(accepted=4, verify=2, completion=7, emitted=6)
        rig.abort_in_queue("a")
        assert rig.counted() == ngram(accepted=4, verify=2, completion=7, emitted=6, generations=1)
        rig.add("a")  # the same id again is another generation
        rig.says(Says("a", 3, verify=1, accepted=1, reason=LENGTH))
        assert rig.counted() == ngram(accepted=5, verify=3, completion=10, emitted=8, generations=2)


def test_a_state_that_goes_without_any_word_settles_at_the_next_collection() -> None:
    with Rig() as rig:
        rig.add("a", stream=True)
        rig.says(Says("a", 7, verify=2, accepted=4))
        del rig.manager.rid_to_state["a"]
        assert rig.counted() == ngram(accepted=4, verify=2, completion=7, emitted=6, generations=1)
        assert rig.counted()["generations"] == 1


def test_a_batch_with_the_users_own_ids() -> None:
    with Rig() as rig:
        rig.add(["r0", "r1", "r2"])
        rig.says(
            Says("r0", 30, verify=24, accepted=5, reason=LENGTH),
            Says("r1", 30, verify=21, accepted=8, reason=LENGTH),
            Says("r2", 30, verify=18, accepted=11, reason=LENGTH),
        )
        assert rig.counted() == ngram(accepted=24, verify=63, completion=90, emitted=87, generations=3)


def test_several_sequences_count_each_and_their_hidden_warm_up_not_at_all() -> None:
    """The real `_handle_batch_request`: it sends a warm-up for the prefix, then n requests with ids of their own."""
    with Rig() as rig:
        manager = rig.manager
        sent: list[Any] = []
        warm_up_tokens = 0

        async def tokenize(obj: Any) -> Any:
            return SimpleNamespace(rid=obj.rid, sampling_params=SimpleNamespace(max_new_tokens=9), stream=False)

        async def send(tokenized: Any) -> None:
            sent.append(tokenized)
            no_token = tokenized.sampling_params.max_new_tokens == 0
            # 0.5.23 says of the warm-up that it has no token; to 0.5.18 one was counted.
            said = (
                Says(tokenized.rid, warm_up_tokens, reason={"type": "length", "length": 0})
                if no_token
                else Says(tokenized.rid, 9, verify=4, accepted=4, reason={"type": "length", "length": 9})
            )
            asyncio.get_running_loop().call_soon(
                lambda: asyncio.ensure_future(manager._handle_batch_output(message(said)))
            )

        manager._tokenize_one_request, manager._send_one_request = tokenize, send

        async def ask() -> list[Any]:
            obj = GenerateReqInput(input_ids=[1, 2], sampling_params={"max_new_tokens": 9, "n": 2})
            obj.normalize_batch_and_arguments()
            manager._init_req_state(obj)
            states = {rid: manager.rid_to_state[rid] for rid in obj.rid}
            return [answers async for answers in manager._handle_batch_request(obj, None, states)]

        for said_of_it in (0, 1):
            warm_up_tokens = said_of_it
            sent.clear()
            (answers,) = rig.run(ask())
            assert [each.sampling_params.max_new_tokens for each in sent] == [0, 9, 9]
            assert [answer["meta_info"]["id"] for answer in answers] == [each.rid for each in sent[1:]]
        assert rig.counted() == ngram(accepted=16, verify=16, completion=36, emitted=32, generations=4)
        assert rig.manager.rid_to_state == {}


def test_health_checks_are_no_generations() -> None:
    with Rig() as rig:
        rig.add("HEALTH_CHECK_1234")
        rig.says(Says("HEALTH_CHECK_1234", 1, reason={"type": "length", "length": 1}))
        rig.add("HEALTH_CHECK_1235")
        rig.says(Says("HEALTH_CHECK_1235", 7, verify=3, accepted=3))
        rig.manager.rid_to_state.clear()
        assert rig.counted() == ngram()


@pytest.mark.parametrize("reason", [LENGTH, None])
def test_health_checks_are_none_either_where_all_places_of_candidates_are_taken(reason: Any) -> None:
    crowd = [f"r{number}" for number in range(400)]
    with Rig() as rig:
        for rid in crowd:
            rig.add(rid, stream=True)
        rig.says(*[Says(rid, 4, verify=1, accepted=2) for rid in crowd])
        for number in range(40):  # a birth gets one of the 68 places now and then even so
            rig.add(f"HEALTH_CHECK_{number}")
            rig.says(Says(f"HEALTH_CHECK_{number}", 7, verify=3, accepted=3, reason=reason))
            rig.manager.rid_to_state.pop(f"HEALTH_CHECK_{number}", None)
        rig.says(*[Says(rid, 4, verify=1, accepted=2, reason=LENGTH) for rid in crowd])
        assert rig.counted() == ngram(accepted=800, verify=400, completion=1600, emitted=1200, generations=400)


@pytest.mark.parametrize("begun", [False, True])
def test_ends_with_a_token_or_none_where_all_places_of_candidates_are_taken(begun: bool) -> None:
    """A hidden warm-up, an end before the first token, one at the prefill: the first two are no generations."""
    crowd = [f"r{number}" for number in range(400)]
    warm_up = {"type": "length", "length": 0}
    ends = {f"{kind}{number}": kind for kind in ("warm", "none", "prefill") for number in range(20)}
    with Rig() as rig:
        for rid in (*crowd, *ends):
            rig.add(rid, stream=True)
        rig.says(*[Says(rid, 4, verify=1, accepted=2) for rid in crowd])
        tokens = {rid: 0 if kind == "none" else 1 for rid, kind in ends.items()}
        if begun:
            rig.says(*[Says(rid, number) for rid, number in tokens.items()])
        for rid, kind in ends.items():
            rig.says(Says(rid, tokens[rid], reason=warm_up if kind == "warm" else LENGTH))
        rig.says(*[Says(rid, 4, verify=1, accepted=2, reason=LENGTH) for rid in crowd])
        assert rig.counted() == ngram(accepted=800, verify=400, completion=1620, emitted=1200, generations=420)


@pytest.mark.parametrize("begun", [False, True])
def test_a_retraction_hides_its_token_too_where_all_places_of_candidates_are_taken(begun: bool) -> None:
    """Trimmed as well: a token less than the steps and the prefill gave does not tell of the second prefill's."""
    crowd = [f"r{number}" for number in range(400)]
    retracted = [f"again{number}" for number in range(40)]
    with Rig() as rig:
        for rid in (*crowd, *retracted):
            rig.add(rid, stream=True)
        rig.says(*[Says(rid, 4, verify=1, accepted=2) for rid in crowd])
        if begun:
            rig.says(*[Says(rid, 4, verify=1, accepted=2) for rid in retracted])
        rig.says(*[Says(rid, 6, verify=2, accepted=4, retractions=1, reason=LENGTH) for rid in retracted])
        rig.says(*[Says(rid, 4, verify=1, accepted=2, reason=LENGTH) for rid in crowd])
        assert rig.counted() == ngram(accepted=960, verify=480, completion=1840, emitted=1360, generations=440)


@pytest.mark.parametrize("number", [2, 400])
def test_a_column_that_is_missing_once_is_unknown_and_nothing_else_is_lost(number: int) -> None:
    rids = [f"r{number}" for number in range(number)]
    with Rig() as rig:
        for rid in rids:
            rig.add(rid)
        rows = [Says(rid, 4, verify=1, accepted=2, reason=LENGTH) for rid in rids]
        rig.says(*rows, spec_num_correct_drafts=[])
        assert rig.counted() == ngram(
            accepted=0, verify=number, completion=4 * number, emitted=3 * number, generations=number
        )
        assert rig.meter.sets()["generations", "acceptance_length,tokens_per_verify"] == number  # not the accept rate
        assert rig.meter.errors() == {}


def test_a_reused_id_is_a_new_generation() -> None:
    with Rig() as rig:
        for _ in range(3):
            rig.add("same", stream=True)
            rig.says(Says("same", 4, verify=1, accepted=2))
            rig.says(Says("same", 6, verify=2, accepted=3, reason=LENGTH))
        assert rig.counted() == ngram(accepted=9, verify=6, completion=18, emitted=15, generations=3)


def test_a_second_last_message_and_one_without_a_state_add_nothing() -> None:
    with Rig() as rig:
        rig.add("a")
        last = Says("a", 6, verify=2, accepted=3, reason=LENGTH)
        rig.says(last)
        rig.says(last)
        rig.says(Says("a", 8, verify=3, accepted=4))
        rig.says(Says("nobody", 8, verify=3, accepted=4, reason=LENGTH))
        assert rig.counted() == ngram(accepted=3, verify=2, completion=6, emitted=5, generations=1)


def test_a_finished_state_that_is_still_there_was_counted() -> None:
    """To 0.4.8 the waiting coroutine deletes the state, some time after the last message."""
    with Rig() as rig:
        rig.add("a")
        state = rig.manager.rid_to_state["a"]
        last = Says("a", 6, verify=2, accepted=3, reason=LENGTH)
        rig.says(last)
        assert state.finished
        rig.manager.rid_to_state["a"] = state
        rig.says(last)
        assert rig.counted()["generations"] == 1


# --- Retractions ------------------------------------------------------------------------------------------------------


def test_each_retraction_hides_one_token_of_a_prefill() -> None:
    with Rig() as rig:
        rig.add("a")
        rig.says(Says("a", 20, verify=8, accepted=9, retractions=2, reason=LENGTH))
        assert rig.counted() == ngram(accepted=9, verify=8, completion=20, emitted=17, generations=1)


def test_a_retraction_never_lowers_what_was_emitted() -> None:
    with Rig() as rig:
        rig.add("a", stream=True)
        rig.says(Says("a", 11, verify=5, accepted=5))
        assert rig.counted()["emitted"] == 10
        rig.says(Says("a", 11, verify=5, accepted=5, retractions=1))  # retracted, and not yet prefilled again
        assert rig.counted()["emitted"] == 10
        rig.says(Says("a", 12, verify=5, accepted=5, retractions=1))
        assert rig.counted()["emitted"] == 10
        rig.says(Says("a", 14, verify=6, accepted=6, retractions=1, reason=LENGTH))
        assert rig.counted() == ngram(accepted=6, verify=6, completion=14, emitted=12, generations=1)
        # The retraction cost the ratio nothing: 10 tokens in 5 steps, then 2 in 1.
        assert set(rig.meter.sets()) >= {("generations", "acceptance_length,tokens_per_verify")}


def test_a_last_value_below_what_was_added_is_unknown_from_there() -> None:
    with Rig() as rig:
        rig.add("a", stream=True)
        rig.says(Says("a", 11, verify=5, accepted=5))
        assert rig.counted()["emitted"] == 10
        rig.says(Says("a", 11, verify=5, accepted=5, retractions=1, reason=ABORT))
        assert rig.counted() == ngram(accepted=5, verify=5, completion=11, emitted=10, generations=1)
        assert rig.meter.sets()["generations", "tokens_per_verify"] == 1
        assert rig.meter.sets()["generations", "acceptance_length,tokens_per_verify"] == 0


def test_after_a_retraction_with_embeddings_emitted_is_unknown() -> None:
    with Rig() as rig:
        rig.add("a", input_embeds=[[0.1, 0.2]])
        rig.says(Says("a", 11, verify=5, accepted=5, retractions=1, reason=LENGTH))
        assert rig.counted() == ngram(accepted=5, verify=5, completion=11, emitted=0, generations=1)
        assert rig.meter.sets()["generations", "tokens_per_verify"] == 1
        rig.add("b", input_embeds=[[0.1, 0.2]])
        rig.says(Says("b", 11, verify=5, accepted=5, reason=LENGTH))
        assert rig.counted()["emitted"] == 10


def test_a_counter_that_falls_in_the_end_adds_nothing_more() -> None:
    """With embeddings a retracted request starts over, and its completion with it."""
    with Rig() as rig:
        rig.add("a", input_embeds=[[0.1]], stream=True)
        rig.says(Says("a", 11, verify=5, accepted=5))
        assert rig.counted()["completion"] == 11
        rig.says(Says("a", 4, verify=7, accepted=6, retractions=1, reason=LENGTH))
        assert rig.counted() == ngram(accepted=6, verify=7, completion=11, emitted=10, generations=1)
        assert rig.meter.sets()["generations", "none"] == 1


# --- Known and unknown ------------------------------------------------------------------------------------------------


def test_a_request_that_ends_at_the_prefill_is_a_generation_with_explicit_zeros() -> None:
    with Rig() as rig:
        rig.add("a")
        rig.says(Says("a", 1, reason={"type": "length", "length": 1}))
        assert rig.counted() == ngram(completion=1, generations=1)
        assert not any(key.startswith("spec") for key in rig.answers["a"])  # the response says nothing of it
        assert rig.meter.sets()["generations", "acceptance_length,tokens_per_verify"] == 1


def test_a_request_that_ends_before_its_first_token_is_no_generation() -> None:
    with Rig() as rig:
        rig.add("a")
        rig.says(Says("a", 0, reason=ABORT))
        assert rig.counted() == ngram()


def test_without_a_tokenizer_the_other_message_says_the_same() -> None:
    with Rig(**NGRAM, skip_tokenizer_init=True) as rig:
        rig.manager.skip_tokenizer_init = True
        rig.add("a", stream=True)
        rig.says(Says("a", 4, verify=1, accepted=2), kind=BatchTokenIDOutput)
        rig.says(Says("a", 10, verify=4, accepted=6, reason=LENGTH), kind=BatchTokenIDOutput)
        assert rig.counted() == ngram(accepted=6, verify=4, completion=10, emitted=9, generations=1)


def test_embeddings_are_no_generations() -> None:
    with Rig() as rig:
        rig.add("a")
        rig.handle(message(Says("a", 1, reason=LENGTH), kind=BatchEmbeddingOutput, embeddings=[[0.5]]))
        assert rig.counted() == ngram()


@pytest.mark.parametrize("nothing", [None, []])
def test_columns_that_are_not_there_are_unknown_and_not_zero(nothing: Any) -> None:
    with Rig() as rig:
        rig.add("a")
        rig.says(
            Says("a", 10),
            spec_verify_ct=nothing,
            spec_num_correct_drafts=nothing,
            spec_correct_drafts_histogram=nothing,
        )
        rig.abort_in_queue("a")
        # Speculation is known to be on, so it is a generation; it may enter no ratio.
        assert rig.counted() == ngram(completion=10, emitted=9, generations=1)
        assert rig.meter.sets()["generations", "none"] == 1
        assert rig.meter.sets()["completion", "none"] == 10
        assert rig.meter.sets()["completion", "tokens_per_verify"] == 0


def test_without_speculation_there_is_not_one_point() -> None:
    with Rig(speculative_algorithm=None) as rig:
        rig.add("a")
        rig.says(Says("a", 10, reason=LENGTH), spec_verify_ct=[], spec_num_correct_drafts=[])
        assert rig.meter.points() == []


def test_the_prefill_side_of_a_disaggregated_server_is_silent() -> None:
    with Rig(**NGRAM, disaggregation_mode="prefill") as rig:
        rig.add("a")
        rig.says(Says("a", 1, reason=LENGTH))
        assert rig.meter.points() == []


def test_on_the_decode_side_a_retraction_makes_emitted_unknown() -> None:
    with Rig(**NGRAM, disaggregation_mode="decode") as rig:
        rig.add(["a", "b"])
        rig.says(
            Says("a", 10, verify=4, accepted=6, reason=LENGTH),
            Says("b", 10, verify=4, accepted=6, retractions=1, reason=LENGTH),
        )
        assert rig.counted() == ngram(accepted=12, verify=8, completion=20, emitted=9, generations=2)
        assert rig.meter.sets()["generations", "tokens_per_verify"] == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_algorithm": "UNO", "speculative_num_draft_tokens": 4},  # two tokens of a step are no drafts
        {**NGRAM, "enable_mixed_chunk": True},  # decoding beside another's prefill, without a verify step
    ],
    ids=["UNO", "mixed chunks"],
)
def test_where_tokens_come_from_other_steps_too_emitted_is_unknown(settings: dict[str, Any]) -> None:
    with Rig(**settings) as rig:
        rig.add("a")
        rig.says(Says("a", 10, verify=4, accepted=6, reason=LENGTH))
        assert rig.counted() == {"accepted": 6, "verify": 4, "completion": 10, "generations": 1}
        assert rig.meter.sets()["generations", "tokens_per_verify"] == 1


def test_more_emitted_than_the_steps_can_have_given_does_not_enter_the_acceptance_length() -> None:
    with Rig() as rig:
        rig.add("a")
        rig.says(Says("a", 12, verify=4, accepted=6, reason=LENGTH))
        assert rig.counted() == ngram(accepted=6, verify=4, completion=12, emitted=11, generations=1)
        assert rig.meter.sets()["generations", "tokens_per_verify"] == 1
        assert rig.meter.sets()["emitted", "none"] == 11


def test_a_generation_has_the_ratios_that_held_in_every_part_of_its_life() -> None:
    with Rig() as rig:
        rig.add("a", stream=True)
        rig.says(Says("a", 12, verify=4, accepted=6))  # one token more than its steps can have given
        assert rig.meter.sets()["emitted", "none"] == 11
        rig.says(Says("a", 15, verify=5, accepted=8, reason=LENGTH))
        sets = rig.meter.sets()
        assert sets["emitted", "none"] == 11  # what was added never moves
        assert sets["emitted", "acceptance_length"] == 3
        assert sets["generations", "tokens_per_verify"] == 1
        assert sets["generations", "acceptance_length,tokens_per_verify"] == 0


# --- Who and where ----------------------------------------------------------------------------------------------------


def test_points_say_which_engine_and_which_process() -> None:
    with Rig(**NGRAM, dp_size=2) as rig:
        rig.add(["a", "b", "c"])
        rig.says(Says("a", 4, verify=1, accepted=2, rank=0))  # at 0 both ranks have begun
        assert {point.attributes["specdec.engine.index"] for point in rig.meter.points()} == {0, 1}
        rig.says(Says("a", 6, verify=2, accepted=3, rank=0, reason=LENGTH))
        rig.says(
            Says("b", 5, verify=2, accepted=2, rank=1, reason=LENGTH),
            Says("c", 7, verify=2, accepted=4, rank=0, reason=LENGTH),
        )
        rig.add("d")
        rig.says(Says("d", 3, verify=1, accepted=1, rank=1, reason=LENGTH))
        completion = {
            point.attributes["specdec.engine.index"]: point.value
            for point in rig.meter.points("specdec.completion_tokens")
        }
        assert completion == {0: 13, 1: 8}
        for point in rig.meter.points():
            assert point.attributes["gen_ai.provider.name"] == "sglang"
            assert point.attributes["gen_ai.request.model"] == "tiny"
            assert point.attributes["specdec.method"] == "ngram"
            assert point.attributes["specdec.source"] == "engine"
            assert point.attributes["specdec.process"] == "tokenizer-0"


def test_a_message_of_strings_and_one_of_ids_are_known_to_the_adapter() -> None:
    fields = set(BatchStrOutput.__struct_fields__)
    assert {"spec_verify_ct", "spec_num_correct_drafts", "spec_correct_drafts_histogram", "retraction_counts"} <= fields


@pytest.mark.parametrize("settings", [NGRAM, CHAIN], ids=["ngram", "chain"])
@pytest.mark.parametrize("seed", range(3))
def test_hundreds_of_generations_of_every_kind_between_collections(settings: dict[str, Any], seed: int) -> None:
    """Far more than there are candidates for exemplars, so that most are added together: equal to a plain count."""
    rng = random.Random(seed)
    expected = Counter[str]()
    with Rig(**settings) as rig:
        numbers = itertools.count()
        running: list[Says] = []
        for turn in range(400):
            for _ in range(rng.choice([0, 1, 5, 20])):
                rid = f"r{next(numbers)}"
                rig.add(rid, stream=True)
                running.append(Says(rid, 0))
            rows, going_on = [], []
            for last in running:
                if rng.random() < 0.3:
                    going_on.append(last)
                    continue
                first = last.completion == 0
                ends = rng.random() < 0.4
                steps = 0 if (first and rng.random() < 0.3) else rng.randint(1, 4)
                hits = [rng.randint(0, 3) for _ in range(steps)]
                retractions = last.retractions + (not first and rng.random() < 0.02)
                histogram = list(last.histogram or [0, 0, 0, 0])
                for hit in hits:
                    histogram[hit] += 1
                row = Says(
                    last.rid,
                    last.completion + first + (retractions - last.retractions) + steps + sum(hits),
                    last.verify + steps, last.accepted + sum(hits), LENGTH if ends else None, retractions, histogram,
                )  # fmt: skip
                rows.append(row)
                if ends:
                    expected.update(accepted=row.accepted, verify=row.verify, completion=row.completion, generations=1)
                    expected["emitted"] += row.completion - 1 - row.retractions
                    expected["proposed"] += 3 * row.verify
                else:
                    going_on.append(row)
            running = going_on
            rng.shuffle(rows)
            if rows:
                rig.says(*rows)
            if turn % 100 == 99:  # what runs is counted as far as it has come
                live = Counter[str]()
                for row in running:
                    live.update(accepted=row.accepted, verify=row.verify, completion=row.completion)
                    live["emitted"] += max(0, row.completion - 1 - row.retractions)
                    live["proposed"] += 3 * row.verify
                totals = {name: expected[name] + live[name] for name in expected}
                if settings is NGRAM:
                    del totals["proposed"]
                assert {name: rig.meter.totals()[name] for name in totals} == totals
        assert expected["generations"] > 2_000
