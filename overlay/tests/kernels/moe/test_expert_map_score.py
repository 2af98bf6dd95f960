# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Scores of maps on traffic: against values by hand and against what is known."""

import numpy as np
import pytest

from tests.kernels.moe.expert_profile_utils import layer_names, make_profile
from vllm.model_executor.layers.fused_moe.expert_profile.plan import make_map
from vllm.model_executor.layers.fused_moe.expert_profile.score import (
    bootstrap,
    cold_share,
    cold_share_by_layer,
    folds,
    held_out_cold_share,
    hot_mask,
    map_cuts,
    map_rankings,
    map_shares,
    overlap,
    planned_from,
    rank,
    spearman,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import Profile

COUNTS = np.array([[4, 0, 4, 2], [0, 0, 0, 0], [1, 2, 3, 4]])


def map_of(profile, cuts, sha256="a" * 64):
    sources = [Profile(label="x", sha256=sha256, tokens=profile.tokens)]
    return make_map(
        profile.counts, cuts, profile.layer_names, profile.fingerprint, sources
    )


def test_ties_go_to_the_lowest_id():
    assert rank(COUNTS).tolist() == [[0, 2, 3, 1], [0, 1, 2, 3], [3, 2, 1, 0]]


def test_cold_share_by_hand():
    mask = hot_mask(rank(COUNTS), [1, 2, 0])
    assert mask.sum(axis=1).tolist() == [1, 2, 0]
    assert cold_share(COUNTS, mask) == pytest.approx((6 + 0 + 10) / 20)
    assert cold_share_by_layer(COUNTS, mask).tolist() == [0.6, 0, 1]


def test_c15_no_traffic_has_no_nan():
    silent = np.zeros((2, 4), np.int64)
    mask = hot_mask(rank(silent), [1, 1])
    assert cold_share(silent, mask) == 0
    assert cold_share_by_layer(silent, mask).tolist() == [0, 0]
    assert spearman(silent, COUNTS[:2]).tolist() == [0, 0]
    interval = bootstrap(silent, None, mask)
    assert (interval.low, interval.high) == (0, 0)


@pytest.mark.parametrize(
    "one,other,rho",
    (
        ([1, 2, 3, 4], [10, 20, 30, 40], 1),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1),
        # Ranks 0 1.5 1.5 3 and 0 1 2 3: 4.5 / sqrt(4.5 * 5).
        ([0, 5, 5, 9], [0, 1, 2, 3], 4.5 / np.sqrt(4.5 * 5)),
        ([0, 0, 0, 0], [0, 1, 2, 3], 0),
    ),
)
def test_spearman_by_hand(one, other, rho):
    assert spearman(np.array([one]), np.array([other]))[0] == pytest.approx(rho)


def test_overlap_by_hand():
    one = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]], np.bool_)
    other = np.array([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]], np.bool_)
    assert overlap(one, other).tolist() == [0.5, 1, pytest.approx(1 / 3)]


@pytest.mark.parametrize("num_folds", (2, 3, 7))
def test_every_request_is_held_out_once(num_folds):
    masks = list(folds(7, num_folds))
    assert np.sum(masks, axis=0).tolist() == [1] * 7
    assert len(masks) == num_folds
    assert all((a == b).all() for a, b in zip(masks, folds(7, num_folds), strict=True))


def test_c16_held_out_share_by_hand():
    """Two requests that have nothing in common: each is all cold to the other."""
    requests = np.array([[[5, 3, 0, 0]], [[0, 0, 5, 3]]])
    assert held_out_cold_share(requests, [2], 2) == 1
    assert cold_share(requests.sum(0), hot_mask(rank(requests.sum(0)), [2])) == 3 / 8


def test_c16_held_out_share_is_what_fresh_traffic_has():
    """It is near the share of new traffic, which the share in the sample is below."""
    profile = make_profile(tokens=150, requests=10, experts=64, skew=0.7)
    fresh = make_profile(tokens=20_000, experts=64, skew=0.7)
    cuts = [16] * 3
    mask = hot_mask(rank(profile.counts), cuts)
    seen, new = cold_share(profile.counts, mask), cold_share(fresh.counts, mask)
    held_out = held_out_cold_share(profile.counts_request, cuts, 10)
    assert seen < new and abs(held_out - new) < abs(seen - new) / 2


def test_bootstrap_over_requests_covers_new_samples():
    cuts, inside = [5] * 3, 0
    reference = make_profile(tokens=20_000, seed=99)
    mask = hot_mask(rank(reference.counts), cuts)
    sample = make_profile(tokens=300, seed=99, requests=30)
    truth = cold_share(sample.counts, mask)
    for seed in range(40):
        random = np.random.default_rng(seed)
        drawn = sample.counts_request[random.integers(0, 30, 30)]
        interval = bootstrap(drawn.sum(0), drawn, mask, draws=300)
        assert interval.unit == "requests"
        inside += interval.low <= truth <= interval.high
    assert inside >= 33


def test_interval_without_requests_says_so():
    profile = make_profile()
    mask = hot_mask(rank(profile.counts), [5] * 3)
    interval = bootstrap(profile.counts, None, mask)
    assert interval.unit == "selections"
    assert interval.low < cold_share(profile.counts, mask) < interval.high
    assert interval == bootstrap(profile.counts, None, mask)


def test_map_arrays_follow_the_order_that_is_asked_for():
    profile = make_profile()
    made = map_of(profile, [2, 3, 4])
    names = layer_names()[::-1]
    assert map_cuts(made, names).tolist() == [4, 3, 2]
    assert (map_rankings(made, names) == rank(profile.counts)[::-1]).all()
    shares = profile.counts / profile.counts.sum(1, keepdims=True)
    np.testing.assert_allclose(map_shares(made, names), shares[::-1])


def test_c16_planning_profile_is_known_by_hash_or_by_its_counts():
    profile, other = make_profile(seed=1), make_profile(seed=2)
    made, names = map_of(profile, [3] * 3), layer_names()
    assert planned_from(made, "a" * 64, other.counts, names)
    assert planned_from(made, "b" * 64, profile.counts, names)
    assert planned_from(made, "b" * 64, profile.counts * 2, names)
    assert not planned_from(made, "b" * 64, other.counts, names)
    assert not planned_from(made, "b" * 64, np.zeros_like(other.counts), names)
