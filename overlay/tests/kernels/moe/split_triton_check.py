# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton kernels of layout `split` without a GPU: `interpret` them or `compile` them.

A process of its own, since Triton chooses between the two when it is imported, and
vLLM's CPU build leaves Triton out. Prints what it compared as JSON.
"""

import json
import os
import sys
from collections import Counter
from importlib import import_module

if sys.argv[1] == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"

import regex as re
import torch

from vllm import triton_utils

triton = triton_utils.triton = import_module("triton")
tl = triton_utils.tl = import_module("triton.language")

from vllm.model_executor.layers.fused_moe.pinned_hot.split import (  # noqa: E402
    finalize,
    row_ids,
)

BITS = {2: torch.int16, 4: torch.int32}


def tiny(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values of a dtype's lowest binades, many of them subnormal."""
    mantissa = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[dtype]
    low = torch.randint(0, 2 << mantissa, shape).to(BITS[dtype.itemsize])
    return torch.where(torch.rand(shape) < 0.5, -1, 1).to(dtype) * low.view(dtype)


def case(
    tokens: int, top_k: int, hidden: int, dtype: torch.dtype, small: bool
) -> tuple[torch.Tensor, ...]:
    """Rows of two parts and their indices; rows that no slot names hold NaN."""
    num_rows = tokens * top_k + 3
    parts = []
    hot = torch.rand(tokens, top_k) < 0.5
    missing = torch.rand(tokens, top_k) < 0.2
    for mask in (hot & ~missing, ~hot & ~missing):
        rows = (
            tiny((num_rows, hidden + 8), dtype)
            if small
            else torch.randn(num_rows, hidden + 8).to(dtype)
        )
        index = torch.randperm(num_rows)[: tokens * top_k].view(tokens, top_k)
        index = torch.where(mask, index, -1).to(torch.int32)
        if tokens > 1:
            index[1] = -1
        unused = torch.ones(num_rows, dtype=torch.bool)
        unused[index[index >= 0].long()] = False
        rows[unused] = float("nan")
        parts.append((rows, index))
    weights = torch.rand(tokens, top_k)
    if small:
        weights[0] = 1 - 2.0**-24
        weights[-1] = 2.0**-130
    (hot_rows, hot_index), (cold_rows, cold_index) = parts
    return hot_rows, cold_rows, hot_index, cold_index, weights


def interpret() -> dict[str, int]:
    """Compare interpreted kernels with torch; count elements that differ."""
    torch.manual_seed(0)
    wrong: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    # The interpreter cuts bfloat16 off where it stores it, so those rows go to float32.
    outputs = {
        torch.float16: torch.float16,
        torch.float32: torch.float32,
        torch.bfloat16: torch.float32,
    }
    for dtype, out_dtype in outputs.items():
        for top_k, hidden, small, have in (
            (1, 7, False, (True, True)),
            (3, 1030, False, (True, True)),
            (6, 64, True, (True, True)),
            (8, 33, False, (True, False)),
            (6, 2049, False, (False, True)),
            (16, 40, True, (True, True)),
        ):
            hot, cold, hot_index, cold_index, weights = case(
                5, top_k, hidden, dtype, small
            )
            ours = torch.full((5, hidden), float("nan"), dtype=out_dtype)
            expected = ours.clone()
            finalize._finalize_parts_kernel[(5, triton.cdiv(hidden, 1024))](
                hot,
                cold,
                hot_index,
                cold_index,
                weights,
                ours,
                hidden,
                hot.stride(0),
                cold.stride(0),
                weights.stride(0),
                ours.stride(0),
                TOP_K=top_k,
                HAS_HOT=have[0],
                HAS_COLD=have[1],
                BLOCK=1024,
                NATIVE=False,
            )
            finalize.finalize_parts_reference(
                hot if have[0] else None,
                cold if have[1] else None,
                hot_index if have[0] else None,
                cold_index if have[1] else None,
                weights,
                expected,
            )
            bits = BITS[out_dtype.itemsize]
            name = "finalize, tiny" if small else "finalize"
            wrong[name] += int((ours.view(bits) != expected.view(bits)).sum())
            seen[name] += int(expected.count_nonzero())
            wrong["NaN"] += int(ours.isnan().sum())
    for num_experts, dtype in ((12, torch.int32), (384, torch.int64)):
        limits = torch.iinfo(dtype)
        ids = torch.randint(-1, num_experts + 2, (90, 6)).to(dtype)
        ids[0, :4] = torch.tensor([limits.min, limits.max, num_experts, -2])
        ids = torch.cat((ids, ids), dim=1)[:, :6]
        row_map = torch.randperm(num_experts).to(torch.int32)
        ours = torch.empty(ids.shape, dtype=torch.int32)
        row_ids._row_ids_kernel[(triton.cdiv(ids.numel(), 256),)](
            ids,
            row_map,
            ours,
            ids.numel(),
            ids.stride(0),
            ids.stride(1),
            num_experts,
            TOP_K=6,
            BLOCK=256,
        )
        expected = row_ids.row_ids_reference(ids, row_map)
        wrong["row ids"] += int((ours != expected).sum())
        seen["row ids"] += int((expected >= 0).sum())
    return {"wrong": dict(wrong), "seen": dict(seen)}


def compile_finalize(capability: int) -> dict[str, int]:
    """Floating-point instructions of the compiled kernel, by name."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = finalize._finalize_parts_kernel
    constants = {"TOP_K": 6, "HAS_HOT": True, "HAS_COLD": True, "BLOCK": 1024}
    constants["NATIVE"] = True
    kinds = {"hot_ptr": "*bf16", "cold_ptr": "*bf16", "out_ptr": "*bf16"}
    kinds |= {"hot_index_ptr": "*i32", "cold_index_ptr": "*i32"}
    kinds |= {"weights_ptr": "*fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    arithmetic = re.findall(r"\b(?:fma|mul|add|sub)[.a-z]*\.f32\b", made.asm["ptx"])
    return dict(Counter(arithmetic))


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        result: dict = interpret()
    else:
        result = {name: compile_finalize(int(name)) for name in sys.argv[2:]}
    print("RESULT", json.dumps(result))
