# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Copies for large batches: which pages are copied, and what memory they take."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.kernels.moe.pinned_hot_utils import make_map
from tests.kernels.moe.triton_interpreter import HAS_INTERPRETER, interpret
from vllm.config import expert_provider
from vllm.config.expert_provider import ExpertProviderConfig
from vllm.model_executor.layers.fused_moe.pinned_hot import range_layout
from vllm.model_executor.layers.fused_moe.pinned_hot.device_backing import DeviceBacking
from vllm.model_executor.layers.fused_moe.pinned_hot.layout import LayerRows
from vllm.model_executor.layers.fused_moe.pinned_hot.placement import RowTensor
from vllm.model_executor.layers.fused_moe.pinned_hot.provider import (
    _why_not_stage_tokens,
)

PAGE = DeviceBacking.page_bytes

COPIES = """
from vllm.model_executor.layers.fused_moe.pinned_hot.needed_rows import flag_rows
from vllm.model_executor.layers.fused_moe.pinned_hot.range_staging import stage_pages

PAGE, E = 16384, 6
row_map = torch.arange(E, dtype=torch.int32)
needed = torch.full((E,), 9, dtype=torch.int32)

def copied(row_bytes, cold, ids):
    pages = -(-E * row_bytes // PAGE)
    home = torch.randint(0, 255, (pages * PAGE,), dtype=torch.uint8)
    twin = torch.full_like(home, 77)
    flag_rows(torch.tensor(ids), row_map, 0, needed)
    cold = torch.tensor(cold, dtype=torch.int32)
    stage_pages(needed, cold, home, twin, row_bytes, PAGE)
    found = []
    for page in range(pages):
        part = slice(page * PAGE, (page + 1) * PAGE)
        same = torch.equal(twin[part], home[part])
        assert same or bool((twin[part] == 77).all()), page
        found += [page] if same else []
    return found

def carrying(row_bytes, experts):
    return {
        page
        for e in experts
        for page in range(
            e * row_bytes // PAGE, ((e + 1) * row_bytes - 1) // PAGE + 1
        )
    }

for row_bytes in (16384, 24576, 40960, 6144):
    everything = list(range(-(-E * row_bytes // PAGE)))
    for ids in ([[0]], [[E - 1, 2]], [[1, 3], [3, -1]], [[-1, E]]):
        wanted = carrying(row_bytes, {e for pair in ids for e in pair if 0 <= e < E})
        for cold in (everything, everything[1::2], []):
            assert set(copied(row_bytes, cold, ids)) == wanted & set(cold), ids
    assert copied(row_bytes, everything, [[e] for e in range(E)] * 300) == everything
"""


@pytest.mark.skipif(
    not HAS_INTERPRETER, reason="Triton is not installed, so nothing can interpret it"
)
def test_cold_pages_of_selected_rows_are_copied_and_no_others():
    interpret(COPIES)


# ------------------------------------------------------------- memory for copies


@pytest.fixture
def plan(monkeypatch):
    """Plan layers of 8 experts of 3 and 2 pages on a GPU that has any memory."""
    rows = LayerRows((RowTensor(8, 3 * PAGE), RowTensor(8, 2 * PAGE)), 40 * PAGE)
    monkeypatch.setattr(range_layout, "layer_rows", lambda layer: rows)
    planned = []
    monkeypatch.setattr(
        DeviceBacking, "check", lambda self, found, ranks: planned.append(found)
    )

    def plan(hot, layers, tokens=None, budget=None, largest_batch=4096):
        entry = make_map(hot).layers["model.layers.0.mlp.experts"]
        entries = {f"layer{i}": entry for i in range(layers)}
        layout = range_layout.RangeLayout(DeviceBacking(0), tokens)
        layers = dict.fromkeys(entries, SimpleNamespace())
        granted = layout.plan(layers, entries, budget, 1, largest_batch)
        [found] = planned
        planned.clear()
        assert found.total - found.hot == sum(
            40 * PAGE - (size if size is not None else hot * 5 * PAGE)
            for size in granted.values()
        )
        return layout._staging_pages, found.hot // PAGE

    return plan


def test_memory_is_for_the_cold_pages_of_one_layer(plan):
    # 5 of 8 rows hot in each of 20 layers: 15 of 500 pages are 3 %.
    assert plan(hot=5, layers=20) == (15, 20 * 25 + 15)


def test_copies_are_left_out_where_they_cost_much_or_no_batch_is_large(plan):
    assert plan(hot=1, layers=20) == (0, 20 * 5)
    assert plan(hot=5, layers=20, largest_batch=range_layout.STAGE_TOKENS - 1)[0] == 0
    assert plan(hot=5, layers=20, largest_batch=range_layout.STAGE_TOKENS)[0] == 15
    assert plan(hot=5, layers=20, tokens=0) == (0, 500)
    assert plan(hot=1, layers=20, tokens=1) == (35, 135)
    assert plan(hot=8, layers=20) == (0, 800)


@pytest.mark.parametrize("odd_bytes", [0, 1, PAGE - 1])
def test_copies_are_part_of_the_budget(plan, odd_bytes):
    budget = 500 * PAGE + odd_bytes
    staging, hot = plan(hot=1, layers=20, budget=budget)
    assert 0 < staging <= 40 and 500 - 2 * 20 < hot <= 500
    assert plan(hot=1, layers=20, tokens=0, budget=budget) == (0, 500)


def test_budget_too_small_for_copies(plan):
    with pytest.raises(ValueError) as error:
        plan(hot=1, layers=2, tokens=1, budget=30 * PAGE)
    message = str(error.value)
    assert message.startswith("--expert-stage-tokens 1: 80.00 MiB"), message
    assert "60.00 MiB of --expert-hbm-gib" in message


def test_counts_of_pages():
    masks = {
        "a": [np.array([True, False]), np.array([False])],
        "b": [np.array([True, True]), np.array([False])],
    }
    assert range_layout.hot_page_count(masks.values()) == 3
    assert range_layout.most_cold_pages(masks) == 2


# ------------------------------------------------------------- the flag


def test_flag_without_effect():
    given = ExpertProviderConfig(expert_stage_tokens=4097, expert_layout="range")
    assert _why_not_stage_tokens(replace(given, expert_stage_tokens=4096), 4096) is None
    assert _why_not_stage_tokens(replace(given, expert_stage_tokens=0), 4096) is None
    reason = _why_not_stage_tokens(given, 4096)
    assert "--expert-stage-tokens 4097 has no effect" in reason and "4096" in reason
    for layout in ("auto", "split"):
        reason = _why_not_stage_tokens(replace(given, expert_layout=layout), 8192)
        assert f"has no effect with --expert-layout {layout}" in reason


def test_help_names_the_default():
    with open(expert_provider.__file__) as file:
        assert f"Default: {range_layout.STAGE_TOKENS}, if" in file.read()
