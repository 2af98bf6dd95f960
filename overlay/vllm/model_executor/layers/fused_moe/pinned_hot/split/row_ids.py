# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From the experts that a router selected to their rows."""

import torch

from vllm.triton_utils import tl, triton

_BLOCK = 256


# Nothing of a batch is specialized on: no step after warm-up may compile.
@triton.jit(
    do_not_specialize=["numel", "row_stride"],
    do_not_specialize_on_alignment=["ids_ptr", "out_ptr"],
)
def _row_ids_kernel(
    ids_ptr,
    row_map_ptr,
    out_ptr,
    numel,
    row_stride,
    column_stride,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    at = (index // TOP_K).to(tl.int64) * row_stride + (index % TOP_K) * column_stride
    expert = tl.load(ids_ptr + at, mask=inside, other=-1).to(tl.int64)
    # Ids out of range select nothing; they are not the nearest expert.
    valid = tl.where(expert < num_experts, expert, -1)
    row = tl.load(row_map_ptr + valid, mask=valid >= 0, other=-1)
    tl.store(out_ptr + index, row, mask=inside)


def row_ids_reference(topk_ids: torch.Tensor, row_map: torch.Tensor) -> torch.Tensor:
    """Map with torch's own operations; see `row_ids`."""
    valid = (topk_ids >= 0) & (topk_ids < row_map.shape[0])
    return torch.where(valid, row_map[topk_ids.where(valid, 0).long()], -1)


def row_ids(topk_ids: torch.Tensor, row_map: torch.Tensor) -> torch.Tensor:
    """Map selected experts to rows.

    Args:
        topk_ids: Expert ids, integer `(M, top_k)`. -1 and any other id outside
            0 … E-1 select nothing.
        row_map: Expert to row, int32 `(E,)`.

    Returns:
        Rows, int32 `(M, top_k)`, contiguous; -1 where nothing is selected.

    """
    if not topk_ids.is_cuda:
        return row_ids_reference(topk_ids, row_map)
    out = torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device)
    if numel := topk_ids.numel():
        _row_ids_kernel[(triton.cdiv(numel, _BLOCK),)](
            topk_ids,
            row_map,
            out,
            numel,
            topk_ids.stride(0),
            topk_ids.stride(1),
            row_map.shape[0],
            TOP_K=topk_ids.shape[1],
            BLOCK=_BLOCK,
        )
    return out
