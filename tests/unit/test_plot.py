"""The picture of averages: four ways to come by one number, of the same traffic."""

from __future__ import annotations

from collector.plot import ways

LONG = {"requests": 1, "reported": [4.0], "emitted": 3900, "verify": 1000, "accepted": 3000, "drafts": 1000}
SHORT = {"requests": 4, "reported": [1.0, 1.0], "emitted": 40, "verify": 40, "accepted": 20, "drafts": 50}


def test_the_pooled_one_is_a_quotient_of_sums_and_the_others_are_what_they_say() -> None:
    assert [*ways([LONG, SHORT]).values()] == [
        3940 / 1040,
        (4.0 + 1.0 + 1.0) / 3,
        (4.0 + 1.0 + 1.0 + 0.0 + 0.0) / 5,
        1 + 3020 / 1050,
    ]
    assert [*ways([SHORT]).values()] == [1.0, 1.0, 0.5, 1.4]
