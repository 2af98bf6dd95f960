# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layout `split`: hot and cold rows in two tensors, and a map from experts to rows.

For GPUs that read host-backed address ranges slowly, or drivers that refuse them.
Kernels have to be told where rows are, so only those that were compared with the
unsplit layer, bit for bit, are served.
"""

import math
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
    ExpertResidency,
    format_bytes,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.backing import PlannedBytes
from vllm.model_executor.layers.fused_moe.pinned_hot.device_range import DeviceMemory
from vllm.model_executor.layers.fused_moe.pinned_hot.layout import (
    Layout,
    Placed,
    RunExperts,
    layer_rows,
    row_parameters,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import LayerMap
from vllm.model_executor.layers.fused_moe.pinned_hot.split.kernels import (
    choose_mode,
    split_kernel,
    why_not_split,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.memory import (
    PinnedMemory,
    SplitMemory,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.parts import (
    permute_expert_tensors,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.rows import (
    RowOrder,
    hot_row_counts,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.staged import Staging
from vllm.model_executor.layers.fused_moe.pinned_hot.tensors import (
    expert_tensors,
    row_tensor,
    why_not_kernel,
)
from vllm.utils.math_utils import round_up

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class SplitLayout(Layout):
    """Places whole rows in two memories.

    Args:
        memory: Holds the two parts.
        mode: `--expert-split-mode`.

    """

    why_not_reload = (
        "layout split has its rows in two tensors, which vLLM would write as one. Use "
        "--expert-layout range, or start again"
    )

    def __init__(self, memory: SplitMemory, mode: str):
        self.memory = memory
        self.mode = mode
        # Bytes of the most cold rows of a staged layer, by expert tensor.
        self._tail_bytes: list[int] = []
        # Held by the ranges that map it, so that it goes with the last layer.
        self._tails: weakref.WeakValueDictionary[tuple[int, int], DeviceMemory] = (
            weakref.WeakValueDictionary()
        )

    def why_not_layer(self, layer: "RoutedExperts") -> str | None:
        names = expert_tensors(layer)
        assert names is not None
        if reason := why_not_kernel(layer, names.split):
            return f"{reason}. --expert-layout range serves more kernels"
        return why_not_split(layer, self.mode)

    def plan(
        self,
        layers: "Mapping[str, RoutedExperts]",
        entries: Mapping[str, LayerMap],
        budget: int | None,
        ranks_on_node: int,
    ) -> dict[str, int | None]:
        """Give each layer a number of hot rows."""
        rows = {name: layer_rows(layer) for name, layer in layers.items()}
        staged = [
            name for name in layers if choose_mode(layers[name], self.mode) == "staged"
        ]
        if staged and (reason := self.memory.why_not_staged()):
            raise ValueError(reason)

        page_bytes = self.memory.page_bytes

        def tail_bytes(hot: Mapping[str, int]) -> list[int]:
            """Bytes that the most cold rows of a staged layer take, by tensor."""
            sizes = [
                [
                    (tensor.num_rows - hot[name]) * tensor.row_bytes
                    for tensor in rows[name].tensors
                ]
                for name in staged
            ]
            return [
                round_up(max(tensor), page_bytes) for tensor in zip(*sizes, strict=True)
            ]

        def hot_bytes(hot: Mapping[str, int]) -> int:
            """Bytes of the pages that the hot rows take."""
            return sum(
                round_up(hot[name] * tensor.row_bytes, page_bytes)
                for name, found in rows.items()
                for tensor in found.tensors
            )

        ranked = {name: (entries[name], rows[name].row_bytes) for name in layers}
        granted = hot_row_counts(ranked, budget)
        spend = budget
        while spend is not None and budget is not None and any(granted.values()):
            # Pages, and what has to be staged: more of it, the fewer rows are hot.
            over = hot_bytes(granted) + sum(tail_bytes(granted)) - budget
            if over <= 0:
                break
            spend -= round_up(over, page_bytes)
            granted = hot_row_counts(ranked, spend)
        self._tail_bytes = tail_bytes(granted)
        tail = sum(self._tail_bytes)
        if budget is not None and tail > budget:
            raise ValueError(
                f"--expert-hbm-gib: {format_bytes(budget)} is less than the "
                f"{format_bytes(tail)} that one layer's cold rows take when they are "
                "staged. Raise it, or use --expert-split-mode two_calls."
            )
        fast = hot_bytes(granted) + tail
        cold = sum(
            (tensor.num_rows - granted[name]) * tensor.row_bytes
            for name, found in rows.items()
            for tensor in found.tensors
        )
        planned = PlannedBytes(
            hot=fast,
            total=fast + cold,
            largest_layer=max(found.work_bytes for found in rows.values()),
        )
        self.memory.check(planned, ranks_on_node)
        return dict(granted)

    def attach(
        self, layer: "RoutedExperts", entry: LayerMap, granted: int | None
    ) -> Placed:
        assert granted is not None
        order = RowOrder(entry.ranking, granted)
        kernel = split_kernel(layer)
        mode = choose_mode(layer, self.mode)
        parameters = row_parameters(layer)
        # Before the parameters change their memory.
        row_bytes = sum(row_tensor(p).row_bytes for p in parameters.values())
        if mode in kernel.row_order:
            permute_expert_tensors(layer, order.experts, parameters)
        place = self._stage if mode == "staged" else self._part
        homes, run = place(layer, order, parameters)
        residency = self._residency(entry, order, mode, row_bytes, layer.top_k)
        return Placed(homes, residency, run)

    def _part(
        self,
        layer: "RoutedExperts",
        order: RowOrder,
        parameters: Mapping[str, torch.nn.Parameter],
    ) -> tuple[list[torch.Tensor], RunExperts]:
        parts = []
        for name, parameter in parameters.items():
            label = f"{layer.layer_name}.{name}"
            hot = self.memory.hot(parameter.data, order.hot, label)
            parts.append((hot, self.memory.cold(parameter.data, order.cold, label)))
        two_calls = split_kernel(layer).two_calls
        assert two_calls is not None
        experts = layer.quant_method.moe_kernel.fused_experts
        return [hot for hot, _ in parts], two_calls(experts, order, *parts)

    def _stage(
        self,
        layer: "RoutedExperts",
        order: RowOrder,
        parameters: Mapping[str, torch.nn.Parameter],
    ) -> tuple[list[torch.Tensor], RunExperts]:
        assert isinstance(self.memory, PinnedMemory)
        homes, pairs = [], []
        for number, (name, parameter) in enumerate(parameters.items()):
            label = f"{layer.layer_name}.{name}"
            tail = self._tail(number)
            home = self.memory.staged(parameter.data, order, tail, label)
            cold = self.memory.cold(parameter.data, order.cold, label)
            homes.append(home)
            pairs.append((cold, home[order.num_hot :]))
        staging = Staging(order.row_map(homes[0].device), order.num_hot, pairs)
        staged = split_kernel(layer).staged
        assert staged is not None
        experts = layer.quant_method.moe_kernel.fused_experts
        return homes, staged(experts, order, staging, *homes)

    def _tail(self, number: int) -> DeviceMemory | None:
        """Memory to stage an expert tensor's cold rows in, the same for all layers."""
        assert isinstance(self.memory, PinnedMemory)
        num_bytes = self._tail_bytes[number]
        if num_bytes == 0:
            return None
        tail = self._tails.get((number, num_bytes))
        if tail is None:
            tail = self.memory.staging(num_bytes)
            self._tails[number, num_bytes] = tail
        return tail

    def _residency(
        self, entry: LayerMap, order: RowOrder, mode: str, row_bytes: int, top_k: int
    ) -> ExpertResidency:
        cold_rows = order.num_rows - order.num_hot
        cold_share = math.fsum(entry.share[order.num_hot :])
        return ExpertResidency(
            hot_rows=order.num_hot,
            cold_rows=cold_rows,
            hot_bytes=order.num_hot * row_bytes,
            cold_bytes=cold_rows * row_bytes,
            expected_cold_share=cold_share,
            expected_cold_bytes=cold_share * row_bytes * top_k,
            layout=f"layout split, {mode}",
            memories=self.memory.memories,
            cold_bytes_per_s=self.memory.cold_bytes_per_s,
        )
