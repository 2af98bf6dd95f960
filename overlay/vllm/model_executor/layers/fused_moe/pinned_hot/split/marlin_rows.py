# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Marlin experts on one tensor whose rows are in another order than the experts.

Marlin cuts the sum of a row at places that depend on all blocks of a call. So blocks
are cut and ordered by expert, as in the unsplit layer, and only then is each told its
row.
"""

import copy
from typing import Any

import torch

from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput


class MarlinRows:
    """`MarlinExperts` on weights in row order.

    Args:
        experts: The layer's kernel; its other expert tensors are in row order.
        row_map: `(E,)` int32, expert to row.

    """

    def __init__(self, experts: MarlinExperts, row_map: torch.Tensor):
        self.experts = copy.copy(experts)
        self.experts.row_map = row_map

    def __call__(self, **arguments: Any) -> UnfinalizedMoEOutput | None:
        return self.experts.apply(**arguments)
