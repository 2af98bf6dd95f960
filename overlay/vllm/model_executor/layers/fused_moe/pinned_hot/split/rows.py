# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which row an expert has when hot and cold experts lie apart: pure arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import LayerMap


@dataclass(frozen=True)
class RowOrder:
    """Rows of a layer: hot experts first, then cold ones, each hottest first.

    Attributes:
        experts: Row to expert, a permutation of 0 … E-1.
        num_hot: Rows in fast memory, H; rows H … E-1 are cold.

    """

    experts: tuple[int, ...]
    num_hot: int

    @property
    def num_rows(self) -> int:
        return len(self.experts)

    @property
    def hot(self) -> tuple[int, ...]:
        return self.experts[: self.num_hot]

    @property
    def cold(self) -> tuple[int, ...]:
        return self.experts[self.num_hot :]

    def row_map(self, device: torch.device) -> torch.Tensor:
        """Expert to row, `(E,)` int32."""
        rows = torch.empty(self.num_rows, dtype=torch.int32, device="cpu")
        order = torch.tensor(self.experts, dtype=torch.long, device="cpu")
        rows[order] = torch.arange(self.num_rows, dtype=torch.int32, device="cpu")
        return rows.to(device)


def hot_row_counts(
    layers: Mapping[str, tuple[LayerMap, int]], budget: int | None
) -> dict[str, int]:
    """Choose how many rows of each layer are hot.

    Within a budget the rows that are selected most come first, whatever their layer:
    a selection costs a row's bytes and so does keeping it, so no other choice of the
    same bytes leaves fewer expected cold bytes, but for what the last row leaves over.
    Equal shares go to the earlier layer.

    Args:
        layers: For each layer its part of the map and the bytes of one row.
        budget: Bytes of fast memory; None to follow the map's cut.

    Returns:
        Hot rows by layer name.

    """
    if budget is None:
        return {name: entry.hot for name, (entry, _) in layers.items()}
    hot = dict.fromkeys(layers, 0)
    candidates = [
        (-share, place, number, name, row_bytes)
        for number, (name, (entry, row_bytes)) in enumerate(layers.items())
        for place, share in enumerate(entry.share)
    ]
    left = budget
    full: set[str] = set()
    for _, _, _, name, row_bytes in sorted(candidates):
        # A layer's rows come in its ranking's order: one that does not fit ends it.
        if name in full or row_bytes > left:
            full.add(name)
            continue
        hot[name] += 1
        left -= row_bytes
    return hot
