# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How well a map fits traffic, and how sure that is.

The measure is the share of selections that the map leaves cold. On the profile a map
was planned from it is too good; a held-out estimate plans on some requests and scores
on the others, with the cuts of the map.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import ExpertMap

Counts = npt.NDArray[np.float64] | npt.NDArray[np.int64]
"""`(num_layers, num_experts)` selections."""

HotMask = npt.NDArray[np.bool_]
"""`(num_layers, num_experts)`: which experts are hot."""

_SHARE_TOLERANCE = 1e-9


def rank(counts: Counts) -> npt.NDArray[np.int64]:
    """Expert ids of each layer, most selected first, ties by the lowest id."""
    return np.argsort(-np.asarray(counts), axis=-1, kind="stable")


def hot_mask(rankings: npt.ArrayLike, hot: npt.ArrayLike) -> HotMask:
    """Mark the experts before the cut.

    Args:
        rankings: `(num_layers, num_experts)` expert ids, hottest first.
        hot: `(num_layers,)` rows to keep hot.

    """
    rankings = np.asarray(rankings)
    mask = np.zeros(rankings.shape, dtype=np.bool_)
    before_cut = np.arange(rankings.shape[1]) < np.asarray(hot)[:, None]
    np.put_along_axis(mask, rankings, before_cut, axis=1)
    return mask


def map_rankings(expert_map: ExpertMap, layer_names: Sequence[str]) -> npt.NDArray:
    """Rankings of a map, `(num_layers, num_experts)`, in the given order of layers."""
    return np.array([expert_map.layers[name].ranking for name in layer_names])


def map_cuts(
    expert_map: ExpertMap, layer_names: Sequence[str]
) -> npt.NDArray[np.int64]:
    """Hot rows of a map, `(num_layers,)`, in the given order of layers."""
    return np.array([expert_map.layers[name].hot for name in layer_names])


def map_shares(
    expert_map: ExpertMap, layer_names: Sequence[str]
) -> npt.NDArray[np.float64]:
    """Shares of a map by expert id, `(num_layers, num_experts)`."""
    layers = [expert_map.layers[name] for name in layer_names]
    shares = np.zeros((len(layers), len(layers[0].ranking)))
    for row, layer in zip(shares, layers, strict=True):
        row[list(layer.ranking)] = layer.share
    return shares


def cold_share(counts: Counts, mask: HotMask) -> float:
    """Share of all selections that are not of hot experts; 0 without selections."""
    counts = np.asarray(counts)
    total = counts.sum()
    return float(np.where(mask, 0, counts).sum() / total) if total else 0.0


def cold_share_by_layer(counts: Counts, mask: HotMask) -> npt.NDArray[np.float64]:
    """`cold_share` of each layer, `(num_layers,)`; 0 without selections."""
    counts = np.asarray(counts)
    total = counts.sum(axis=1)
    return np.where(mask, 0, counts).sum(axis=1) / np.maximum(total, 1e-300)


def overlap(one: HotMask, other: HotMask) -> npt.NDArray[np.float64]:
    """Share of hot experts that two maps have in common, by layer.

    Returns:
        `(num_layers,)`: common experts over the larger hot set; 1 if both are empty.

    """
    larger = np.maximum(one.sum(axis=1), other.sum(axis=1))
    common = (one & other).sum(axis=1)
    return np.where(larger, common / np.maximum(larger, 1), 1.0)


def _average_ranks(values: npt.NDArray) -> npt.NDArray[np.float64]:
    """Ranks from 0, `(n,)`; equal values share the mean of theirs."""
    _, group, size = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(size)
    return (last - (size + 1) / 2)[group]


def spearman(one: Counts, other: Counts) -> npt.NDArray[np.float64]:
    """Rank correlation of two counts, by layer.

    Spearman's rho: the correlation of the ranks, where ties get their mean rank.

    Returns:
        `(num_layers,)`, -1 to 1; 0 for a layer in which all counts of one are equal.

    """
    result = np.zeros(len(one))
    for layer, pair in enumerate(zip(one, other, strict=True)):
        left, right = (_average_ranks(np.asarray(counts)) for counts in pair)
        left, right = left - left.mean(), right - right.mean()
        norm = np.sqrt((left**2).sum() * (right**2).sum())
        result[layer] = (left * right).sum() / norm if norm else 0.0
    return result


