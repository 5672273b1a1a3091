"""Where every step drafts a chain of the same length, proposed tokens are known, and with them the draft positions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sglang.manager import CHAIN, LENGTH, Rig, Says
from tests.unit.collected import counted

ALL = "accept_rate,acceptance_length,tokens_per_verify"


def test_series_begin_at_zero_with_positions() -> None:
    with Rig(**CHAIN) as rig:
        rig.says()
        assert rig.counted() == counted()
        assert rig.meter.at_positions() == ([0, 0, 0], [0, 0, 0])
        assert rig.meter.sets()["generations", ALL] == 0


@pytest.mark.parametrize("in_parts", [False, True])
def test_proposed_tokens_and_positions_follow_from_the_steps(in_parts: bool) -> None:
    with Rig(**CHAIN) as rig:
        rig.add(["a", "b"])
        if in_parts:
            rig.says(Says("a", 4, verify=1, accepted=2, histogram=[0, 0, 1]), Says("b", 1))
            assert rig.counted() == counted(accepted=2, proposed=3, verify=1, completion=5, emitted=3)
            assert rig.meter.at_positions() == ([1, 1, 0], [1, 1, 1])
        rig.says(
            Says("a", 10, verify=4, accepted=5, histogram=[1, 1, 2], reason=LENGTH),
            Says("b", 9, verify=3, accepted=6, histogram=[0, 1, 1, 1], reason=LENGTH),
        )
        assert rig.counted() == counted(accepted=11, proposed=21, verify=7, completion=19, emitted=17, generations=2)
        accepted, proposed = rig.meter.at_positions()
        assert accepted == [3 + 3, 2 + 2, 0 + 1]
        assert proposed == [7, 7, 7]
        assert sum(accepted) == 11
        assert rig.meter.sets()["generations", ALL] == 2


def test_a_grammar_invalidates_drafts_that_nobody_counts() -> None:
    with Rig(**CHAIN) as rig:
        rig.add("a", sampling_params={"max_new_tokens": 9, "regex": "a*"})
        rig.add("b", sampling_params={"max_new_tokens": 9, "regex": None, "json_schema": None})
        rig.says(
            Says("a", 9, verify=4, accepted=4, histogram=[0, 4], reason=LENGTH),
            Says("b", 9, verify=4, accepted=4, histogram=[0, 4], reason=LENGTH),
        )
        assert rig.counted() == counted(accepted=8, proposed=12, verify=8, completion=18, emitted=16, generations=2)
        assert rig.meter.at_positions() == ([4, 0, 0], [4, 4, 4])
        assert rig.meter.sets()["accepted", "accept_rate"] == 4
        assert rig.meter.sets()["generations", "acceptance_length,tokens_per_verify"] == 1


def test_so_does_a_grammar_where_all_places_of_candidates_are_taken() -> None:
    crowd = [f"r{number}" for number in range(400)]
    bound = [f"regex{number}" for number in range(40)]
    with Rig(**CHAIN) as rig:
        for rid in crowd:
            rig.add(rid, stream=True)
        rig.says(*[Says(rid, 4, verify=1, accepted=2, histogram=[0, 0, 1]) for rid in crowd])
        for rid in bound:
            rig.add(rid, sampling_params={"max_new_tokens": 9, "regex": "a*"})
        rig.says(*[Says(rid, 9, verify=4, accepted=4, histogram=[0, 4], reason=LENGTH) for rid in bound])
        rig.says(*[Says(rid, 4, verify=1, accepted=2, histogram=[0, 0, 1], reason=LENGTH) for rid in crowd])
        totals = rig.counted()
        assert (totals["accepted"], totals["proposed"], totals["verify"]) == (960, 1200, 560)
        assert rig.meter.at_positions() == ([400, 400, 0], [400, 400, 400])


def test_a_histogram_that_contradicts_the_other_columns_stays_out_of_the_positions() -> None:
    with Rig(**CHAIN) as rig:
        for rid, histogram in (("a", [1, 4]), ("b", [1, 3]), ("c", [0, 0, 0, 0, 1])):
            rig.add(rid)
            rig.says(Says(rid, 9, verify=4, accepted=4, histogram=histogram, reason=LENGTH))
        assert rig.counted() == counted(accepted=12, proposed=36, verify=12, completion=27, emitted=24, generations=3)
        assert rig.meter.at_positions() == ([0, 0, 0], [0, 0, 0])


def test_more_accepted_than_proposed_does_not_enter_the_accept_rate() -> None:
    with Rig(**CHAIN) as rig:
        rig.add("a")
        rig.says(Says("a", 9, verify=1, accepted=8, histogram=[], reason=LENGTH))
        assert rig.counted() == counted(accepted=8, proposed=3, verify=1, completion=9, emitted=8, generations=1)
        assert rig.meter.sets()["accepted", "none"] == 8
        assert rig.meter.sets()["generations", "acceptance_length,tokens_per_verify"] == 1


@pytest.mark.parametrize(
    "settings",
    [
        {**CHAIN, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4},
        {**CHAIN, "speculative_num_draft_tokens": 6},
        {**CHAIN, "speculative_adaptive": True},
        {**CHAIN, "decoupled_spec_role": "verifier"},
        {**CHAIN, "speculative_algorithm": "DSPARK"},
        {**CHAIN, "speculative_algorithm": "DFLASH"},
        {**CHAIN, "speculative_algorithm": "NGRAM"},  # its tree is filled up with zeros, a chain of it too
    ],
    ids=["tree", "width", "adaptive", "decoupled", "capped", "block", "padded"],
)
def test_where_drafts_adapt_branch_or_are_capped_proposed_is_unknown(settings: dict[str, Any]) -> None:
    with Rig(**settings) as rig:
        rig.add("a")
        rig.says(Says("a", 9, verify=4, accepted=4, histogram=[0, 4], reason=LENGTH))
        assert rig.counted() == {"accepted": 4, "verify": 4, "completion": 9, "emitted": 8, "generations": 1}
        assert rig.meter.at_positions() == ([], [])


def test_capped_verification_makes_proposed_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "cap-accept")
    with Rig(**CHAIN) as rig:
        rig.add("a")
        rig.says(Says("a", 9, verify=4, accepted=4, histogram=[0, 4], reason=LENGTH))
        assert "proposed" not in rig.counted()
