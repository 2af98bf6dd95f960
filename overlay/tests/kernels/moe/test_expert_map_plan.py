# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From counts to a map: rankings, cuts and budgets, against brute force."""

import itertools
import time

import numpy as np
import pytest

from tests.kernels.moe.expert_profile_utils import (
    make_fingerprint,
    make_profile,
    named,
)
from vllm.model_executor.layers.fused_moe.expert_profile.errors import ExpertPlanError
from vllm.model_executor.layers.fused_moe.expert_profile.plan import (
    CutRequest,
    choose_cut,
    combine,
    covered,
    make_map,
    optimal_cut,
    silent_layers,
)
from vllm.model_executor.layers.fused_moe.expert_profile.row_bytes import (
    _BITS_BY_QUANTIZATION,
    ExpertRow,
    expert_row,
    host_bytes,
    hot_page_bytes,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import parse_expert_map
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

SEEDS = range(40)
PAGE = 4096
ROW = ExpertRow(8000, 4000, "test")


def draw(seed: int, layers: int = 3, experts: int = 5) -> np.ndarray:
    """Counts with ties, zeros and, now and then, a silent layer."""
    random = np.random.default_rng(seed)
    counts = random.integers(0, 6, (layers, experts)) ** 2
    if seed % 5 == 0:
        counts[seed % layers] = 0
    return counts


def brute_force(counts, sizes, budget, floor) -> float:
    """Most selections that any cut of the budget covers."""
    layers, experts = counts.shape
    return max(
        covered(counts, cut)
        for cut in itertools.product(range(floor, experts + 1), repeat=layers)
        if np.dot(cut, sizes) <= budget
    )


@pytest.mark.parametrize("floor", (0, 1, 2))
@pytest.mark.parametrize("seed", SEEDS)
def test_optimal_cut_equals_brute_force(seed, floor):
    counts = draw(seed)
    for rows in range(floor * 3, counts.size + 1):
        cut = optimal_cut(counts, 100, rows * 100 + seed, floor)
        assert cut.sum() == rows and cut.min() >= floor
        assert covered(counts, cut) == brute_force(counts, [100] * 3, rows * 100, floor)


@pytest.mark.parametrize("seed", SEEDS)
def test_optimal_cut_with_rows_of_several_sizes(seed):
    counts = draw(seed)
    sizes = np.random.default_rng(seed).choice([40, 70, 160], 3)
    for budget in range(int(sizes.sum()), int(sizes.sum()) * 5, 90):
        cut = optimal_cut(counts, sizes, budget, 1)
        best = brute_force(counts, sizes, budget, 1)
        assert np.dot(cut, sizes) <= budget and cut.min() >= 1
        # Short of the best by less than one row that did not fit.
        assert best - counts.max() < covered(counts, cut) or best == covered(
            counts, cut
        )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("budget", ("hot_rows", "cold_fraction", "hot_gib"))
def test_optimal_is_never_worse_than_uniform(seed, budget):
    counts = draw(seed, layers=4, experts=16)
    for part in (4, 7, 12, 16):
        value = {
            "hot_rows": part,
            "cold_fraction": 1 - part / 16,
            "hot_gib": 4 * (part + 1.5) * ROW.num_bytes / 2**30,
        }[budget]
        cuts = {
            kind: choose_cut(counts, CutRequest(kind, **{budget: value}), 2, ROW, PAGE)
            for kind in ("uniform", "optimal")
        }
        assert covered(counts, cuts["optimal"]) >= covered(counts, cuts["uniform"])
        assert len(set(cuts["uniform"].tolist())) == 1
        if budget != "hot_gib":
            assert cuts["optimal"].sum() == cuts["uniform"].sum() == 4 * part


def test_rows_nobody_selected_are_spread_evenly():
    counts = np.array([[5, 3, 0, 0, 0], [4, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    assert optimal_cut(counts, 1, 6, 0).tolist() == [2, 2, 2]
    assert optimal_cut(counts, 1, 8, 0).tolist() == [3, 3, 2]


def test_hot_gib_holds_the_pages_and_not_only_the_rows():
    counts = draw(1, layers=4, experts=16)
    request = CutRequest("optimal", hot_gib=30 * ROW.num_bytes / 2**30)
    cut = choose_cut(counts, request, 2, ROW, PAGE)
    made = make_map(counts, cut, list("abcd"), make_fingerprint(4, 16, 2), [])
    pages = sum(
        hot_page_bytes(ROW, 16, layer.hot_rows, PAGE) for layer in made.layers.values()
    )
    assert pages <= request.hot_gib * 2**30 < pages + 4 * (ROW.num_bytes + 4 * PAGE)
    assert cut.sum() < 30


@pytest.mark.parametrize(
    "fraction,hot", ((0, 10), (0.1, 9), (0.3, 7), (0.95, 0), (1, 0))
)
def test_cold_fraction_rounds_to_no_more_hot_rows(fraction, hot):
    request = CutRequest("uniform", cold_fraction=fraction)
    assert choose_cut(np.ones((3, 10)), request, 2, None, PAGE).tolist() == [hot] * 3


@pytest.mark.parametrize(
    "request_,named_",
    (
        (CutRequest("uniform", hot_rows=17), ["--hot-rows 17", "0 … 16"]),
        (CutRequest("uniform", hot_rows=-1), ["--hot-rows -1"]),
        (CutRequest("uniform", cold_fraction=1.5), ["--cold-fraction 1.5", "0 … 1"]),
        (CutRequest("uniform", cold_fraction=float("nan")), ["--cold-fraction nan"]),
        (CutRequest("optimal", hot_rows=1), ["4 rows", "floor of 2", "--cut uniform"]),
        (CutRequest("optimal", hot_gib=1e-6), ["--hot-gib 1e-06", "floor of 2"]),
        (CutRequest("uniform", hot_gib=float("nan")), ["--hot-gib nan"]),
        (CutRequest("uniform", hot_gib=-1.0), ["--hot-gib -1"]),
        (CutRequest("optimal", hot_rows=4, floor=-1), ["--floor -1"]),
        (CutRequest("uniform", hot_rows=4, floor=1), ["--floor 1", "no effect"]),
    ),
)
def test_bad_budget_is_one_clear_error(request_, named_):
    with pytest.raises(ExpertPlanError) as error:
        choose_cut(draw(1, layers=4, experts=16), request_, 2, ROW, PAGE)
    for word in named_:
        assert word in str(error.value)


def test_c15_silent_layer_is_ranked_by_id_without_nan():
    counts = np.array([[0, 0, 0, 0], [1, 5, 5, 0]])
    made = make_map(counts, [2, 2], ["a", "b"], make_fingerprint(2, 4, 2), [])
    assert made.layers["a"].ranking == (0, 1, 2, 3)
    assert made.layers["a"].share == (0, 0, 0, 0)
    assert made.layers["b"].ranking == (1, 2, 0, 3)
    assert made.expected_cold_share == pytest.approx(1 / 22)
    assert silent_layers(counts, ["a", "b"]) == ["a"]


@pytest.mark.parametrize("seed", SEEDS)
def test_b23_every_plan_is_a_valid_map_of_permutations(seed):
    counts = draw(seed, layers=3, experts=9)
    for rows in range(3, 28):
        cut = optimal_cut(counts, 1, rows, 1)
        made = make_map(counts, cut, ["a", "b", "c"], make_fingerprint(3, 9, 2), [])
        again = parse_expert_map(made.to_json(), "map.json")
        assert again == made
        for layer in again.layers.values():
            assert sorted(layer.ranking) == list(range(9))


def test_plan_of_40_layers_of_384_experts_takes_less_than_two_seconds():
    counts = np.random.default_rng(0).integers(0, 10_000, (40, 384))
    names = [f"model.layers.{i}.mlp.experts" for i in range(40)]
    row = ExpertRow(11_796_480, 5_898_240, "test")
    start = time.perf_counter()
    request = CutRequest("optimal", hot_gib=150.0)
    cut = choose_cut(counts, request, 6, row, 2 << 20)
    made = make_map(counts, cut, names, make_fingerprint(40, 384, 6), [])
    parse_expert_map(made.to_json(), "map.json")
    assert time.perf_counter() - start < 2


def test_weights_are_shares_of_traffic_however_long_it_was_recorded():
    short, long = make_profile(tokens=10, seed=1), make_profile(tokens=1000, seed=2)
    even = combine([named(short, "a", 1.0), named(long, "b", 1.0)], "both")
    expected = short.counts / 10 / 2 + long.counts / 1000 / 2
    np.testing.assert_allclose(even, expected)
    twice = combine([named(short, "a", 2.0), named(long, "b", 6.0)], "both")
    np.testing.assert_allclose(twice, short.counts / 40 + long.counts * 0.75 / 1000)
    np.testing.assert_array_equal(
        combine([named(short, "a"), named(long, "b")], "both"),
        short.counts + long.counts,
    )


def test_order_of_profiles_does_not_matter():
    parts = [named(make_profile(seed=i), str(i), 0.1 * (i + 1)) for i in range(6)]
    one = combine(parts, "decode")
    for order in itertools.islice(itertools.permutations(parts), 0, 720, 101):
        np.testing.assert_array_equal(combine(list(order), "decode"), one)


@pytest.mark.parametrize("phase", ("both", "prefill", "decode"))
def test_phase_selects_the_counts(phase):
    profile = make_profile()
    expected = {
        "both": profile.counts_prefill + profile.counts_decode,
        "prefill": profile.counts_prefill,
        "decode": profile.counts_decode,
    }[phase]
    np.testing.assert_array_equal(combine([named(profile, "a")], phase), expected)


@pytest.mark.parametrize(
    "weights,phase,words",
    (
        ((1.0, None), "both", ["'b' has no weight", "PROFILE=WEIGHT"]),
        ((1.0, 0.0), "both", ["'b': weight 0.0", "above 0"]),
        ((1.0, -2.0), "both", ["weight -2.0"]),
        ((1.0, float("nan")), "both", ["weight nan"]),
        ((1.0, 1.0), "decode", ["'b'", "no tokens of phase 'decode'"]),
    ),
)
def test_bad_weights(weights, phase, words):
    profiles = make_profile(seed=1), make_profile(seed=2, decode_tokens=0)
    parts = [
        named(profile, label, weight)
        for profile, label, weight in zip(profiles, "ab", weights, strict=True)
    ]
    with pytest.raises(ExpertPlanError) as error:
        combine(parts, phase)
    for word in words:
        assert word in str(error.value)


def test_profile_without_tokens_is_refused():
    empty = make_profile(tokens=0, decode_tokens=0)
    with pytest.raises(ExpertPlanError, match="nothing to rank by"):
        combine([named(empty, "a")], "both")


@pytest.mark.parametrize(
    "quantization,bits", ((None, 16), ("fp8", 8), ("mxfp4", 4), ("modelopt_fp4", 4))
)
def test_row_bytes_follow_from_the_fingerprint(quantization, bits):
    fingerprint = make_fingerprint(1, 4, 2, hidden=64, intermediate=96)
    fingerprint = fingerprint.model_copy(update={"quantization": quantization})
    row = expert_row(fingerprint)
    assert (row.w13, row.w2) == (2 * 64 * 96 * bits // 8, 64 * 96 * bits // 8)
    assert expert_row(fingerprint, tensor_parallel_size=2).num_bytes * 2 == (
        row.num_bytes
    )


def test_known_quantizations_are_names_that_vllm_has():
    assert set(_BITS_BY_QUANTIZATION) - {None} <= set(QUANTIZATION_METHODS)


@pytest.mark.parametrize(
    "field,value", (("quantization", "gptq"), ("moe_intermediate_size", None))
)
def test_unknown_row_size_is_said(field, value):
    fingerprint = make_fingerprint(1, 4, 2).model_copy(update={field: value})
    with pytest.raises(ExpertPlanError) as error:
        expert_row(fingerprint)
    assert f"fingerprint.{field}" in str(error.value)
    assert "--row-bytes" in str(error.value)
    assert expert_row(fingerprint, row_bytes=900).num_bytes == 900
    assert expert_row(fingerprint, row_bytes=900).w13 == 600


def test_host_bytes_of_cold_experts_leave_out_pages_of_hot_neighbours():
    row = ExpertRow(3 * PAGE // 2, PAGE, "test")
    outside = host_bytes(row, 4, (0, 2), PAGE)
    # w13: 0 lies in pages 0-1, 1 in 1-2, 2 in 3-4, 3 in 4-5.
    assert outside[0].tolist() == [0, PAGE, 0, PAGE]
    assert outside[1].tolist() == [0, PAGE, 0, PAGE]
    assert host_bytes(row, 4, range(4), PAGE).sum() == 0