def folds(num_requests: int, num_folds: int, seed: int = 0) -> Iterator[HotMask]:
    """Divide requests into held-out sets, every request in one of them.

    Args:
        num_requests: Requests.
        num_folds: Sets, at most one for each request.
        seed: Of the shuffle.

    Yields:
        `(num_requests,)` mask of what is held out.

    """
    order = np.random.default_rng(seed).permutation(num_requests)
    for held_out in np.array_split(order, num_folds):
        mask = np.zeros(num_requests, dtype=np.bool_)
        mask[held_out] = True
        yield mask


def held_out_cold_share(
    requests: npt.NDArray[np.int64],
    cuts: npt.ArrayLike,
    num_folds: int,
    seed: int = 0,
    progress: Callable[[Iterator], Iterator] = lambda steps: steps,
) -> float:
    """Cold share of requests under maps that were ranked without them.

    Args:
        requests: `(num_requests, num_layers, num_experts)` selections.
        cuts: `(num_layers,)` hot rows, the same for every fold.
        num_folds: Held-out sets; one for each request is leave-one-out.
        seed: Of the division into folds.
        progress: Wraps the iteration over the folds.

    Returns:
        Cold selections of all held-out requests over all their selections.

    """
    everything = requests.sum(axis=0)
    cold = total = 0.0
    for held_out in progress(folds(len(requests), num_folds, seed)):
        unseen = requests[held_out].sum(axis=0)
        mask = hot_mask(rank(everything - unseen), cuts)
        cold += np.where(mask, 0, unseen).sum()
        total += unseen.sum()
    return float(cold / total) if total else 0.0


@dataclass(frozen=True)
class Interval:
    """A bootstrap interval of a share.

    Attributes:
        low: Lower end.
        high: Upper end.
        unit: What was drawn anew: "requests" or "selections".

    """

    low: float
    high: float
    unit: str


def bootstrap(
    counts: Counts,
    requests: npt.NDArray[np.int64] | None,
    mask: HotMask,
    draws: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Interval of the cold share by drawing the traffic anew.

    Requests are drawn with replacement where they are known. Without them single
    selections are drawn, as if each was independent of the others, which they are
    not: that interval is too narrow.

    Args:
        counts: `(num_layers, num_experts)` selections.
        requests: `(num_requests, num_layers, num_experts)`, or None.
        mask: Which experts are hot.
        draws: Bootstrap samples.
        confidence: Of the interval, between the quantiles of the samples.
        seed: Of the draws.

    """
    generator = np.random.default_rng(seed)
    if requests is not None and len(requests) > 1:
        total = requests.sum(axis=(1, 2))
        cold = np.where(mask, 0, requests).sum(axis=(1, 2))
        drawn = generator.integers(0, len(requests), size=(draws, len(requests)))
        shares = cold[drawn].sum(axis=1) / np.maximum(total[drawn].sum(axis=1), 1)
        unit = "requests"
    else:
        by_layer = np.asarray(counts).sum(axis=1).astype(np.int64)
        cold_by_layer = cold_share_by_layer(counts, mask)
        drawn = generator.binomial(
            by_layer, np.clip(cold_by_layer, 0, 1), size=(draws, len(by_layer))
        )
        shares = drawn.sum(axis=1) / max(int(by_layer.sum()), 1)
        unit = "selections"
    tail = (1 - confidence) / 2
    low, high = np.quantile(shares, [tail, 1 - tail])
    return Interval(float(low), float(high), unit)


def planned_from(
    expert_map: ExpertMap, sha256: str, counts: Counts, layer_names: Sequence[str]
) -> bool:
    """Whether a map was planned from a profile, by its hash or by its very counts.

    Args:
        expert_map: The map.
        sha256: Hash of the profile's file.
        counts: The profile's counts, of one phase or all, `(num_layers, num_experts)`.
        layer_names: Their layers.

    """
    if any(profile.sha256 == sha256 for profile in expert_map.profiles):
        return True
    total = np.asarray(counts).sum(axis=1, keepdims=True)
    if not total.all():
        return False
    difference = np.abs(counts / total - map_shares(expert_map, layer_names))
    return bool(difference.max() < _SHARE_TOLERANCE)
