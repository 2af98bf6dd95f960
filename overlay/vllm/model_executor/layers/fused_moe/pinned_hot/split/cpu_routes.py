# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CPU backend's experts on split tensors, in float32.

Each selection of an expert becomes a token of its own that selects one expert. The
kernel runs on both parts, a selection's result is taken from the part its expert lies
in, and the selections of a token are weighted and added as the kernel does: in their
order, each by one fused multiply-add. In bfloat16 the kernel keeps more bits of a
selection than a call returns, so there is nothing to add up.
"""

from typing import TYPE_CHECKING, Any

import torch

from vllm._custom_ops import cpu_fused_moe
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.pinned_hot.split.fma import (
    fused_multiply_add,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.row_ids import row_ids
from vllm.model_executor.layers.fused_moe.pinned_hot.split.rows import RowOrder
from vllm.model_executor.layers.fused_moe.pinned_hot.split.triton_rows import Parts

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


def why_not_cpu(layer: "RoutedExperts") -> str | None:
    """Why a layer cannot be served, or None."""
    if layer.params_dtype == torch.float32:
        return None
    return (
        "the CPU kernel is exact on split tensors in float32 and the model runs in "
        f"{str(layer.params_dtype).removeprefix('torch.')}. Use --expert-layout range "
        "or --dtype float32"
    )


class CpuRoutes:
    """`CPUUnquantizedExperts` on two parts of each weight tensor.

    Args:
        experts: The layer's kernel.
        order: The layer's rows.
        w1: Parts of the gate and up projection.
        w2: Parts of the down projection.

    """

    def __init__(
        self, experts: CPUUnquantizedExperts, order: RowOrder, w1: Parts, w2: Parts
    ):
        if experts._use_zentorch:
            raise ValueError(
                "ZenDNN's kernel was not compared on split tensors. Use "
                "--expert-layout range."
            )
        self.experts = experts
        self.row_map = order.row_map(torch.device("cpu"))
        biases = [experts.w1_bias, experts.w2_bias]
        self.parts = [
            (first, len(members), w1_part, w2_part)
            + tuple(None if b is None else b[list(members)] for b in biases)
            for first, members, w1_part, w2_part in zip(
                (0, order.num_hot), (order.hot, order.cold), w1, w2, strict=True
            )
            if members
        ]

    def __call__(
        self,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        apply_router_weight_on_input: bool,
        **arguments: Any,
    ) -> None:
        tokens, top_k = topk_ids.shape
        routes = hidden_states.repeat_interleave(top_k, dim=0)
        ones = torch.ones(len(routes), 1)
        rows = row_ids(topk_ids, self.row_map).view(-1, 1)
        found = torch.zeros_like(routes)
        for first, count, *tensors in self.parts:
            here = (rows >= first) & (rows < first + count)
            # The kernel does not check ids: a selection of the other part runs on the
            # first row, and what comes out is not taken.
            local = (rows - first).where(here, 0)
            result = torch.empty_like(routes)
            cpu_fused_moe(
                result,
                routes,
                *tensors,
                ones,
                local,
                activation.value,
                self.experts.isa,
            )
            found = torch.where(here, result, found)
        found = found.view(tokens, top_k, -1)
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        total = found[:, 0] * topk_weights[:, :1]
        for slot in range(1, top_k):
            weight = topk_weights[:, slot : slot + 1]
            total = fused_multiply_add(found[:, slot], weight, total)
        output.copy_(total)
