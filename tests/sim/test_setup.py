"""From a scenario to what computes: the draft lengths of calibrated machines."""

from __future__ import annotations

import pytest

from leadout.errors import ConfigError
from leadout.sim.setup import prepare
from tests.sim.machines import calibrated

AUTO = ("speculation.method=eagle3", "speculation.num_speculative_tokens=auto")


def test_auto_chooses_among_the_measured_draft_lengths(tmp_path):
    assert prepare(calibrated(tmp_path, *AUTO)).k == (0, 1, 3, 5)
    assert prepare(calibrated(tmp_path, *AUTO, "speculation.max_draft_length=3")).k == (0, 1, 3)


@pytest.mark.parametrize(
    ("words", "measured", "message"),
    [
        ((), {"plain": False}, r"no rounds of none at k=0; it has eagle3 k=1, eagle3 k=3, eagle3 k=5"),
        (("speculation.method=mtp",), {}, r"no rounds of mtp at k in 1..7; it has eagle3 k=1"),
        (("speculation.max_draft_length=2",), {"ks": (3,)}, r"no rounds of eagle3 at k in 1..2; it has eagle3 k=3"),
    ],
)
def test_auto_without_the_rounds_it_chooses_from_is_one_line(tmp_path, words, measured, message):
    with pytest.raises(ConfigError, match=message) as caught:
        prepare(calibrated(tmp_path, *AUTO, *words, **measured))
    assert "\n" not in str(caught.value)
