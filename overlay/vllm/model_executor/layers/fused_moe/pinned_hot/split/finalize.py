# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sum the top-k rows of a layer whose GEMM2 rows lie in two buffers.

The sum is FlashInfer's: slots in order 0 … top_k - 1, one fp32 accumulator, a fused
multiply-add per slot that flushes subnormals (FlashInfer is built with
`-use_fast_math`), one rounding to the output's dtype. Which buffer a slot's row lies in
does not change it. Adding two finalized partial sums does.
"""

from collections.abc import Sequence

import torch

from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput
from vllm.model_executor.layers.fused_moe.pinned_hot.split.fma import (
    fused_multiply_add,
)
from vllm.triton_utils import tl, triton

_BLOCK = 1024
_SMALLEST_NORMAL = 2.0**-126


@triton.jit
def _fma_ftz(a, b, c, NATIVE: tl.constexpr):
    """Return a * b + c in fp32, rounded once; subnormals count as zero."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "fma.rn.ftz.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            [a, b, c],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        a = tl.where(tl.abs(a) < 1.1754943508222875e-38, a * 0.0, a)
        b = tl.where(tl.abs(b) < 1.1754943508222875e-38, b * 0.0, b)
        c = tl.fma(tl.broadcast_to(a, b.shape), b, c)
        return tl.where(tl.abs(c) < 1.1754943508222875e-38, c * 0.0, c)


# Read value by value, so alignment is no gain: no step after warm-up may compile.
@triton.jit(
    do_not_specialize_on_alignment=["hot_index_ptr", "cold_index_ptr", "weights_ptr"]
)
def _finalize_parts_kernel(
    hot_ptr,
    cold_ptr,
    hot_index_ptr,
    cold_index_ptr,
    weights_ptr,
    out_ptr,
    hidden,
    hot_stride,
    cold_stride,
    weights_stride,
    out_stride,
    TOP_K: tl.constexpr,
    HAS_HOT: tl.constexpr,
    HAS_COLD: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + token * weights_stride + k).to(tl.float32)
        value = tl.zeros((BLOCK,), tl.float32)
        found = token < 0
        # No column of a row that is not there lies below the bound: it is not read.
        if HAS_HOT:
            row = tl.load(hot_index_ptr + token * TOP_K + k).to(tl.int64)
            found = row >= 0
            bound = tl.where(found, hidden, 0)
            at = hot_ptr + row * hot_stride + column
            value = tl.load(at, mask=column < bound, other=0.0).to(tl.float32)
        if HAS_COLD:
            row = tl.load(cold_index_ptr + token * TOP_K + k).to(tl.int64)
            bound = tl.where(row >= 0, hidden, 0)
            at = cold_ptr + row * cold_stride + column
            cold = tl.load(at, mask=column < bound, other=0.0).to(tl.float32)
            value = tl.where(row >= 0, cold, value)
            found = found | (row >= 0)
        total = tl.where(found, _fma_ftz(weight, value, total, NATIVE), total)
    tl.store(
        out_ptr + token * out_stride + column,
        total.to(out_ptr.dtype.element_ty),
        mask=column < hidden,
    )


def _flush(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < _SMALLEST_NORMAL, x * 0.0, x)


def _fma_ftz_reference(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    """Return a * b + c of fp32 tensors as `_fma_ftz` does."""
    return _flush(fused_multiply_add(_flush(a), _flush(b), c))


def finalize_parts_reference(
    hot: torch.Tensor | None,
    cold: torch.Tensor | None,
    hot_index: torch.Tensor | None,
    cold_index: torch.Tensor | None,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Sum with torch's own operations; see `finalize_parts`."""
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for k in range(weights.shape[1]):
        for rows, index in ((hot, hot_index), (cold, cold_index)):
            if rows is None or index is None or not rows.shape[0]:
                continue
            found = (index[:, k] >= 0).unsqueeze(1)
            value = rows[index[:, k].clamp(min=0).long(), : out.shape[1]].float()
            weight = weights[:, k : k + 1].float().expand_as(value)
            total = torch.where(found, _fma_ftz_reference(weight, value, total), total)
    out.copy_(total)


def finalize_parts(
    hot: torch.Tensor | None,
    cold: torch.Tensor | None,
    hot_index: torch.Tensor | None,
    cold_index: torch.Tensor | None,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the weighted sum of each token's rows.

    A slot without a row in either part adds nothing; a token without any gives +0.
    Rows that no slot names are not read. The launch is ordered by the current stream.

    Args:
        hot: `(P_hot, K_padded)` rows of GEMM2, rows contiguous; None without that part.
        cold: `(P_cold, K_padded)`, likewise.
        hot_index: int32 `(M, top_k)`, row of `hot` for each slot, or -1; contiguous.
        cold_index: int32 `(M, top_k)`, likewise. A slot has at most one row.
        weights: Routing weights `(M, top_k)`, contiguous within a row.
        out: `(M, K)` with K ≤ K_padded, rows contiguous. Overwritten.

    """
    if not out.is_cuda:
        finalize_parts_reference(hot, cold, hot_index, cold_index, weights, out)
        return
    num_tokens, hidden = out.shape
    if num_tokens == 0:
        return
    has_hot, has_cold = hot is not None, cold is not None
    _finalize_parts_kernel[(num_tokens, triton.cdiv(hidden, _BLOCK))](
        hot if has_hot else out,
        cold if has_cold else out,
        hot_index if has_hot else weights,
        cold_index if has_cold else weights,
        weights,
        out,
        hidden,
        hot.stride(0) if hot is not None else 0,
        cold.stride(0) if cold is not None else 0,
        weights.stride(0),
        out.stride(0),
        TOP_K=weights.shape[1],
        HAS_HOT=has_hot,
        HAS_COLD=has_cold,
        BLOCK=_BLOCK,
        NATIVE=True,
    )


def merge_parts(
    parts: Sequence[UnfinalizedMoEOutput], weights: torch.Tensor
) -> UnfinalizedMoEOutput:
    """Join the parts' rows in one output that a consumer finalizes.

    Args:
        parts: One or two unfinalized outputs over the same slots, no slot having a row
            in both.
        weights: The caller's routing weights `(M, top_k)`. Those in `parts` are not
            used: FlashInfer may return memory that it never wrote.

    Returns:
        Rows `(P_0 + P_1, K)`, and each slot's row in them or -1.

    """
    rows = parts[0].gemm2_permuted
    index = parts[0].expanded_idx_to_permuted_idx
    for part in parts[1:]:
        other = part.expanded_idx_to_permuted_idx
        offset = rows.shape[0]
        index = torch.where(index >= 0, index, -1)
        index = torch.where(other >= 0, other + offset, index)
        rows = torch.cat((rows, part.gemm2_permuted))
    return UnfinalizedMoEOutput(
        gemm2_permuted=rows,
        expert_weights=weights.contiguous(),
        expanded_idx_to_permuted_idx=index,
    )
