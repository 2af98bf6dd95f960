# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From counts to a map: which rows of which layer a budget keeps hot.

A layer's experts are ranked by their selections, ties by the lowest id, and a cut says
how many of them are hot. A *uniform* cut is the same in every layer. The *optimal* cut
gives the budget to the rows with the most selections per byte, wherever they are, after
every layer got its floor.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vllm.model_executor.layers.fused_moe.expert_profile.errors import (
    ExpertPlanError,
)
from vllm.model_executor.layers.fused_moe.expert_profile.profile_file import (
    ExpertProfile,
)
from vllm.model_executor.layers.fused_moe.expert_profile.row_bytes import (
    ExpertRow,
    hot_page_bytes,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import (
    Budget,
    ExpertMap,
    Fingerprint,
    Profile,
    expert_map_from_counts,
)

Counts = npt.NDArray[np.float64] | npt.NDArray[np.int64]
"""`(num_layers, num_experts)`: selections, or selections per token."""

Phase = Literal["both", "prefill", "decode"]


@dataclass(frozen=True)
class Weighted:
    """A profile and its part of the traffic that is planned for.

    Attributes:
        profile: What was counted.
        sha256: Hash of its file.
        label: Its name for people.
        weight: Its share of the traffic, in any unit; None to count every recorded
            token alike.

    """

    profile: ExpertProfile
    sha256: str
    label: str
    weight: float | None = None


def phase_counts(profile: ExpertProfile, phase: Phase) -> npt.NDArray[np.int64]:
    """Selections of a phase, int64 `(num_moe_layers, num_experts)`."""
    return {
        "both": profile.counts,
        "prefill": profile.counts_prefill,
        "decode": profile.counts_decode,
    }[phase]


def phase_tokens(profile: ExpertProfile, phase: Phase) -> int:
    """Tokens of a phase."""
    return {
        "both": profile.tokens,
        "prefill": profile.tokens_prefill,
        "decode": profile.tokens_decode,
    }[phase]


def combine(parts: Sequence[Weighted], phase: Phase) -> Counts:
    """Counts of all profiles together.

    Without weights every token counts alike. With weights each profile stands for its
    share of the traffic, however long it was recorded.

    Args:
        parts: Profiles of one model, with the layers in one order.
        phase: Which selections to take.

    Returns:
        Selections, int64 `(num_layers, num_experts)`, or with weights the expected
        selections of a token, float64. The same for every order of `parts`.

    Raises:
        ExpertPlanError: Some profiles have a weight and others not, a weight is not
            above 0, or there is nothing to count.

    """
    weights = [part.weight for part in parts]
    if len({weight is None for weight in weights}) > 1:
        unweighted = next(part.label for part in parts if part.weight is None)
        raise ExpertPlanError(
            f"profile {unweighted!r} has no weight and others have one. Give every "
            "profile a weight (PROFILE=WEIGHT), or none."
        )
    # One order of summation, whatever the order of the arguments.
    ordered = sorted(parts, key=lambda part: part.sha256)
    tokens = {part.sha256: phase_tokens(part.profile, phase) for part in parts}
    for part in ordered:
        if part.weight is not None and not 0 < part.weight < float("inf"):
            raise ExpertPlanError(
                f"profile {part.label!r}: weight {part.weight} is not above 0. Give "
                "its share of the traffic, or leave the profile out."
            )
        if part.weight is not None and not tokens[part.sha256]:
            raise ExpertPlanError(
                f"profile {part.label!r} has a weight and no tokens of phase "
                f"{phase!r}. Record its traffic, leave it out, or choose another "
                "--phase."
            )
    if not sum(tokens.values()):
        raise ExpertPlanError(
            f"the profiles have no tokens of phase {phase!r}, so there is nothing to "
            "rank by. Record traffic first, or choose another --phase."
        )
    if weights[0] is None:
        return sum(phase_counts(part.profile, phase) for part in ordered)
    total = sum(part.weight for part in ordered)
    return sum(
        phase_counts(part.profile, phase) * (part.weight / total / tokens[part.sha256])
        for part in ordered
    )


def ranked_counts(counts: Counts) -> Counts:
    """Counts of each layer in the order of its ranking, most first."""
    return -np.sort(-np.asarray(counts), axis=1)


def optimal_cut(
    counts: Counts,
    row_bytes: npt.ArrayLike,
    budget_bytes: int,
    floor: int,
) -> npt.NDArray[np.int64]:
    """Give the budget to the rows with the most selections per byte.

    With rows of one size the result covers as many selections as any cut of the
    budget can; with several sizes it falls short of the best by less than the
    selections of one row. Equal rows go to the one that is further ahead in its
    layer's ranking, then to the first layer, so that rows nobody selected are spread
    evenly.

    Args:
        counts: `(num_layers, num_experts)` selections.
        row_bytes: `(num_layers,)` bytes of an expert, or one number for all layers.
        budget_bytes: Hot memory for all layers.
        floor: Rows that every layer keeps hot at least.

    Returns:
        `(num_layers,)` int64: hot rows of each layer.

    Raises:
        ExpertPlanError: The budget does not hold the floor.

    """
    num_layers, num_experts = np.shape(counts)
    size = np.broadcast_to(np.asarray(row_bytes, dtype=np.int64), num_layers)
    floor = min(floor, num_experts)
    left = int(budget_bytes) - floor * int(size.sum())
    if left < 0:
        raise ExpertPlanError(
            f"the budget of {budget_bytes} bytes is below {floor * int(size.sum())}, "
            f"which {floor} rows in each of {num_layers} layers take. Raise the "
            "budget, or lower --floor."
        )
    gain = ranked_counts(counts)[:, floor:] / size[:, None]
    place = np.broadcast_to(np.arange(gain.shape[1]), gain.shape)
    layer = np.broadcast_to(np.arange(num_layers)[:, None], gain.shape)
    order = np.lexsort((layer.ravel(), place.ravel(), -gain.ravel()))
    hot = np.full(num_layers, floor, dtype=np.int64)
    sizes = size.tolist()
    smallest = min(sizes)
    # A row that does not fit is followed in its layer by rows that do not either,
    # since nothing is ever given back: every layer keeps a prefix of its ranking.
    for index in layer.ravel()[order].tolist():
        if sizes[index] <= left:
            hot[index] += 1
            left -= sizes[index]
        elif left < smallest:
            break
    return hot


def covered(counts: Counts, hot: npt.ArrayLike) -> float:
    """Selections of the hot rows, summed over the layers."""
    ranked = ranked_counts(counts)
    before_cut = np.arange(ranked.shape[1]) < np.asarray(hot)[:, None]
    return float(np.where(before_cut, ranked, 0).sum())


@dataclass(frozen=True)
class CutRequest:
    """What a map's cut shall be; exactly one of the budgets is given.

    Attributes:
        cut: The same rows in every layer, or the best ones of all layers.
        hot_rows: Rows of each layer, on average for the optimal cut.
        cold_fraction: Share of the rows that stays outside HBM, 0 to 1.
        hot_gib: HBM of one GPU for hot pages, in GiB, page edges included.
        floor: Rows that every layer keeps hot; None for top_k.

    """

    cut: Literal["uniform", "optimal"] = "uniform"
    hot_rows: int | None = None
    cold_fraction: float | None = None
    hot_gib: float | None = None
    floor: int | None = None

    def __str__(self) -> str:
        if self.hot_rows is not None:
            return f"--hot-rows {self.hot_rows}"
        if self.cold_fraction is not None:
            return f"--cold-fraction {self.cold_fraction:g}"
        return f"--hot-gib {self.hot_gib:g}"


def choose_cut(
    counts: Counts,
    request: CutRequest,
    top_k: int,
    row: ExpertRow | None,
    page_bytes: int,
) -> npt.NDArray[np.int64]:
    """Hot rows of each layer under a budget.

    Args:
        counts: `(num_layers, num_experts)` selections.
        request: Budget and kind of cut.
        top_k: Experts per token, the default floor.
        row: Size of an expert; needed for a budget in bytes.
        page_bytes: Page size in bytes.

    Returns:
        `(num_layers,)` int64.

    Raises:
        ExpertPlanError: The budget is out of range or does not hold the floor.

    """
    num_layers, num_experts = np.shape(counts)
    everything = num_layers * num_experts
    floor = top_k if request.floor is None else request.floor
    if floor < 0:
        raise ExpertPlanError(f"--floor {floor} is below 0. Give rows of one layer.")
    if request.floor is not None and request.cut == "uniform":
        raise ExpertPlanError(
            f"--floor {floor} has no effect on --cut uniform, whose layers are all "
            "alike. Leave it out, or use --cut optimal."
        )
    if request.hot_gib is not None:
        assert row is not None
        if not 0 <= request.hot_gib < math.inf:
            raise ExpertPlanError(
                f"--hot-gib {request.hot_gib:g} is no size. Give the GiB of one GPU's "
                "HBM that hot rows may take."
            )
        budget = int(request.hot_gib * 2**30)
        return _cut_by_bytes(counts, request, floor, row, budget, page_bytes)
    if request.hot_rows is not None:
        if not 0 <= request.hot_rows <= num_experts:
            raise ExpertPlanError(
                f"--hot-rows {request.hot_rows} is outside 0 … {num_experts}, the "
                "experts of a layer. Give the rows of one layer."
            )
        total = request.hot_rows * num_layers
    else:
        fraction = request.cold_fraction
        assert fraction is not None
        if not 0 <= fraction <= 1:
            raise ExpertPlanError(
                f"--cold-fraction {fraction:g} is outside 0 … 1. Give the share of the "
                "rows that may stay in host memory."
            )
        # The tolerance keeps 0.1 of 30 rows at 3: 0.9 * 30 is 26.999999999999996.
        total = int((1 - fraction) * everything + 1e-6)
    if request.cut == "uniform":
        return np.full(num_layers, total // num_layers, dtype=np.int64)
    return _optimal_rows(counts, total, floor)


def _optimal_rows(counts: Counts, total: int, floor: int) -> npt.NDArray[np.int64]:
    num_layers, num_experts = np.shape(counts)
    needed = min(floor, num_experts) * num_layers
    if total < needed:
        raise ExpertPlanError(
            f"the budget of {total} rows is below {needed}, the floor of {floor} rows "
            f"in each of {num_layers} layers. Raise the budget, lower --floor, or use "
            "--cut uniform."
        )
    return optimal_cut(counts, 1, total, floor)


def _cut_by_bytes(
    counts: Counts,
    request: CutRequest,
    floor: int,
    row: ExpertRow,
    budget: int,
    page_bytes: int,
) -> npt.NDArray[np.int64]:
    """Find the most rows whose pages fit, page edges included."""
    num_layers, num_experts = np.shape(counts)
    rankings = np.argsort(-np.asarray(counts), axis=1, kind="stable")

    def page_sum(hot: npt.NDArray[np.int64]) -> int:
        return sum(
            hot_page_bytes(row, num_experts, ranking[:rows], page_bytes)
            for ranking, rows in zip(rankings, hot.tolist(), strict=True)
        )

    def uniform(rows: int) -> npt.NDArray[np.int64]:
        return np.full(num_layers, rows, dtype=np.int64)

    rows = _largest(0, num_experts, lambda n: page_sum(uniform(n)) <= budget)
    even = uniform(rows)
    if request.cut == "uniform":
        return even
    lowest = min(floor, num_experts) * num_layers
    if page_sum(_optimal_rows(counts, lowest, floor)) > budget:
        raise ExpertPlanError(
            f"--hot-gib {request.hot_gib:g} does not hold the floor of {floor} rows in "
            f"each of {num_layers} layers, {row.num_bytes * lowest / 2**30:.2f} GiB "
            "and page edges. Raise it, lower --floor, or use --cut uniform."
        )
    total = _largest(
        lowest,
        num_layers * num_experts,
        lambda n: page_sum(_optimal_rows(counts, n, floor)) <= budget,
    )
    best = _optimal_rows(counts, total, floor)
    # Scattered rows have more page edges, which can outweigh what the cut gains.
    if rows >= min(floor, num_experts) and covered(counts, even) > covered(
        counts, best
    ):
        return even
    return best


def _largest(lowest: int, highest: int, fits: Callable[[int], bool]) -> int:
    """Largest number in a range that fits, if smaller ones fit too."""
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        if fits(middle):
            lowest = middle
        else:
            highest = middle - 1
    return lowest


def make_map(
    counts: Counts,
    hot: npt.ArrayLike,
    layer_names: Sequence[str],
    fingerprint: Fingerprint,
    profiles: Sequence[Profile],
    budget: Budget | None = None,
) -> ExpertMap:
    """Put rankings and cuts into a map.

    Args:
        counts: `(num_layers, num_experts)` selections.
        hot: `(num_layers,)` rows to keep hot.
        layer_names: Names of the layers, as vLLM has them.
        fingerprint: The model.
        profiles: Where the counts came from.
        budget: What the cut was chosen for.

    """
    rows = zip(layer_names, np.asarray(counts).tolist(), strict=True)
    cuts = zip(layer_names, np.asarray(hot).tolist(), strict=True)
    return expert_map_from_counts(dict(rows), dict(cuts), fingerprint, profiles, budget)


def silent_layers(counts: Counts, layer_names: Sequence[str]) -> list[str]:
    """Layers without any selection: their ranking is by expert id and means nothing."""
    return [
        name
        for name, row in zip(layer_names, np.asarray(counts), strict=True)
        if not row.any()
    ]
