# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which tensors of a MoE layer hold expert rows, per quantization method.

The list is closed: a method or a kernel nobody has compared with the resident layer
is refused by name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.model_executor.layers.fused_moe.pinned_hot.placement import RowTensor
from vllm.utils.math_utils import cdiv

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


_WEIGHTS = ("w13_weight", "w2_weight")
_PACKED = ("w13_weight_packed", "w2_weight_packed")
_QWEIGHTS = ("w13_qweight", "w2_qweight")


@dataclass(frozen=True)
class ExpertTensors:
    """Expert rows of a quantization method's layers.

    Attributes:
        kernels: Experts classes the method was shown to be exact with, in layout
            `range`.
        loaded: `(E, …)` parameters that the checkpoint's weights are read into.
        rows: `(E, …)` parameters that hold them after post-processing; their rows
            are placed page by page. Everything else of a layer (scales, zero
            points, biases) stays where post-processing put it.
        bits: Bits of a weight after post-processing, for methods that quantize
            while loading; None where the parameters are created as they stay.
        split: The same for layout `split`.
        zeroed: Whether stock clears the parameters before they are read, because
            a checkpoint may leave padding unread.

    """

    kernels: tuple[str, ...]
    loaded: tuple[str, ...] = _WEIGHTS
    rows: tuple[str, ...] = _WEIGHTS
    bits: int | None = None
    split: tuple[str, ...] = ()
    zeroed: bool = False


_TRITON = ("TritonExperts",)
_CUTLASS = ("TritonOrCutlassExperts",)
_MARLIN = ("MarlinExperts",)
_CPU = ("CPUUnquantizedExperts",)
_AMX = ("X86CPUUnquantizedExperts",)
_MXFP4 = ("TrtLlmMxfp4ExpertsModular",)
_NVFP4 = ("TrtLlmNvFp4ExpertsModular",)
_FP8 = ("TrtLlmFp8ExpertsModular",)

# A pair is listed once its layers were equal, bit for bit, to the resident ones: in
# tests/kernels/moe/test_pinned_hot_{cuda,provider}.py, for layout `split` in
# test_pinned_hot_split{,_cuda,_trtllm}.py beside them. docs/kernels.md says on what.
_BY_METHOD: dict[str, ExpertTensors] = {
    "UnquantizedFusedMoEMethod": ExpertTensors(
        _TRITON + _CPU + _AMX, split=_TRITON + _CPU
    ),
    # Quantized while loading.
    "Fp8PerTensorOnlineMoEMethod": ExpertTensors(_TRITON, bits=8, split=_TRITON),
    "Fp8PerBlockOnlineMoEMethod": ExpertTensors(_TRITON, bits=8, split=_TRITON),
    "Fp8PtpcOnlineMoEMethod": ExpertTensors(_CUTLASS, bits=8),
    "Int8OnlineMoEMethod": ExpertTensors(_TRITON, bits=8, split=_TRITON),
    "Mxfp8OnlineMoEMethod": ExpertTensors(_MARLIN, bits=8, split=_MARLIN),
    "Mxfp4OnlineMoEMethod": ExpertTensors(_MARLIN, bits=4, split=_MARLIN),
    # Quantized checkpoints.
    "Fp8MoEMethod": ExpertTensors(_TRITON, split=_TRITON + _FP8),
    "CompressedTensorsW8A8Fp8MoEMethod": ExpertTensors(_CUTLASS),
    "CompressedTensorsWNA16MoEMethod": ExpertTensors(
        _MARLIN, _PACKED, _PACKED, split=_MARLIN
    ),
    "CompressedTensorsW4A4Nvfp4MoEMethod": ExpertTensors(
        _MARLIN, _PACKED, split=_MARLIN + _NVFP4
    ),
    "AutoGPTQMoEMethod": ExpertTensors(_MARLIN, _QWEIGHTS, _QWEIGHTS, split=_MARLIN),
    "AutoAWQMoEMethod": ExpertTensors(_MARLIN, _QWEIGHTS, _QWEIGHTS, split=_MARLIN),
    "ModelOptFp8MoEMethod": ExpertTensors(_TRITON, split=_TRITON),
    "ModelOptMxFp8FusedMoE": ExpertTensors(_MARLIN, split=_MARLIN + _FP8),
    "ModelOptNvFp4FusedMoE": ExpertTensors(_MARLIN, split=_MARLIN + _NVFP4),
    "Mxfp4MoEMethod": ExpertTensors(_MARLIN, zeroed=True, split=_MARLIN + _MXFP4),
    "GptOssMxfp4MoEMethod": ExpertTensors(_MARLIN, zeroed=True, split=_MARLIN + _MXFP4),
}


