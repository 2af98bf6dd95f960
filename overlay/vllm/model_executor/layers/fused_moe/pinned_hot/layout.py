# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a layout of hot and cold rows must offer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
    ExpertResidency,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import LayerMap
from vllm.model_executor.layers.fused_moe.pinned_hot.placement import RowTensor
from vllm.model_executor.layers.fused_moe.pinned_hot.tensors import (
    expert_tensors,
    row_tensor,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

RunExperts = Callable[..., "UnfinalizedMoEOutput | None"]
"""Takes the arguments of `FusedMoEExpertsModular.apply`."""


@dataclass(frozen=True)
class LayerRows:
    """Expert rows of one layer before they are loaded.

    Attributes:
        tensors: Geometry of each expert tensor as it is going to be kept.
        work_bytes: Bytes of the tensors as loaded and as kept together.

    """

    tensors: tuple[RowTensor, ...]
    work_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one expert's rows in all tensors."""
        return sum(tensor.row_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class Placed:
    """A layer's expert tensors after they were re-homed.

    Attributes:
        homes: For each expert tensor what the layer's parameter shall hold.
        residency: Where the rows lie.
        run: Computes the layer in place of the kernel's `apply`; None where the
            kernel finds every row by itself.

    """

    homes: Sequence[torch.Tensor]
    residency: ExpertResidency
    run: RunExperts | None = None


class Layout(ABC):
    """How one process lays out the rows of its layers."""

    why_not_reload: ClassVar[str | None] = None
    """Why weights cannot be loaded a second time; None if they can."""

    @abstractmethod
    def why_not_layer(self, layer: "RoutedExperts") -> str | None:
        """Why a layer cannot be laid out so, before its weights are loaded."""

    @abstractmethod
    def plan(
        self,
        layers: "Mapping[str, RoutedExperts]",
        entries: Mapping[str, LayerMap],
        budget: int | None,
        ranks_on_node: int,
    ) -> dict[str, int | None]:
        """Share fast memory out and check that everything fits.

        Args:
            layers: The layers by name; no weight is loaded.
            entries: Their parts of the expert map.
            budget: Bytes of fast memory for all rows; None to follow the map's cut.
            ranks_on_node: Processes that take as much of this host's memory.

        Returns:
            What each layer gets, in the layout's own unit, to be handed to `attach`;
            None for what lies before the map's cut.

        Raises:
            ValueError: Something does not fit; has numbers and the cure.

        """

    @abstractmethod
    def attach(
        self, layer: "RoutedExperts", entry: LayerMap, granted: int | None
    ) -> Placed:
        """Re-home the rows of a layer whose weights are loaded and post-processed.

        Args:
            layer: The layer.
            entry: Its part of the expert map.
            granted: What `plan` gave it.

        Raises:
            RuntimeError: Memory cannot be had.
            ValueError: A tensor cannot be laid out.

        """


def layer_rows(layer: "RoutedExperts") -> LayerRows:
    """Describe the rows of a layer whose weights are not loaded yet."""
    names = expert_tensors(layer)
    assert names is not None
    parameters = [getattr(layer, name) for name in names.loaded]
    tensors = tuple(row_tensor(p, names.bits) for p in parameters)
    as_kept = sum(tensor.num_bytes for tensor in tensors)
    as_loaded = sum(row_tensor(p).num_bytes for p in parameters)
    return LayerRows(tensors, as_kept + as_loaded)


def row_parameters(layer: "RoutedExperts") -> dict[str, torch.nn.Parameter]:
    """The `(E, …)` parameters of a loaded layer that hold its rows, by name."""
    names = expert_tensors(layer)
    assert names is not None
    return {name: getattr(layer, name) for name in names.rows}
