# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Predicted steps: against simulation of the same assumptions, and at the edges."""

import itertools

import numpy as np
import pytest

from tests.kernels.moe.expert_profile_utils import make_profile
from vllm.model_executor.layers.fused_moe.expert_profile.advise import (
    Conditions,
    Outcome,
    advise,
    assess,
    divide,
    is_it_time_for_a_new_map,
    is_it_worth_it,
    one_map_or_several,
    outcome,
    place,
)
from vllm.model_executor.layers.fused_moe.expert_profile.predict import (
    Hardware,
    Step,
    count_distribution,
    exposed,
    positional_host_bytes,
    predict,
    read_probability,
)
from vllm.model_executor.layers.fused_moe.expert_profile.row_bytes import ExpertRow
from vllm.model_executor.layers.fused_moe.expert_profile.score import rank

# The geometry that the receipts are of: 384 experts of 5120 x 2304 in 4 bits.
ROW = ExpertRow(2 * 5120 * 2304 // 2, 5120 * 2304 // 2, "test")
H200 = Hardware(hbm_gbps=3850, host_gbps=51.2)
PAGE = 2 << 20


def traffic(layers=2, experts=64, seed=0):
    return make_profile(tokens=4000, layers=layers, experts=experts, seed=seed).counts


def outside_of(counts, hot):
    return place(counts, [hot] * len(counts), ROW, PAGE).outside


def test_read_probability_is_of_the_profile_and_not_uniform():
    counts = np.array([[90, 6, 3, 1]])
    chance = read_probability(counts, 1, 8)
    np.testing.assert_allclose(chance[0], 1 - (1 - counts[0] / 100) ** 8)
    assert chance.sum() < 4 * (1 - 0.75**8)


def test_read_probability_of_a_silent_layer_is_zero():
    assert read_probability(np.zeros((1, 4)), 2, 8).tolist() == [[0] * 4]


def test_expert_that_every_token_selects_is_always_read():
    assert read_probability(np.array([[5, 3, 2]]), 2, 1)[0, 0] == 1


def test_unique_experts_are_those_of_drawn_tokens():
    """Drawing tokens from the counted ones reads as many experts as predicted."""
    from tests.kernels.moe.expert_profile_utils import draw_routes

    routes = draw_routes(20_000, 3, 1, 32, 2, 1.0)[:, 0]
    counts = np.bincount(routes.ravel(), minlength=32)[None]
    random = np.random.default_rng(0)
    drawn = [
        len(np.unique(routes[random.integers(0, len(routes), 16)])) for _ in range(2000)
    ]
    predicted = read_probability(counts, 2, 16).sum()
    assert np.mean(drawn) == pytest.approx(predicted, rel=0.02)


def test_count_distribution_equals_enumeration():
    chances = np.random.default_rng(0).random((2, 5))
    expected = np.zeros((2, 6))
    for happens in itertools.product((0, 1), repeat=5):
        each = np.where(happens, chances, 1 - chances)
        expected[:, sum(happens)] += each.prod(axis=1)
    np.testing.assert_allclose(count_distribution(chances), expected)
    sparse = np.insert(chances, [0, 3, 3], 0, axis=1)
    np.testing.assert_allclose(count_distribution(sparse), expected)
    assert count_distribution(np.zeros((2, 3))).tolist() == [[1], [1]]


@pytest.mark.parametrize("hot,cold", ((356, 75), (356, 263), (70, 263), (683, 40)))
@pytest.mark.parametrize("number", (1, 2, 5))
def test_exposed_time_equals_simulation(hot, cold, number):
    starts = np.random.default_rng(0).random((200_000, number)).min(axis=1) * hot
    sticks_out = np.maximum(0, starts + number * cold - hot).mean()
    given = np.arange(number + 1)[None] * float(cold)
    got = exposed(np.array([[float(hot)]]), given)[0, -1]
    assert got == pytest.approx(sticks_out, rel=0.02, abs=0.2)


def test_one_cold_expert_hides_behind_much_hot_work():
    """Field measurements on an H200: +245, +75 and +41 µs at 1, 8 and 16 tokens."""
    added = {}
    for tokens, hot_us in ((1, 69.7), (8, 356.0), (16, 683.0)):
        total = 0.0
        # Whole pages: 82 % of w13 and 64 % of w2 of an expert between hot ones.
        for part, outside in ((ROW.w13, 0.82 * ROW.w13), (ROW.w2, 0.64 * ROW.w2)):
            cold_us = outside / H200.host_gbps / 1e3
            hot = np.array([[hot_us * part / ROW.num_bytes]])
            total += float(exposed(hot, np.array([[0.0, cold_us]]))[0, 1])
        added[tokens] = total
    for tokens, measured in ((1, 245), (8, 75), (16, 41)):
        assert added[tokens] == pytest.approx(measured, abs=25)


def test_all_hot_costs_nothing():
    counts = traffic()
    one = predict(counts, outside_of(counts, 64), 2, ROW, Step(8), H200, 3.0)
    assert (one.step_ms, one.cold, one.host_bytes, one.fetch_tax) == (3.0, 0, 0, 0)


def test_all_cold_is_what_the_link_allows():
    counts = traffic()
    everything = np.full((2, 2, 64), [[ROW.w13], [ROW.w2]])
    one = predict(counts, everything, 2, ROW, Step(64), H200)
    link_ms = one.host_bytes / 51.2e9 * 1e3
    assert one.cold == pytest.approx(one.unique)
    assert one.host_bytes == pytest.approx(one.unique * ROW.num_bytes)
    assert link_ms < one.step_ms < link_ms * 1.1 + 2 * H200.layer_us / 1e3


@pytest.mark.parametrize("streams", (1, 8, 64))
def test_fewer_hot_rows_are_never_faster(streams):
    counts = traffic()
    steps = [
        predict(counts, outside_of(counts, hot), 2, ROW, Step(streams), H200).step_ms
        for hot in (64, 48, 32, 16, 2)
    ]
    assert steps == sorted(steps) and steps[-1] > steps[0]


def test_step_that_the_host_bounds_hides_reads():
    counts = traffic()
    outside = outside_of(counts, 60)
    bound = predict(counts, outside, 2, ROW, Step(1), H200, resident_ms=50.0)
    assert bound.step_ms == 50.0 and bound.host_bytes > 0


def test_draft_tokens_read_more_and_give_more():
    counts = traffic()
    outside = outside_of(counts, 32)
    plain, drafted = Step(4), Step(4, draft_tokens=3, accepted=2.0)
    one, other = (
        predict(counts, outside, 2, ROW, step, H200) for step in (plain, drafted)
    )
    assert other.unique > one.unique and other.step_ms > one.step_ms
    assert drafted.tokens == 16
    assert drafted.tokens_per_s(10.0) == 3 * plain.tokens_per_s(10.0)


def test_positional_takes_whole_tensors_that_fit():
    size = ROW.num_bytes * 10
    placed = positional_host_bytes(3, 10, ROW, size + size // 2)
    assert placed[0].sum() == size
    # The second w13 does not fit in half a layer, the second w2 does.
    assert placed[1, 0].sum() == 0 and placed[1, 1].sum() == ROW.w2 * 10
    assert placed[2].sum() == 0
    assert positional_host_bytes(3, 10, ROW, 0).sum() == 0


def conditions(**changes):
    values = {
        "top_k": 2,
        "row": ROW,
        "page_bytes": PAGE,
        "hardware": H200,
        "census": [(Step(1), 0.5), (Step(8), 0.5)],
        "resident_ms": {},
    }
    return Conditions(**values | changes)


def outcomes(seeds, hot):
    given = conditions()
    classes = [
        divide(traffic(seed=seed), None, f"class{i}", 1.0)
        for i, seed in enumerate(seeds)
    ]
    blend = sum(one.ranked * one.weight for one in classes)
    cuts = [hot] * 2
    own = {
        one.label: outcome(one, place(one.ranked, cuts, ROW, PAGE), given)
        for one in classes
    }
    blended = place(blend, cuts, ROW, PAGE)
    return classes, own, {one.label: outcome(one, blended, given) for one in classes}


def test_alike_classes_share_a_map_and_unlike_ones_do_not():
    classes, own, blended = outcomes([1, 1], hot=32)
    assert one_map_or_several(classes, own, blended, 0.05).answer == "one"
    classes, own, blended = outcomes([1, 2], hot=16)
    verdict = one_map_or_several(classes, own, blended, 0.05)
    assert verdict.answer == "several" and verdict.gain > 0.05
    assert "class0" in verdict.reason and "%" in verdict.reason


def test_new_map_is_advised_when_the_traffic_moved():
    classes, own, _ = outcomes([1], hot=24)
    moved = outcome(
        classes[0], place(traffic(seed=5), [24, 24], ROW, PAGE), conditions()
    )
    verdict = is_it_time_for_a_new_map(classes, {"class0": moved}, own, 0.4, 0.05)
    assert verdict.answer == "renew" and verdict.gain > 0.05
    same = is_it_time_for_a_new_map(classes, own, own, 1.0, 0.05)
    assert same.answer == "keep" and same.gain == 0


def test_mean_over_classes_is_of_time_and_not_of_speed():
    """Half the tokens at 100 and half at 300 per second are 150 per second."""
    classes = [divide(traffic(), None, label, 1.0) for label in "ab"]
    slow = {"a": Outcome(0.1, 100.0), "b": Outcome(0.3, 300.0)}
    fast = {"a": Outcome(0.1, 150.0), "b": Outcome(0.3, 150.0)}
    verdict = is_it_time_for_a_new_map(classes, slow, fast, 1.0, 0.05)
    assert verdict.gain == pytest.approx(0)


def test_b20_nothing_cold_is_not_worth_a_map():
    classes, own, _ = outcomes([1], hot=64)
    speed = {"class0": own["class0"].tokens_per_s}
    verdict = is_it_worth_it(classes, own, speed, speed, 0.0, 0.05)
    assert verdict.answer == "no" and "resident" in verdict.reason


def test_map_is_worth_it_where_traffic_is_skewed():
    classes, own, _ = outcomes([1], hot=32)
    by_position = conditions().throughput(
        classes[0].served, positional_host_bytes(2, 64, ROW, 64 * ROW.num_bytes)
    )
    verdict = is_it_worth_it(
        classes, own, {"class0": 1e3}, {"class0": by_position}, 0.5, 0.05
    )
    assert verdict.answer == "yes" and verdict.gain > 0.05


def test_c16_classes_with_requests_are_judged_by_other_requests():
    profile = make_profile(tokens=300, requests=7)
    one = divide(profile.counts, profile.counts_request, "a", 1.0)
    assert one.held_out and (one.ranked + one.served == profile.counts).all()
    assert (one.ranked == profile.counts_request[::2].sum(0)).all()
    assert not divide(profile.counts, None, "a", 1.0).held_out


def test_place_ranks_as_the_planner_does():
    counts = traffic()
    placed = place(counts, [10, 20], ROW, PAGE)
    assert placed.mask.sum(axis=1).tolist() == [10, 20]
    assert placed.mask[0][rank(counts)[0, :10]].all()
    assert (placed.outside.sum(axis=1)[placed.mask] == 0).all()


def test_assessment_is_of_every_class_under_every_map():
    given = conditions()
    classes = [divide(traffic(seed=i), None, f"class{i}", 1.0) for i in (1, 2)]
    cuts = np.array([16, 20])
    old = {"old": place(classes[0].ranked, cuts, ROW, PAGE)}
    found = assess(classes, cuts, old, given)
    assert found.current["class1"]["old"] == found.own["class1"]
    assert found.foreign["class2"]["class1"] == found.current["class2"]["old"]
    assert found.common["class1"][0] == 1 and found.common["class2"][0] < 1
    assert found.cold_rows == pytest.approx(1 - 36 / 128)
    for one in classes:
        label = one.label
        own, blend = found.own[label], found.blend[label]
        assert found.positional[label] < own.tokens_per_s < found.resident[label]
        assert own.cold_share < blend.cold_share
    verdicts = advise(found, 0.05)
    assert verdicts["maps"].answer == "several"
    # One map serves both now, so it is held against one new map for both.
    assert verdicts["new_map"].answer == "renew"
    assert "new_map" not in advise(assess(classes, cuts, {}, given), 0.05)
