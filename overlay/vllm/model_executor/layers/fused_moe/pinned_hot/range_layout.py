# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layout `range`: one address range per expert tensor, placed page by page.

An expert tensor stays one tensor with the shape, strides and expert order the
kernels know. Only the memory behind its pages is chosen. No kernel, router or id
changes, so neither do the results.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
    ExpertResidency,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.backing import (
    PlannedBytes,
    RangeBacking,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.layout import (
    Layout,
    Placed,
    layer_rows,
    row_parameters,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import LayerMap
from vllm.model_executor.layers.fused_moe.pinned_hot.placement import (
    PageMask,
    RowTensor,
    hot_bytes_per_row,
    hot_pages,
    place_pages,
    row_heat,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.tensors import (
    expert_tensors,
    row_tensor,
    why_not_kernel,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class RangeLayout(Layout):
    """Places the pages of whole tensors.

    Args:
        backing: Makes the ranges.

    """

    def __init__(self, backing: RangeBacking):
        self.backing = backing

    def why_not_layer(self, layer: "RoutedExperts") -> str | None:
        names = expert_tensors(layer)
        assert names is not None
        return why_not_kernel(layer, names.kernels)

    def plan(
        self,
        layers: "Mapping[str, RoutedExperts]",
        entries: Mapping[str, LayerMap],
        budget: int | None,
        ranks_on_node: int,
    ) -> dict[str, int | None]:
        """Give each layer bytes of hot pages.

        Layers differ in how much of a budget they deserve: their pages are compared
        with each other.
        """
        page_bytes = self.backing.page_bytes
        rows = {name: layer_rows(layer) for name, layer in layers.items()}
        if budget is None:
            masks = [
                hot_pages(tensor, entries[name].hot_rows, page_bytes)
                for name, found in rows.items()
                for tensor in found.tensors
            ]
        else:
            tensors = [tensor for found in rows.values() for tensor in found.tensors]
            heats = [
                heat
                for name, found in rows.items()
                for heat in [row_heat(entries[name].ranking, entries[name].share)]
                * len(found.tensors)
            ]
            masks = place_pages(tensors, heats, budget, page_bytes)
        remaining = iter(masks)
        granted = {
            name: sum(int(next(remaining).sum()) for _ in found.tensors) * page_bytes
            for name, found in rows.items()
        }
        planned = PlannedBytes(
            hot=sum(granted.values()),
            total=sum(len(mask) for mask in masks) * page_bytes,
            largest_layer=max(found.work_bytes for found in rows.values()),
        )
        self.backing.check(planned, ranks_on_node)
        self.backing.expect(masks)
        return dict.fromkeys(layers) if budget is None else dict(granted)

    def attach(
        self, layer: "RoutedExperts", entry: LayerMap, granted: int | None
    ) -> Placed:
        parameters = row_parameters(layer)
        tensors = [row_tensor(parameter) for parameter in parameters.values()]
        masks = self._place(entry, tensors, granted)
        homes = [
            self.backing.build(parameter.data, mask, f"{layer.layer_name}.{name}")
            for (name, parameter), mask in zip(parameters.items(), masks, strict=True)
        ]
        residency = _residency(entry, tensors, masks, layer.top_k, self.backing)
        return Placed(homes, residency)

    def _place(
        self, entry: LayerMap, tensors: Sequence[RowTensor], granted: int | None
    ) -> list[PageMask]:
        """Hot pages of one layer: of the rows before the cut, or within a budget."""
        page_bytes = self.backing.page_bytes
        if granted is None:
            return [hot_pages(tensor, entry.hot_rows, page_bytes) for tensor in tensors]
        heat = row_heat(entry.ranking, entry.share)
        return place_pages(tensors, [heat] * len(tensors), granted, page_bytes)


def _residency(
    entry: LayerMap,
    tensors: Sequence[RowTensor],
    masks: Sequence[PageMask],
    top_k: int,
    backing: RangeBacking,
) -> ExpertResidency:
    hot_per_row = sum(
        hot_bytes_per_row(tensor, mask, backing.page_bytes)
        for tensor, mask in zip(tensors, masks, strict=True)
    )
    cold_per_row = sum(tensor.row_bytes for tensor in tensors) - hot_per_row
    is_cold = cold_per_row > 0
    share = np.zeros(len(entry.ranking))
    share[list(entry.ranking)] = entry.share
    hot_pages_count = sum(int(mask.sum()) for mask in masks)
    pages = sum(len(mask) for mask in masks)
    return ExpertResidency(
        hot_rows=int((~is_cold).sum()),
        cold_rows=int(is_cold.sum()),
        hot_bytes=hot_pages_count * backing.page_bytes,
        cold_bytes=(pages - hot_pages_count) * backing.page_bytes,
        straddling_bytes=int(hot_per_row[is_cold].sum()),
        expected_cold_share=float(share[is_cold].sum()),
        expected_cold_bytes=float((share * cold_per_row).sum() * top_k),
        layout="layout range",
        memories=backing.memories,
        cold_bytes_per_s=backing.cold_bytes_per_s,
    )
