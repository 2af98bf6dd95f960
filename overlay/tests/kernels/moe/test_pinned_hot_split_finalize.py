# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The one sum over rows of two parts: arithmetic, and the kernels without a GPU."""

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput
from vllm.model_executor.layers.fused_moe.pinned_hot.split.finalize import (
    _fma_ftz_reference,
    finalize_parts,
    merge_parts,
)

SCRIPT = Path(__file__).with_name("split_triton_check.py")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton"
)
SMALLEST = 2.0**-126


def run_script(*arguments: str) -> dict:
    process = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    (line,) = [x for x in process.stdout.splitlines() if x.startswith("RESULT")]
    return json.loads(line.removeprefix("RESULT"))


@needs_triton
def test_interpreted_kernels_equal_torch():
    result = run_script("interpret")
    assert not any(result["wrong"].values()), result
    assert all(count > 100 for count in result["seen"].values()), result


# FlashInfer's compiled kernels have this instruction and no other for a weighted sum.
@needs_triton
def test_compiled_kernel_has_one_instruction_a_slot():
    elements_per_thread = 1024 // (4 * 32)
    found = run_script("compile", "90", "100")
    assert set(found) == {"90", "100"}
    for arithmetic in found.values():
        assert arithmetic == {"fma.rn.ftz.f32": 6 * elements_per_thread}


def fmaf(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """The C library's, subnormals flushed before and after."""
    function = ctypes.CDLL("libm.so.6").fmaf
    function.argtypes, function.restype = [ctypes.c_float] * 3, ctypes.c_float

    def flush(x: float) -> float:
        return x * 0.0 if abs(x) < SMALLEST else x

    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    return torch.tensor([flush(function(flush(x), flush(y), z)) for x, y, z in rows])


def test_reference_rounds_once():
    generator = torch.Generator().manual_seed(0)
    count = 30_000

    def draw(low: int, high: int) -> torch.Tensor:
        exponents = torch.randint(low, high, (count,), generator=generator)
        return torch.randn(count, generator=generator) * torch.exp2(exponents.float())

    a, b, c = draw(-2, 3), draw(-13, 13).bfloat16().float(), draw(-26, 26)
    # 1 + 2^-24 + 2^-53: rounded to float64 first, it is a tie of float32.
    a[:2] = 3033169 * 2.0**-40
    b[:2] = torch.tensor([177 * 2.0**-13, -177 * 2.0**-13])
    c[:2] = torch.tensor([1.0, -1.0])
    expected = fmaf(a, b, c)
    assert torch.equal(_fma_ftz_reference(a, b, c), expected)
    assert not torch.equal(a * b + c, expected)
    in_double = (a.double() * b.double() + c.double()).float()
    assert not torch.equal(in_double[:2], expected[:2])


def test_reference_flushes_subnormals_and_keeps_the_rest():
    a = torch.tensor([1.0, 2.0**-127, 0.5, 1.0, float("inf"), 1.0, 2.0**-100])
    b = torch.tensor([2.0**-127, 8.0, SMALLEST, SMALLEST, 1.0, float("nan"), 2.0**-60])
    c = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, SMALLEST])
    found = _fma_ftz_reference(a, b, c)
    assert found[:4].tolist() == [0.0, 0.0, 0.0, SMALLEST]
    assert found[4] == float("inf") and found[5].isnan() and found[6] == SMALLEST


def parts_of(
    tokens: int, hidden: int, top_k: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """All slots' rows as one part, `(tokens * top_k, hidden)`, index and weights."""
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randn((tokens * top_k, hidden), generator=generator).bfloat16()
    index = torch.randperm(tokens * top_k, generator=generator).to(torch.int32)
    weights = torch.rand((tokens, top_k), generator=generator)
    return rows, index.view(tokens, top_k), weights, torch.empty(0)


def test_any_split_of_the_slots_gives_the_same_bits():
    rows, index, weights, _ = parts_of(40, 96)
    whole = torch.empty((40, 96), dtype=torch.bfloat16)
    finalize_parts(rows, None, index, None, weights, whole)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        hot = torch.rand(index.shape, generator=generator) < 0.5
        out = torch.full_like(whole, float("nan"))
        finalize_parts(
            rows,
            rows.clone(),
            torch.where(hot, index, -1),
            torch.where(hot, -1, index),
            weights,
            out,
        )
        assert torch.equal(out, whole)


# D13
def test_two_finalized_sums_do_not_give_the_same_bits():
    rows, index, weights, _ = parts_of(40, 96)
    whole = torch.empty((40, 96), dtype=torch.bfloat16)
    finalize_parts(rows, None, index, None, weights, whole)
    halves = []
    for keep in (torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0, 1, 1])):
        out = torch.empty_like(whole)
        finalize_parts(
            rows, None, torch.where(keep == 1, index, -1), None, weights, out
        )
        halves.append(out)
    differing = (halves[0] + halves[1] != whole).float().mean()
    assert 0.05 < differing < 0.9


def test_cancellation_keeps_its_tail():
    """1 + 2^-9 - 1 in bfloat16, hot and cold slots in turn."""
    rows = torch.tensor([[1.0], [2.0**-9], [-1.0]]).bfloat16()
    index = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    weights = torch.ones(1, 3)
    for hot in ([True, False, True], [False, True, False], [True] * 3):
        mask = torch.tensor([hot])
        out = torch.empty((1, 1), dtype=torch.bfloat16)
        finalize_parts(
            rows,
            rows,
            torch.where(mask, index, -1),
            torch.where(mask, -1, index),
            weights,
            out,
        )
        assert out.item() == 2.0**-9


def test_nothing_selected_gives_plus_zero_whatever_the_rows_hold():
    rows = torch.full((4, 8), float("nan"))
    index = torch.full((3, 2), -1, dtype=torch.int32)
    weights = torch.full((3, 2), float("nan"))
    out = torch.full((3, 8), float("nan"))
    finalize_parts(rows, rows, index, index, weights, out)
    assert torch.equal(out.view(torch.int32), torch.zeros_like(out).view(torch.int32))


def test_merged_rows_are_those_of_the_parts():
    def part(num_rows: int, index: list[list[int]], value: float):
        return UnfinalizedMoEOutput(
            torch.arange(num_rows).view(-1, 1) + value,
            torch.full((2, 3), float("nan")),
            torch.tensor(index, dtype=torch.int32),
        )

    weights = torch.rand(3, 2).t()
    first = part(4, [[0, -1, 3], [-1, -1, 1]], 0.25)
    second = part(5, [[-1, 4, -1], [2, -1, -1]], 0.5)
    merged = merge_parts([first, second], weights)
    index = merged.expanded_idx_to_permuted_idx
    assert index.dtype == torch.int32
    assert index.tolist() == [[0, 8, 3], [6, -1, 1]]
    assert merged.gemm2_permuted[[8, 6, 3]].flatten().tolist() == [4.5, 2.5, 3.25]
    assert torch.equal(merged.expert_weights, weights)
    assert merged.expert_weights.is_contiguous()
    alone = merge_parts([second], weights)
    assert alone.gemm2_permuted is second.gemm2_permuted
    assert alone.expanded_idx_to_permuted_idx.tolist() == [[-1, 4, -1], [2, -1, -1]]
