"""Rollouts of one prompt: independent ones pass, shared noise is found wherever it is shared."""

from __future__ import annotations

import numpy as np

from leadout.audit.t7_pairs import PairSums, Path, findings

LAW = np.asarray([0.4, 0.3, 0.2, 0.1])
POWER2 = float((LAW**2).sum())
LENGTH = 30


def paths(noise, draws: int, siblings: int, seed: int = 0) -> PairSums:
    """Rollouts over a law that does not depend on the past; `noise(rng, draw, sibling)` changes what they draw from."""
    sums = PairSums()
    for prompt in range(12):
        own = np.random.default_rng((seed, prompt)).random((draws, siblings, LENGTH))
        for draw in range(draws):
            for sibling in range(siblings):
                uniform_T = noise(own, draw, sibling)
                token_T = np.searchsorted(np.cumsum(LAW), uniform_T).astype(np.int32)
                path = Path(draw=draw, sibling=sibling, token_T=token_T, power2_T=np.full(LENGTH, POWER2))
                sums.add(b"%d" % prompt, path)
    return sums


def p_values(sums: PairSums) -> dict[str, float]:
    return {finding.name: finding.p_value for finding in findings(sums)}


def test_independent_rollouts_agree_as_often_as_their_law_says():
    for seed in range(50):
        sums = paths(lambda own, draw, sibling: own[draw, sibling], 2, 4, seed)
        assert min(p_values(sums).values()) > 1e-3


def test_noise_that_siblings_share_after_the_first_token_is_found():
    def noise(own, draw, sibling):
        return np.concatenate([own[draw, sibling, :1], own[draw, 0, 1:]])

    found = p_values(paths(noise, 1, 4))
    assert found == {"siblings stay independent while they agree": found["siblings stay independent while they agree"]}
    assert found["siblings stay independent while they agree"] < 1e-9


def test_a_prompt_drawn_again_that_repeats_its_rollouts_is_found():
    found = p_values(paths(lambda own, draw, sibling: own[0, sibling], 2, 2))
    assert found["draws of one prompt are independent"] < 1e-30
    assert found["siblings stay independent while they agree"] > 1e-3


def test_a_pair_is_followed_until_it_first_differs():
    sums = PairSums()
    power2_T = np.asarray([0.5, 0.25, 1.0])
    for sibling, tokens in enumerate(([1, 2, 3], [1, 4, 3])):
        token_T = np.asarray(tokens, np.int32)
        sums.add(b"", Path(draw=0, sibling=sibling, token_T=token_T, power2_T=power2_T))
    (finding,) = findings(sums)
    assert (finding.tokens, finding.information) == (2, 0.5 * 0.5 + 0.25 * 0.75)
    assert finding.effect.value == (1 - 0.75) / 2


def test_a_law_of_one_token_says_nothing_about_independence():
    sums = PairSums()
    for draw in range(2):
        sums.add(b"", Path(draw=draw, sibling=0, token_T=np.zeros(5, np.int32), power2_T=np.ones(5)))
    (finding,) = findings(sums)
    assert (finding.p_value, finding.enough) == (1.0, False)
