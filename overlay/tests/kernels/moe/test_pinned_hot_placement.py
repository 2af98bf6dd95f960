# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Properties of the page placement, against brute force on small geometries."""

import random
from itertools import combinations, pairwise

import numpy as np
import pytest

from vllm.model_executor.layers.fused_moe.pinned_hot.placement import (
    RowTensor,
    hot_bytes_per_row,
    hot_pages,
    page_heat,
    page_runs,
    place_pages,
    row_heat,
)

PAGE = 16
# row bytes: below, at, above a page, coprime to it, and far above
ROW_BYTES = (1, 5, 8, 16, 17, 40, 48, 100)
NUM_ROWS = (1, 2, 3, 7, 32)


def random_heat(num_rows, seed):
    rng = random.Random(seed)
    counts = [rng.choice((0, 0, 1, 5, 40)) for _ in range(num_rows)]
    ranking = sorted(range(num_rows), key=lambda e: (-counts[e], e))
    total = sum(counts) or 1
    return row_heat(ranking, [counts[e] / total for e in ranking])


def row_of_each_byte(tensor, page):
    first = page * PAGE
    last = min(first + PAGE, tensor.num_bytes)
    return [byte // tensor.row_bytes for byte in range(first, last)]


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_heat_of_a_page_is_the_sum_over_its_bytes(num_rows, row_bytes):
    tensor = RowTensor(num_rows, row_bytes)
    heat = random_heat(num_rows, seed=row_bytes)
    expected = [
        sum(heat[row] for row in row_of_each_byte(tensor, page))
        for page in range(tensor.num_pages(PAGE))
    ]
    assert np.array_equal(page_heat(tensor, heat, PAGE), np.array(expected))


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("row_bytes", ROW_BYTES)
@pytest.mark.parametrize("fraction", (0.0, 0.1, 0.5, 0.9, 1.0))
def test_placement_keeps_the_budget_and_the_hottest_pages(
    num_rows, row_bytes, fraction
):
    tensors = [RowTensor(num_rows, row_bytes), RowTensor(num_rows, row_bytes + 3)]
    heats = [random_heat(num_rows, seed=1), random_heat(num_rows, seed=2)]
    total = sum(tensor.num_pages(PAGE) for tensor in tensors) * PAGE
    budget = int(total * fraction)
    masks = place_pages(tensors, heats, budget, PAGE)
    assert [len(m) for m in masks] == [t.num_pages(PAGE) for t in tensors]
    hot = sum(int(mask.sum()) for mask in masks)
    if fraction == 1.0:
        assert hot == sum(len(mask) for mask in masks)
    else:
        assert hot * PAGE <= budget < (hot + 1) * PAGE
    kept, dropped = [], []
    for tensor, heat, mask in zip(tensors, heats, masks, strict=True):
        for page, value in enumerate(page_heat(tensor, heat, PAGE).tolist()):
            (kept if mask[page] else dropped).append(tuple(value))
    if kept and dropped:
        assert min(kept) >= max(dropped)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("row_bytes", ROW_BYTES)
@pytest.mark.parametrize("seed", range(3))
def test_hot_pages_are_those_that_a_hot_row_touches(num_rows, row_bytes, seed):
    rng = random.Random(seed)
    hot = rng.sample(range(num_rows), rng.randint(0, num_rows))
    tensor = RowTensor(num_rows, row_bytes)
    mask = hot_pages(tensor, hot, PAGE)
    assert mask.tolist() == [
        bool(set(row_of_each_byte(tensor, page)) & set(hot))
        for page in range(tensor.num_pages(PAGE))
    ]
    per_row = hot_bytes_per_row(tensor, mask, PAGE)
    assert all(per_row[row] == row_bytes for row in hot)


@pytest.mark.parametrize("seed", range(4))
def test_budget_leaves_the_least_cold_traffic(seed):
    """Against every other choice of as many pages, on two small layers."""
    rng = random.Random(seed)
    tensors = [RowTensor(3, rng.randint(9, 36)), RowTensor(4, rng.randint(9, 28))]
    shares = []
    for tensor in tensors:
        draws = sorted((rng.random() for _ in range(tensor.num_rows)), reverse=True)
        shares.append([draw / sum(draws) for draw in draws])
    heats = [row_heat(range(len(share)), share) for share in shares]
    pages = [tensor.num_pages(PAGE) for tensor in tensors]
    for count in range(sum(pages) + 1):
        masks = place_pages(tensors, heats, count * PAGE, PAGE)
        assert sum(int(mask.sum()) for mask in masks) == count

        def cold_traffic(flat):
            parts = np.split(np.asarray(flat, dtype=bool), [pages[0]])
            return sum(
                share * (tensor.row_bytes - hot)
                for tensor, mask, rows in zip(tensors, parts, shares, strict=True)
                for share, hot in zip(
                    rows, hot_bytes_per_row(tensor, mask, PAGE), strict=True
                )
            )

        best = min(
            cold_traffic([page in chosen for page in range(sum(pages))])
            for chosen in combinations(range(sum(pages)), count)
        )
        assert cold_traffic(np.concatenate(masks)) == pytest.approx(best, rel=1e-6)


def test_placement_is_global_over_layers():
    """One very hot layer takes the whole budget from a cold one."""
    tensors = [RowTensor(4, PAGE), RowTensor(4, PAGE)]
    cold = row_heat([0, 1, 2, 3], [0.4, 0.3, 0.2, 0.1])
    hot = row_heat([0, 1, 2, 3], [0.25] * 4) * 10
    masks = place_pages(tensors, [cold, hot], 4 * PAGE, PAGE)
    assert [int(mask.sum()) for mask in masks] == [0, 4]


def test_ranking_decides_where_the_profile_saw_nothing():
    """An idle layer keeps the first rows of its ranking, not the lowest ids."""
    heat = row_heat([3, 1, 0, 2], [0.0] * 4)
    (mask,) = place_pages([RowTensor(4, PAGE)], [heat], 2 * PAGE, PAGE)
    assert mask.tolist() == [False, True, False, True]


def test_equal_heat_goes_to_the_lower_page():
    heat = np.zeros((4, 2), dtype=np.int64)
    (mask,) = place_pages([RowTensor(4, PAGE)], [heat], 2 * PAGE, PAGE)
    assert mask.tolist() == [True, True, False, False]


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_hot_bytes_per_row_counts_every_byte_once(row_bytes):
    tensor = RowTensor(7, row_bytes)
    rng = random.Random(row_bytes)
    mask = np.array([rng.random() < 0.5 for _ in range(tensor.num_pages(PAGE))])
    expected = [0] * tensor.num_rows
    for byte in range(tensor.num_bytes):
        expected[byte // row_bytes] += bool(mask[byte // PAGE])
    assert hot_bytes_per_row(tensor, mask, PAGE).tolist() == expected


@pytest.mark.parametrize("seed", range(20))
def test_runs_tile_the_range_and_alternate(seed):
    rng = random.Random(seed)
    mask = np.array([rng.random() < 0.5 for _ in range(rng.randint(1, 30))])
    runs = list(page_runs(mask, PAGE))
    rebuilt = []
    for run in runs:
        assert run.start == len(rebuilt) * PAGE and run.num_bytes > 0
        rebuilt += [run.hot] * (run.num_bytes // PAGE)
    assert rebuilt == mask.tolist()
    assert all(a.hot != b.hot for a, b in pairwise(runs))


def test_nothing_to_place():
    assert place_pages([], [], 100, PAGE) == []
    assert list(page_runs(np.zeros(0, dtype=bool), PAGE)) == []
