# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the pictures of maps and profiles show, as plain arrays.

`pictures_html` and `pictures_png` draw it, each with a library of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm.model_executor.layers.fused_moe.expert_profile.score import (
    hot_mask,
    overlap,
    rank,
    spearman,
)

Floats = npt.NDArray[np.float64]

_CURVE_POINTS = 200


@dataclass(frozen=True)
class HeatMap:
    """Use of every expert, sorted by use within its layer.

    Attributes:
        title: What it shows.
        layer_names: `num_layers` names.
        experts: `(num_layers, num_experts)` int64 expert ids in the order of use.
        relative_use: `(num_layers, num_experts)`: use of that expert over the mean use
            of the layer; 0 in a layer without traffic.
        cuts: `(num_layers,)` int64 hot rows, or None if there is no map.

    """

    title: str
    layer_names: tuple[str, ...]
    experts: npt.NDArray[np.int64]
    relative_use: Floats
    cuts: npt.NDArray[np.int64] | None


@dataclass(frozen=True)
class Curve:
    """Selections covered as more rows are hot.

    Attributes:
        label: The traffic.
        hot_rows: `(n,)` hot rows of all layers together.
        covered: `(n,)` share of the traffic's selections.

    """

    label: str
    hot_rows: npt.NDArray[np.int64]
    covered: Floats


@dataclass(frozen=True)
class Coverage:
    """Coverage curves of several classes of traffic under one ranking.

    Attributes:
        title: What it shows.
        curves: One for each class.
        row_gib: GiB of a row, or None if it is not known.
        hot_rows: Where the map's cut is, or None.

    """

    title: str
    curves: tuple[Curve, ...]
    row_gib: float | None
    hot_rows: int | None


@dataclass(frozen=True)
class Drift:
    """How the use of experts differs between two profiles.

    Attributes:
        title: What it shows.
        layer_names: `num_layers` names.
        experts: `(num_layers, num_experts)` expert ids in the first one's order of use.
        change: `(num_layers, num_experts)`: log2 of the second's share over the
            first's, within -4 … 4; 0 if both have none.
        overlap: `(num_layers,)` share of the hot rows in common.
        spearman: `(num_layers,)` rank correlation.

    """

    title: str
    layer_names: tuple[str, ...]
    experts: npt.NDArray[np.int64]
    change: Floats
    overlap: Floats
    spearman: Floats


def shares_of(counts: npt.NDArray) -> Floats:
    """Share of each expert in its layer's selections; 0 in a layer without any."""
    counts = np.asarray(counts, dtype=np.float64)
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-300)


def heat_map(
    title: str,
    layer_names: Sequence[str],
    shares: Floats,
    cuts: npt.NDArray[np.int64] | None,
) -> HeatMap:
    """Sort every layer's experts by use.

    Args:
        title: What it shows.
        layer_names: `num_layers` names.
        shares: `(num_layers, num_experts)` by expert id.
        cuts: `(num_layers,)` hot rows, or None.

    """
    experts = rank(shares)
    relative = np.take_along_axis(shares, experts, axis=1) * shares.shape[1]
    return HeatMap(title, tuple(layer_names), experts, relative, cuts)


def coverage(
    title: str,
    ranked_by: Floats,
    traffic: Sequence[tuple[str, npt.NDArray]],
    row_gib: float | None,
    hot_rows: int | None,
) -> Coverage:
    """Cover rows in the order of a ranking over all layers.

    Args:
        title: What it shows.
        ranked_by: `(num_layers, num_experts)` shares that decide which row is next.
        traffic: Label and `(num_layers, num_experts)` counts or shares of each class.
        row_gib: GiB of a row, or None.
        hot_rows: Where the map's cut is, or None.

    """
    # As the planner does: equal rows in the order of their place, then of the layer.
    place = np.argsort(rank(ranked_by), axis=1, kind="stable")
    layer = np.broadcast_to(np.arange(len(place))[:, None], place.shape)
    order = np.lexsort((layer.ravel(), place.ravel(), -ranked_by.ravel()))
    at = np.unique(np.linspace(0, order.size, _CURVE_POINTS).round().astype(np.int64))
    curves = []
    for label, counts in traffic:
        covered = np.concatenate([[0], np.cumsum(np.asarray(counts).ravel()[order])])
        total = covered[-1] or 1
        curves.append(Curve(label, at, covered[at] / total))
    return Coverage(title, tuple(curves), row_gib, hot_rows)


def drift(
    title: str,
    layer_names: Sequence[str],
    first: Floats,
    second: Floats,
    hot: int | npt.NDArray[np.int64],
) -> Drift:
    """Compare two shares.

    Args:
        title: What it shows.
        layer_names: `num_layers` names.
        first: `(num_layers, num_experts)` shares.
        second: The same of other traffic.
        hot: Rows of a layer whose overlap is taken.

    """
    experts = rank(first)
    floor = 0.05 / first.shape[1]
    ratio = np.log2(np.maximum(second, floor) / np.maximum(first, floor))
    change = np.take_along_axis(np.clip(ratio, -4, 4), experts, axis=1)
    cuts = np.broadcast_to(hot, len(first))
    masks = [hot_mask(rank(one), cuts) for one in (first, second)]
    return Drift(
        title,
        tuple(layer_names),
        experts,
        change,
        overlap(*masks),
        spearman(first, second),
    )
