# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layout `range`: one address range per expert tensor, placed page by page.

An expert tensor stays one tensor with the shape, strides and expert order the
kernels know. Only the memory behind its pages is chosen. No kernel, router or id
changes, so neither do the results.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
    ExpertResidency,
    format_bytes,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.backing import (
    PlannedBytes,
    RangeBacking,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.device_backing import DeviceBacking
from vllm.model_executor.layers.fused_moe.pinned_hot.layout import (
    LayerRows,
    Layout,
    Placed,
    RunExperts,
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
from vllm.model_executor.layers.fused_moe.pinned_hot.range_staging import (
    PagePool,
    RangeStaging,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.tensors import (
    expert_tensors,
    row_tensor,
    why_not_kernel,
)
from vllm.utils.math_utils import round_up

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


logger = init_logger(__name__)

# Batches of that many tokens are served faster from copies, measured on an H200.
STAGE_TOKENS = 1024
# Without being asked, copies may take this share of the hot pages' memory.
_STAGING_SHARE = 0.1


class RangeLayout(Layout):
    """Places the pages of whole tensors.

    Args:
        backing: Makes the ranges.
        stage_tokens: `--expert-stage-tokens`.

    """

    def __init__(self, backing: RangeBacking, stage_tokens: int | None = None):
        self.backing = backing
        self.stage_tokens = stage_tokens
        # Pages to copy a layer's cold ones to; 0 to read all of them in place.
        self._staging_pages = 0
        # Held by the layers, so that it goes with the last one.
        self._pool: weakref.ref[PagePool] | None = None

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
        largest_batch: int,
    ) -> dict[str, int | None]:
        """Give each layer bytes of hot pages.

        Layers differ in how much of a budget they deserve: their pages are compared
        with each other.
        """
        page_bytes = self.backing.page_bytes
        rows = {name: layer_rows(layer) for name, layer in layers.items()}
        masks = self._masks(rows, entries, budget)
        self._staging_pages = 0
        if self._may_stage(masks, largest_batch):
            masks = self._leave_room(masks, rows, entries, budget)
            self._staging_pages = most_cold_pages(masks)
        staging_bytes = self._staging_pages * page_bytes
        if staging_bytes:
            logger.info_once(
                "Batches of %d tokens or more copy the cold rows that they need to "
                "HBM first (%s, shared by all layers)",
                self._stage_from,
                format_bytes(staging_bytes),
            )
        granted = {name: hot_page_count([found]) for name, found in masks.items()}
        planned = PlannedBytes(
            hot=hot_page_count(masks.values()) * page_bytes + staging_bytes,
            total=sum(len(mask) for found in masks.values() for mask in found)
            * page_bytes
            + staging_bytes,
            largest_layer=max(found.work_bytes for found in rows.values()),
        )
        self.backing.check(planned, ranks_on_node)
        if budget is None:
            return dict.fromkeys(layers)
        return {name: pages * page_bytes for name, pages in granted.items()}

    def _masks(
        self,
        rows: Mapping[str, LayerRows],
        entries: Mapping[str, LayerMap],
        budget: int | None,
    ) -> dict[str, list[PageMask]]:
        """Hot pages of every layer's tensors."""
        page_bytes = self.backing.page_bytes
        if budget is None:
            return {
                name: [
                    hot_pages(tensor, entries[name].hot_rows, page_bytes)
                    for tensor in found.tensors
                ]
                for name, found in rows.items()
            }
        tensors = [tensor for found in rows.values() for tensor in found.tensors]
        heats = [
            heat
            for name, found in rows.items()
            for heat in [row_heat(entries[name].ranking, entries[name].share)]
            * len(found.tensors)
        ]
        remaining = iter(place_pages(tensors, heats, budget, page_bytes))
        return {
            name: [next(remaining) for _ in found.tensors]
            for name, found in rows.items()
        }

    @property
    def _stage_from(self) -> int:
        return STAGE_TOKENS if self.stage_tokens is None else self.stage_tokens

    def _may_stage(
        self, masks: Mapping[str, Sequence[PageMask]], largest_batch: int
    ) -> bool:
        """Whether some batch is large enough and the memory for copies is worth it."""
        if not isinstance(self.backing, DeviceBacking) or self._stage_from == 0:
            return False
        if self.stage_tokens is not None:
            return True
        worth = _STAGING_SHARE * hot_page_count(masks.values())
        return largest_batch >= self._stage_from and most_cold_pages(masks) <= worth

    def _leave_room(
        self,
        masks: dict[str, list[PageMask]],
        rows: Mapping[str, LayerRows],
        entries: Mapping[str, LayerMap],
        budget: int | None,
    ) -> dict[str, list[PageMask]]:
        """Take hot pages away until the copies fit into the budget beside them.

        Raises:
            ValueError: They do not without any.

        """
        page_bytes = self.backing.page_bytes
        spend = budget
        while spend is not None and budget is not None:
            pages = hot_page_count(masks.values()) + most_cold_pages(masks)
            over = pages * page_bytes - budget
            if over <= 0:
                break
            if spend == 0:
                raise ValueError(
                    f"--expert-stage-tokens {self.stage_tokens}: "
                    f"{format_bytes(pages * page_bytes)} for one layer's cold rows do "
                    f"not fit into the {format_bytes(budget)} of --expert-hbm-gib. "
                    "Raise that, or use --expert-stage-tokens 0."
                )
            spend = max(0, spend - round_up(over, page_bytes))
            masks = self._masks(rows, entries, spend)
        return masks

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
        if not self._staging_pages:
            return Placed(homes, residency)
        return Placed(homes, residency, self._stage(layer, tensors, homes, masks))

    def _stage(
        self,
        layer: "RoutedExperts",
        tensors: Sequence[RowTensor],
        homes: Sequence[torch.Tensor],
        masks: Sequence[PageMask],
    ) -> RunExperts:
        assert isinstance(self.backing, DeviceBacking)
        pool = self._pool() if self._pool is not None else None
        try:
            if pool is None or len(pool.pages) < self._staging_pages:
                torch.accelerator.empty_cache()  # it may hold what the driver needs
                pool = PagePool(self.backing, self._staging_pages)
                self._pool = weakref.ref(pool)
            return RangeStaging(
                layer.quant_method.moe_kernel.fused_experts,
                tensors,
                homes,
                masks,
                self.backing,
                pool,
                self._stage_from,
            )
        except RuntimeError as error:
            size = format_bytes(self._staging_pages * self.backing.page_bytes)
            raise RuntimeError(
                f"{layer.layer_name}: cannot take {size} of HBM to copy cold rows to: "
                f"{error}. Lower `hot` in the expert map or --expert-hbm-gib, or use "
                "--expert-stage-tokens 0."
            ) from error

    def _place(
        self, entry: LayerMap, tensors: Sequence[RowTensor], granted: int | None
    ) -> list[PageMask]:
        """Hot pages of one layer: of the rows before the cut, or within a budget."""
        page_bytes = self.backing.page_bytes
        if granted is None:
            return [hot_pages(tensor, entry.hot_rows, page_bytes) for tensor in tensors]
        heat = row_heat(entry.ranking, entry.share)
        return place_pages(tensors, [heat] * len(tensors), granted, page_bytes)


def hot_page_count(masks: Iterable[Sequence[PageMask]]) -> int:
    """Hot pages of some layers' tensors."""
    return sum(int(mask.sum()) for found in masks for mask in found)


def most_cold_pages(masks: Mapping[str, Sequence[PageMask]]) -> int:
    """Cold pages of the layer that has most of them."""
    return max(sum(int((~mask).sum()) for mask in found) for found in masks.values())


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
