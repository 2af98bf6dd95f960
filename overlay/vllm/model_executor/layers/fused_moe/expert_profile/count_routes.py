# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Count selected experts on the device, apart by the phase of their row."""

import torch

from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import direct_register_custom_op

NOT_COUNTED, PREFILL, DECODE = 0, 1, 2
"""Phases of a row: of padding and dummy batches, of prompt tokens, of others."""

_BLOCK = 256

if current_platform.is_cuda_alike():
    # Nothing of a batch is specialized on: no step after warm-up may compile.
    @triton.jit(
        do_not_specialize=["numel", "num_rows", "row_stride"],
        do_not_specialize_on_alignment=["ids_ptr"],
    )
    def _count_routes_kernel(
        ids_ptr,
        phases_ptr,
        counts_ptr,
        numel,
        num_rows,
        row_stride,
        column_stride,
        num_experts,
        TOP_K: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        row = index // TOP_K
        phase = tl.load(
            phases_ptr + row, mask=(index < numel) & (row < num_rows), other=0
        ).to(tl.int64)
        real = phase > 0
        at = row.to(tl.int64) * row_stride + (index % TOP_K) * column_stride
        expert = tl.load(ids_ptr + at, mask=real, other=0).to(tl.int64)
        real = real & (expert >= 0) & (expert < num_experts)
        tl.atomic_add(
            counts_ptr + (phase - 1) * num_experts + expert,
            tl.full((BLOCK,), 1, tl.int64),
            mask=real,
            sem="relaxed",
        )

    def _count_on_device(
        topk_ids: torch.Tensor, phases: torch.Tensor, counts: torch.Tensor
    ) -> None:
        numel = topk_ids.numel()
        if numel == 0:
            return
        _count_routes_kernel[(triton.cdiv(numel, _BLOCK),)](
            topk_ids,
            phases,
            counts,
            numel,
            phases.shape[0],
            topk_ids.stride(0),
            topk_ids.stride(1),
            counts.shape[1],
            TOP_K=topk_ids.shape[1],
            BLOCK=_BLOCK,
        )


def count_routes_reference(
    topk_ids: torch.Tensor, phases: torch.Tensor, counts: torch.Tensor
) -> None:
    """Count with torch's own operations; see `count_routes`."""
    num_experts = counts.shape[1]
    ids = topk_ids[: phases.shape[0]].to(torch.int64)
    rows = phases[: ids.shape[0], None].to(torch.int64)
    real = (rows > NOT_COUNTED) & (ids >= 0) & (ids < num_experts)
    nowhere = counts.numel()
    bins = torch.where(real, (rows - PREFILL) * num_experts + ids, nowhere)
    counted = torch.bincount(bins.flatten(), minlength=nowhere + 1)
    counts += counted[:nowhere].view_as(counts)


def count_routes(
    topk_ids: torch.Tensor, phases: torch.Tensor, counts: torch.Tensor
) -> None:
    """Add a batch's selections to the counters.

    Does not wait for the device and can be captured in a graph.

    Args:
        topk_ids: Selected experts by logical id, integer `(num_rows, top_k)`. Ids
            outside 0 … num_experts - 1 (-1 for padding, fused shared experts) are not
            counted, nor are rows beyond `phases`.
        phases: Phase of each row, int8 `(max_rows,)`.
        counts: Counters, int64 `(2, num_experts)`: prefill, decode. Added to.

    """
    if topk_ids.is_cuda:
        _count_on_device(topk_ids, phases, counts)
    else:
        count_routes_reference(topk_ids, phases, counts)


# CPU graphs trace through the MoE layer, and a counter must stay out of them: as an
# operation on the layer's name it is a node that no pass may drop or fold.
def _count_layer_routes(topk_ids: torch.Tensor, layer_name: str) -> None:
    layer = get_forward_context().no_compile_layers[layer_name]
    layer.route_counter.count(topk_ids)


def _count_layer_routes_fake(topk_ids: torch.Tensor, layer_name: str) -> None:
    return None


direct_register_custom_op(
    op_name="count_layer_routes",
    op_func=_count_layer_routes,
    mutates_args=["topk_ids"],
    fake_impl=_count_layer_routes_fake,
)
