# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which tensors of a layer, besides its big rows, belong to single experts.

Scales, zero points, biases and the like follow their expert's row. They hang on the
layer, on its quantization config and on the experts object, often the same memory under
several names: each memory is moved once. What cannot be placed for certain is refused.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm.model_executor.layers.fused_moe.pinned_hot.tensors import reachable_tensors

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

_RANGE = "Use --expert-layout range"

# Read before ids become rows, by expert id.
_OF_ROUTING = frozenset(
    (
        "e_score_correction_bias",
        "hash_indices_table",
        "routing_sink",
        "_expert_map",
        "expert_mask",
        "expert_global_to_physical",
        "expert_physical_to_global",
        "expert_local_to_global",
    )
)


@dataclass(frozen=True)
class ExpertTensor:
    """A tensor with one row per expert.

    Attributes:
        where: Object and attribute that it was first found at.
        tensor: `(E, …)`.
        bytes: The same memory as `(E, row_bytes)` uint8.

    """

    where: str
    tensor: torch.Tensor
    bytes: torch.Tensor

    @property
    def span(self) -> tuple[int, int]:
        """Addresses of its first byte and of the byte after its last."""
        start = self.bytes.data_ptr()
        return start, start + self.bytes.numel()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the byte after its last."""
    last = sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _is_shared_row(tensor: torch.Tensor) -> bool:
    """Whether all experts have the same row in memory (an expanded tensor)."""
    return tensor.stride(0) == 0 and tensor.shape[0] > 1


def _row_bytes(where: str, tensor: torch.Tensor) -> torch.Tensor:
    """View an `(E, …)` tensor as `(E, row_bytes)` uint8.

    A row's elements may be in any order in memory; rows follow one another.

    Raises:
        ValueError: A row's elements are not one run of memory.

    """
    row = tensor[0]
    run = 1 + sum(
        (size - 1) * stride
        for size, stride in zip(row.shape, row.stride(), strict=True)
    )
    if run != row.numel() or tensor.stride(0) != run:
        raise ValueError(
            f"{where} {tuple(tensor.shape)} has strides {tensor.stride()}: an expert's "
            "memory is not a run of its own, so it cannot follow the expert's row. "
            f"{_RANGE}"
        )
    flat = tensor.detach().as_strided((tensor.shape[0], run), (run, 1))
    return flat.view(torch.uint8)


def _why_not_placeable(
    where: str, tensor: torch.Tensor, num_experts: int
) -> str | None:
    if num_experts in tensor.shape[1:]:
        return (
            f"{where} {tuple(tensor.shape)} has {num_experts} experts in a dimension "
            f"other than the first, or another size that equals it. {_RANGE}"
        )
    return None


def expert_indexed(
    layer: "RoutedExperts", rows: Mapping[str, torch.nn.Parameter]
) -> list[ExpertTensor]:
    """Find the tensors of a layer that have one row per expert.

    Args:
        layer: A layer whose weights are loaded and post-processed.
        rows: Its big `(E, …)` parameters by name; they are not listed.

    Returns:
        One entry for each memory, in the order found. Expanded tensors, whose experts
        share one row, are not among them: they are right in any order.

    Raises:
        ValueError: A tensor cannot be placed for certain.

    """
    num_experts = layer.local_num_experts
    big = [_span(parameter) for parameter in rows.values()]
    found: list[ExpertTensor] = []
    _refuse_hidden_tensors(layer)
    for where, tensor in reachable_tensors(layer):
        name = where.rpartition(".")[2]
        if name in _OF_ROUTING or not tensor.numel() or tensor.dim() == 0:
            continue
        span = _span(tensor)
        if span in big:
            continue
        if any(_overlap(span, other) for other in big):
            raise ValueError(
                f"{where} {tuple(tensor.shape)} shares memory with the layer's expert "
                f"rows. {_RANGE}"
            )
        if tensor.shape[0] != num_experts:
            if reason := _why_not_placeable(where, tensor, num_experts):
                raise ValueError(reason)
            continue
        if _is_shared_row(tensor):
            continue
        made = ExpertTensor(where, tensor, _row_bytes(where, tensor))
        same = [other for other in found if _overlap(made.span, other.span)]
        if not same:
            found.append(made)
        for other in same:
            if other.bytes.shape != made.bytes.shape or other.span != made.span:
                raise ValueError(
                    f"{where} {tuple(tensor.shape)} shares part of its memory with "
                    f"{other.where} {tuple(other.tensor.shape)}. {_RANGE}"
                )
    return found


def _overlap(left: tuple[int, int], right: tuple[int, int]) -> bool:
    return left[0] < right[1] and right[0] < left[1]


def _refuse_hidden_tensors(layer: "RoutedExperts") -> None:
    """Refuse per-expert values that are no plain attribute of a known object.

    Raises:
        ValueError: There is one.

    """
    num_experts = layer.local_num_experts
    config = layer.quant_method.moe_quant_config
    for name, part in _descriptors(config):
        for field in fields(part):
            value = getattr(part, field.name)
            if field.name in ("scale", "alpha_or_gscale", "zp", "bias") and not (
                value is None or isinstance(value, torch.Tensor)
            ):
                raise ValueError(
                    f"{type(config).__name__}.{name}.{field.name} is a "
                    f"{type(value).__name__}, which may hold values of single experts. "
                    f"{_RANGE}"
                )
    experts = layer.quant_method.moe_kernel.fused_experts
    for name, value in vars(experts).items():
        members: Iterable[Any] = ()
        if isinstance(value, Mapping):
            members = value.values()
        elif isinstance(value, Sequence) and not isinstance(value, str):
            members = value
        if any(
            isinstance(member, torch.Tensor) and num_experts in member.shape
            for member in members
        ):
            raise ValueError(
                f"{type(experts).__name__}.{name} is a {type(value).__name__} of "
                f"tensors that may belong to single experts. {_RANGE}"
            )


def _descriptors(config: "FusedMoEQuantConfig | None") -> list[tuple[str, Any]]:
    """The quantization descriptors of a config, by attribute."""
    if config is None:
        return []
    return [
        (name, value)
        for name, value in vars(config).items()
        if is_dataclass(value) and hasattr(value, "alpha_or_gscale")
    ]


def permute_expert_tensors(
    layer: "RoutedExperts",
    order: Sequence[int],
    rows: Mapping[str, torch.nn.Parameter],
) -> None:
    """Bring the small tensors of a layer into row order, in place.

    Call once for a layer whose weights are loaded and post-processed.

    Args:
        layer: The layer.
        order: Row to expert, a permutation of 0 … E-1.
        rows: Its big `(E, …)` parameters by name; left alone.

    Raises:
        ValueError: A tensor cannot be placed for certain; nothing was moved.

    """
    if sorted(order) != list(range(layer.local_num_experts)):
        raise ValueError(
            f"{layer.layer_name}: the order of its rows is no permutation of its "
            f"{layer.local_num_experts} experts"
        )
    for entry in expert_indexed(layer, rows):
        index = torch.tensor(order, dtype=torch.long, device=entry.bytes.device)
        entry.bytes.copy_(entry.bytes.index_select(0, index))


def slice_experts(
    experts: "FusedMoEExperts", start: int, stop: int
) -> "FusedMoEExperts":
    """Copy an experts object for some of its rows.

    The copy reads the same memory. It is not built anew: building and post-processing
    again would scale some tensors twice.

    Args:
        experts: The experts object of a whole layer, its tensors in row order.
        start: First row.
        stop: Row after the last.

    Returns:
        A copy whose tensors of E rows, and those of its quantization config, have the
        rows `start … stop - 1`, and whose `local_num_experts`, if any, says so.

    """
    num_experts = experts.moe_config.num_local_experts

    def part_of(value: Any) -> Any:
        if (
            isinstance(value, torch.Tensor)
            and value.dim()
            and value.shape[0] == num_experts
        ):
            return value.detach()[start:stop]
        return value

    part = copy.copy(experts)
    for name, value in vars(experts).items():
        if name not in _OF_ROUTING:
            setattr(part, name, part_of(value))
    if hasattr(part, "local_num_experts"):
        part.local_num_experts = stop - start
    part.quant_config = copy.copy(experts.quant_config)
    for name, described in _descriptors(experts.quant_config):
        copied = copy.copy(described)
        for field in fields(copied):
            setattr(copied, field.name, part_of(getattr(copied, field.name)))
        setattr(part.quant_config, name, copied)
    return part


def check_part_lengths(
    part: "FusedMoEExperts", tensors: Mapping[str, Any], length: int
) -> None:
    """Check that the per-expert tensors of a launch have its number of experts.

    Kernels read as many values as they were told experts, whatever a tensor holds.

    Args:
        part: The experts object the tensors belong to.
        tensors: What the kernel indexes by expert, by name; None is skipped.
        length: Experts of the launch.

    Raises:
        ValueError: One has another length.

    """
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.dim() == 0 or tensor.shape[0] != length):
            raise ValueError(
                f"{type(part).__name__}.{name} {tuple(tensor.shape)} does not have one "
                f"row for each of the {length} experts of its part"
            )