def expert_tensors(layer: "RoutedExperts") -> ExpertTensors | None:
    """The layer's expert tensors, or None for an unknown quantization method."""
    return _BY_METHOD.get(type(layer.quant_method).__name__)


def why_not_method(layer: "RoutedExperts") -> str | None:
    """Why the rows of a layer of this kind are unknown, or None."""
    if fused := layer.expert_map_manager.num_fused_shared_experts:
        return (
            f"{fused} shared experts are fused into its tensors and an expert map "
            "ranks routed experts only"
        )
    if expert_tensors(layer) is None:
        return (
            f"quantization method {type(layer.quant_method).__name__} has not been "
            f"shown to be exact with re-homed weights (shown: {', '.join(_BY_METHOD)})"
        )
    return None


def why_not_kernel(layer: "RoutedExperts", shown: Sequence[str]) -> str | None:
    """Why a layout does not serve the layer's kernel, or None.

    Args:
        layer: The layer.
        shown: Experts classes the layout was shown to be exact with, for the
            layer's quantization method.

    """
    if (kernel := kernel_name(layer)) not in shown:
        return (
            f"{type(layer.quant_method).__name__} on {kernel} has not been shown to be "
            f"exact with re-homed weights (shown: {', '.join(shown) or 'none'}; "
            "--moe-backend chooses)"
        )
    return None


def why_not_rows(layer: "RoutedExperts", loaded: bool) -> str | None:
    """Why the layer's tensors cannot be placed row by row, or None.

    Args:
        layer: A layer of a known quantization method.
        loaded: Whether its weights are there and post-processed.

    """
    names = expert_tensors(layer)
    assert names is not None
    wanted = names.rows if loaded else names.loaded
    present = dict(layer.named_parameters())
    for name in wanted:
        if name not in present:
            return f"it has no parameter {name}"
        if reason := _why_not_row_tensor(present[name], layer.local_num_experts):
            return f"parameter {name} {reason}"
    if not loaded:
        return None
    rows = [present[name] for name in names.rows]
    storages = {_storage(row) for row in rows}
    for where, tensor in reachable_tensors(layer):
        if _storage(tensor) in storages and not any(tensor is row for row in rows):
            return (
                f"{where} {tuple(tensor.shape)} shares memory with its expert rows and "
                "would go on using the memory they leave"
            )
    return None


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def reachable_tensors(layer: "RoutedExperts") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that the layer's forward pass may read, with where they hang."""
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    config = getattr(layer.quant_method, "moe_quant_config", None)
    owners = [layer, experts, config]
    if config is not None:
        owners += [x for x in vars(config).values() if hasattr(x, "__dict__")]
    for owner in owners:
        if owner is None or isinstance(owner, torch.Tensor):
            continue
        values = dict(vars(owner))
        if isinstance(owner, torch.nn.Module):
            values |= owner._parameters | owner._buffers
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                yield f"{type(owner).__name__}.{name}", value


def why_not_scales(layer: "RoutedExperts") -> str | None:
    """Why a layer's scales cannot be right, or None.

    A checkpoint that lacks an expert's scale leaves what the method put there, and
    nothing shows until a token picks that expert.
    """
    for name, parameter in layer.named_parameters():
        if (
            "scale" not in name
            or not parameter.is_floating_point()
            or parameter.dim() == 0
            or parameter.shape[0] != layer.local_num_experts
        ):
            continue
        scales = parameter.detach().float().reshape(layer.local_num_experts, -1)
        for what, wrong in (
            ("not finite", ~scales.isfinite().all(1)),
            ("all zero", (scales == 0).all(1)),
        ):
            if experts := wrong.nonzero().flatten().tolist():
                return (
                    f"{name} of experts {experts} is {what}: the checkpoint lacks it. "
                    "Use a complete checkpoint"
                )
    return None


def kernel_name(layer: "RoutedExperts") -> str:
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
