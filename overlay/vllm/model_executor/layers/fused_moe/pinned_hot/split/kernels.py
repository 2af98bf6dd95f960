# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How each kernel is run on split tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm.model_executor.layers.fused_moe.pinned_hot.layout import RunExperts
from vllm.model_executor.layers.fused_moe.pinned_hot.split.cpu_routes import (
    CpuRoutes,
    why_not_cpu,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.marlin_rows import (
    MarlinRows,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.rows import RowOrder
from vllm.model_executor.layers.fused_moe.pinned_hot.split.staged import (
    Staged,
    Staging,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.triton_rows import (
    UNIT_BYTES,
    TritonRows,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.trtllm_gen import (
    TRTLLM_KERNELS,
    TrtLlmRows,
    TrtLlmSplit,
    why_not_trtllm,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.tensors import (
    expert_tensors,
    kernel_name,
    row_tensor,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


def why_not_units(layer: "RoutedExperts") -> str | None:
    """Why a layer's rows cannot each begin where a GPU reads at full width, or None."""
    names = expert_tensors(layer)
    assert names is not None
    for name in names.loaded:
        row_bytes = row_tensor(getattr(layer, name), names.bits).row_bytes
        if row_bytes % UNIT_BYTES:
            return (
                f"rows of {name} have {row_bytes} bytes, no multiple of {UNIT_BYTES}. "
                "Use --expert-layout range"
            )
    return None


@dataclass(frozen=True)
class SplitKernel:
    """The modes of one experts class.

    Attributes:
        two_calls: Runs it on two parts of each weight tensor, made from the experts
            object, the row order, and the parts of the first and the second weight;
            None if that cannot be exact.
        staged: Runs it on one tensor behind whose hot rows the cold ones are staged,
            made from the experts object, the row order, the staging, and both weights.
        row_order: Modes that want the layer's other expert tensors in row order.
        why_not: Why a layer of the kernel cannot be served, before it is loaded.

    """

    two_calls: Callable[..., RunExperts] | None = None
    staged: Callable[..., RunExperts] | None = None
    row_order: tuple[str, ...] = ()
    why_not: Callable[["RoutedExperts"], str | None] = why_not_units

    @property
    def modes(self) -> tuple[str, ...]:
        """Values of `--expert-split-mode` that serve it, the better one first."""
        return tuple(mode for mode in ("two_calls", "staged") if getattr(self, mode))


def _staged_triton(
    experts: Any, order: RowOrder, staging: Staging, w1: torch.Tensor, w2: torch.Tensor
) -> RunExperts:
    hot = order.num_hot
    parts = [(weight[:hot], weight[hot:]) for weight in (w1, w2)]
    return Staged(staging, TritonRows(experts, order, *parts))


def _staged_marlin(
    experts: Any, order: RowOrder, staging: Staging, w1: torch.Tensor, w2: torch.Tensor
) -> RunExperts:
    return Staged(staging, MarlinRows(experts, staging.row_map))


def _staged_trtllm(
    experts: Any, order: RowOrder, staging: Staging, w1: torch.Tensor, w2: torch.Tensor
) -> RunExperts:
    return Staged(staging, TrtLlmRows(experts, staging.row_map))


_TRTLLM = SplitKernel(
    two_calls=TrtLlmSplit,
    staged=_staged_trtllm,
    row_order=("two_calls", "staged"),
    why_not=lambda layer: why_not_trtllm(layer) or why_not_units(layer),
)

_BY_KERNEL: dict[str, SplitKernel] = {
    "TritonExperts": SplitKernel(two_calls=TritonRows, staged=_staged_triton),
    "MarlinExperts": SplitKernel(staged=_staged_marlin, row_order=("staged",)),
    "CPUUnquantizedExperts": SplitKernel(two_calls=CpuRoutes, why_not=why_not_cpu),
    **dict.fromkeys(TRTLLM_KERNELS, _TRTLLM),
}


def split_kernel(layer: "RoutedExperts") -> SplitKernel:
    """How the kernel of a layer is run; one that the layout serves."""
    return _BY_KERNEL[kernel_name(layer)]


def choose_mode(layer: "RoutedExperts", asked: str) -> str:
    """Choose how a layer's kernel gets at cold rows.

    Args:
        layer: A layer whose kernel is served by the layout.
        asked: `--expert-split-mode`.

    """
    return split_kernel(layer).modes[0] if asked == "auto" else asked


def why_not_split(layer: "RoutedExperts", asked: str) -> str | None:
    """Why the kernel of a layer cannot be run on split tensors, or None."""
    kernel = split_kernel(layer)
    if asked != "auto" and asked not in kernel.modes:
        return (
            f"--expert-split-mode {asked} has not been shown to be exact with "
            f"{kernel_name(layer)}. Use {kernel.modes[0]} or auto"
        )
    return kernel.why_not(layer)
