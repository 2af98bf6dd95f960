# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which tensors of a MoE layer hold expert rows, per quantization method.

The list is closed: a tensor nobody has named here might be indexed by expert,
and re-homing a layer without it would serve wrong weights.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.model_executor.layers.fused_moe.pinned_hot.placement import RowTensor
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


@dataclass(frozen=True)
class ExpertTensorNames:
    """Expert-indexed parameters of a quantization method's layers.

    Attributes:
        rows: `(E, …)` weights whose rows are placed page by page.
        small: `(E, …)` tensors too small to be worth placing; they stay where
            they were loaded.

    """

    rows: tuple[str, ...]
    small: tuple[str, ...] = ()


_BY_METHOD: dict[type, ExpertTensorNames] = {
    UnquantizedFusedMoEMethod: ExpertTensorNames(
        rows=("w13_weight", "w2_weight"), small=("w13_bias", "w2_bias")
    ),
}


def expert_tensor_names(layer: "RoutedExperts") -> ExpertTensorNames | None:
    """The layer's expert tensors, or None for an unknown quantization method."""
    return _BY_METHOD.get(type(layer.quant_method))


def why_not_rows(layer: "RoutedExperts") -> str | None:
    """Why the layer's tensors cannot be placed row by row, or None."""
    if fused := layer.expert_map_manager.num_fused_shared_experts:
        return (
            f"{fused} shared experts are fused into its tensors and an expert map "
            "ranks routed experts only"
        )
    names = expert_tensor_names(layer)
    if names is None:
        known = ", ".join(sorted(cls.__name__ for cls in _BY_METHOD))
        return (
            f"quantization method {type(layer.quant_method).__name__} has not been "
            f"shown to be exact with re-homed weights (shown: {known})"
        )
    present = dict(layer.named_parameters())
    for name in names.rows:
        if name not in present:
            return f"it has no parameter {name}"
        if reason := _why_not_row_tensor(present[name], layer.local_num_experts):
            return f"parameter {name} {reason}"
    for name, parameter in present.items():
        if name not in (*names.rows, *names.small) and parameter.dim() > 0:
            return (
                f"parameter {name} {tuple(parameter.shape)} is not known to be "
                "indexed by expert or not"
            )
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    for owner in (layer, getattr(kernel, "fused_experts", None)):
        for name, value in vars(owner).items() if owner is not None else ():
            if (
                isinstance(value, torch.Tensor)
                and value.dim() > 0
                and value.shape[0] == layer.local_num_experts
            ):
                return (
                    f"{type(owner).__name__}.{name} {tuple(value.shape)} may be "
                    "indexed by expert and is not a parameter"
                )
    return None


def _why_not_row_tensor(tensor: torch.Tensor, num_rows: int) -> str | None:
    if tensor.dim() < 2 or tensor.shape[0] != num_rows:
        return f"has shape {tuple(tensor.shape)}, not ({num_rows}, …)"
    if not tensor.is_contiguous():
        return f"has strides {tensor.stride()}: its rows are not contiguous"
    return None


def row_tensor(tensor: torch.Tensor) -> RowTensor:
    """Geometry of a contiguous `(E, …)` tensor.

    Raises:
        ValueError: Its rows are not runs of bytes one after the other.

    """
    if reason := _why_not_row_tensor(tensor, tensor.shape[0] if tensor.dim() else 0):
        raise ValueError(f"expert tensor {reason}")
    row_bytes = tensor.numel() // tensor.shape[0] * tensor.element_size()
    return RowTensor(num_rows=tensor.shape[0], row_bytes=row_bytes)
