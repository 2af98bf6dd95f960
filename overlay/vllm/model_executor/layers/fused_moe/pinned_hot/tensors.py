# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which tensors of a MoE layer hold expert rows, per quantization method.

The list is closed: a tensor nobody has named here may be an alias of the rows, and
what still reads the old storage would not see the re-homed one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.model_executor.layers.fused_moe.pinned_hot.placement import RowTensor
from vllm.utils.math_utils import cdiv

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


@dataclass(frozen=True)
class ExpertTensors:
    """Expert-indexed parameters of a quantization method's layers.

    Attributes:
        small: `(E, …)` tensors that stay where they were loaded: scales and biases.
        kernels: Experts classes the method was shown to be exact with.
        bits: Bits of a weight after post-processing, for methods that quantize
            while loading; None where the parameters are created as they stay.
        rows: `(E, …)` weights whose rows are placed page by page.

    """

    small: tuple[str, ...]
    kernels: tuple[str, ...]
    bits: int | None = None
    rows: tuple[str, ...] = ("w13_weight", "w2_weight")


_BIASES = ("w13_bias", "w2_bias", "e_score_correction_bias")
_SCALES = (*_BIASES, "w13_weight_scale", "w2_weight_scale")
_BLOCK_SCALES = (*_BIASES, "w13_weight_scale_inv", "w2_weight_scale_inv")
_INT8_SCALES = (*_BIASES, "w13_scale", "w2_scale")
_TRITON = ("TritonExperts",)
_CPU = ("CPUUnquantizedExperts", "X86CPUUnquantizedExperts")

# A pair is listed once its layers were equal, bit for bit, to the resident ones
# (tests/kernels/moe/test_pinned_hot_cuda.py and test_pinned_hot_provider.py).
_BY_METHOD: dict[str, ExpertTensors] = {
    "UnquantizedFusedMoEMethod": ExpertTensors(_BIASES, _TRITON + _CPU),
    "Fp8PerTensorOnlineMoEMethod": ExpertTensors(_SCALES, _TRITON, bits=8),
    "Fp8PerBlockOnlineMoEMethod": ExpertTensors(_BLOCK_SCALES, _TRITON, bits=8),
    "Fp8PtpcOnlineMoEMethod": ExpertTensors(
        _SCALES, ("TritonOrCutlassExperts",), bits=8
    ),
    "Int8OnlineMoEMethod": ExpertTensors(_INT8_SCALES, _TRITON, bits=8),
}


def expert_tensors(layer: "RoutedExperts") -> ExpertTensors | None:
    """The layer's expert tensors, or None for an unknown quantization method."""
    return _BY_METHOD.get(type(layer.quant_method).__name__)


def why_not_rows(layer: "RoutedExperts") -> str | None:
    """Why the layer's tensors cannot be placed row by row, or None."""
    if fused := layer.expert_map_manager.num_fused_shared_experts:
        return (
            f"{fused} shared experts are fused into its tensors and an expert map "
            "ranks routed experts only"
        )
    names = expert_tensors(layer)
    if names is None:
        return (
            f"quantization method {type(layer.quant_method).__name__} has not been "
            f"shown to be exact with re-homed weights (shown: {', '.join(_BY_METHOD)})"
        )
    if (kernel := _kernel_name(layer)) not in names.kernels:
        return (
            f"{type(layer.quant_method).__name__} on {kernel} has not been shown to be "
            f"exact with re-homed weights (shown: {', '.join(names.kernels)})"
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


def _kernel_name(layer: "RoutedExperts") -> str:
    """Name of the layer's experts class, chosen before weights are loaded."""
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    if kernel is not None:
        return type(kernel.fused_experts).__name__
    chosen = getattr(layer.quant_method, "experts_cls", None)
    return "no modular kernel" if chosen is None else chosen.__name__


def _why_not_row_tensor(tensor: torch.Tensor, num_rows: int) -> str | None:
    if tensor.dim() < 2 or tensor.shape[0] != num_rows:
        return f"has shape {tuple(tensor.shape)}, not ({num_rows}, …)"
    if not tensor.is_contiguous():
        return f"has strides {tensor.stride()}: its rows are not contiguous"
    return None


def row_tensor(tensor: torch.Tensor, bits: int | None = None) -> RowTensor:
    """Geometry of a contiguous `(E, …)` tensor.

    Args:
        tensor: The tensor; it may be on the meta device.
        bits: Bits of an element if not those of the tensor's dtype.

    Raises:
        ValueError: Its rows are not runs of bytes one after the other.

    """
    if reason := _why_not_row_tensor(tensor, tensor.shape[0] if tensor.dim() else 0):
        raise ValueError(f"expert tensor {reason}")
    row_bits = tensor.numel() // tensor.shape[0] * (bits or tensor.element_size() * 8)
    row_bytes = cdiv(row_bits, 8)
    return RowTensor(num_rows=tensor.shape[0], row_bytes=row_bytes)
