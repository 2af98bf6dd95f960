# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which rows a batch needs, told on the GPU."""

import torch

from vllm.triton_utils import tl, triton

_BLOCK = 1024


# Nothing of a batch is specialized on: no step after warm-up may compile.
@triton.jit(
    do_not_specialize=["num_ids"], do_not_specialize_on_alignment=["topk_ids_ptr"]
)
def _flag_rows_kernel(
    topk_ids_ptr,  # (num_ids,) expert ids, -1 or out of range = none
    row_map_ptr,  # (num_experts,) int32 expert to row
    needed_ptr,  # (num_experts - first_row,) int32, written
    num_ids,
    num_experts,
    first_row,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    for start in range(0, num_experts - first_row, BLOCK):
        row = start + lane
        zeros = tl.zeros((BLOCK,), dtype=tl.int32)
        tl.store(needed_ptr + row, zeros, mask=row < num_experts - first_row)
    # One program: the zeros are written before any flag is.
    tl.debug_barrier()
    for start in range(0, num_ids, BLOCK):
        slot = start + lane
        expert = tl.load(topk_ids_ptr + slot, mask=slot < num_ids, other=-1)
        valid = (expert >= 0) & (expert < num_experts)
        row = tl.load(row_map_ptr + tl.where(valid, expert, 0), mask=valid, other=0)
        ones = tl.full((BLOCK,), 1, dtype=tl.int32)
        tl.store(needed_ptr + row - first_row, ones, mask=valid & (row >= first_row))


def flag_rows(
    topk_ids: torch.Tensor, row_map: torch.Tensor, first_row: int, needed: torch.Tensor
) -> None:
    """Flag the rows that some expert ids select.

    Args:
        topk_ids: `(M, top_k)` expert ids; -1 and ids out of range select none.
        row_map: `(E,)` int32, expert to row.
        first_row: Rows below are left out.
        needed: `(E - first_row,)` int32, written: 1 where a row is selected, else 0.

    """
    _flag_rows_kernel[(1,)](
        topk_ids,
        row_map,
        needed,
        topk_ids.numel(),
        len(row_map),
        first_row,
        BLOCK=_BLOCK,
    )
