# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton experts on split tensors: one call that takes the address of every row.

Tile shapes, blocks and their order are those of the unsplit layer, since the kernel
sees its sizes; only the pointer a block starts from differs.
"""

import copy
from typing import Any

import torch

from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput
from vllm.model_executor.layers.fused_moe.pinned_hot.split.rows import RowOrder

Parts = tuple[torch.Tensor, torch.Tensor]
"""A tensor's hot rows `(H, …)` and its cold ones `(E-H, …)`."""

UNIT_BYTES = 16
"""What a thread reads at once. Rows begin on such a boundary, so that the loads of a
kernel stay that wide."""


def row_offsets(parts: Parts, order: RowOrder) -> tuple[torch.Tensor, torch.Tensor]:
    """Tell a kernel where each expert's row begins.

    Args:
        parts: The two parts of a tensor.
        order: The layer's rows.

    Returns:
        A tensor of the unsplit shape `(E, …)` whose first row is the offsets' origin
        and whose stride over experts is 0, and the offset of each expert's row from
        that origin in units of `UNIT_BYTES`, `(E,)` int64.

    """
    base = next(part for part in parts if len(part))
    origin = base[:1].expand(order.num_rows, *base.shape[1:])
    offsets = torch.empty(order.num_rows, dtype=torch.int64, device="cpu")
    for part, experts in zip(parts, (order.hot, order.cold), strict=True):
        row_bytes = part.stride(0) * part.element_size()
        for row, expert in enumerate(experts):
            distance = part.data_ptr() + row * row_bytes - base.data_ptr()
            assert distance % UNIT_BYTES == 0
            offsets[expert] = distance // UNIT_BYTES
    return origin, offsets.to(base.device)


class TritonRows:
    """`TritonExperts` on two parts of each weight tensor.

    Args:
        experts: The layer's kernel.
        order: The layer's rows.
        w1: Parts of the gate and up projection.
        w2: Parts of the down projection.

    """

    def __init__(self, experts: TritonExperts, order: RowOrder, w1: Parts, w2: Parts):
        self.experts = copy.copy(experts)
        self.parts = w1, w2  # what the offsets point to
        self.w1, self.experts.w1_row_offsets = row_offsets(w1, order)
        self.w2, self.experts.w2_row_offsets = row_offsets(w2, order)

    def __call__(
        self, *, w1: torch.Tensor, w2: torch.Tensor, **arguments: Any
    ) -> UnfinalizedMoEOutput | None:
        return self.experts.apply(w1=self.w1, w2=self.w2, **arguments)
