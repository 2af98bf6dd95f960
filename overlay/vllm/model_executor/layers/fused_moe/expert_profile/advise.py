# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What to do with maps, given classes of traffic and how many streams there are.

Every question is answered by the throughput that the predictor gives, averaged over a
census of concurrency: a list of (streams, share of the time).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm.model_executor.layers.fused_moe.expert_profile.predict import (
    Hardware,
    Step,
    positional_host_bytes,
    predict,
)
from vllm.model_executor.layers.fused_moe.expert_profile.row_bytes import (
    ExpertRow,
    host_bytes,
    hot_page_bytes,
)
from vllm.model_executor.layers.fused_moe.expert_profile.score import (
    cold_share,
    hot_mask,
    overlap,
    rank,
)

Counts = npt.NDArray[np.float64] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class Traffic:
    """One class of traffic.

    Attributes:
        label: Its name.
        ranked: Counts to rank by, `(num_layers, num_experts)`.
        served: Counts to judge by: of other requests than `ranked`, if requests are
            known.
        weight: Its share of all traffic.
        held_out: Whether `served` are other requests.

    """

    label: str
    ranked: Counts
    served: Counts
    weight: float
    held_out: bool


def divide(
    counts: npt.NDArray[np.int64],
    requests: npt.NDArray[np.int64] | None,
    label: str,
    weight: float,
) -> Traffic:
    """Rank by every other request and judge by the rest, where requests are known."""
    if requests is None or len(requests) < 2:
        return Traffic(label, counts, counts, weight, False)
    ranked, served = requests[::2].sum(axis=0), requests[1::2].sum(axis=0)
    if not served.any() or not ranked.any():
        return Traffic(label, counts, counts, weight, False)
    return Traffic(label, ranked, served, weight, True)


@dataclass(frozen=True)
class Conditions:
    """What a placement is judged under.

    Attributes:
        top_k: Experts per token.
        row: Size of an expert.
        page_bytes: Page size in bytes.
        hardware: Bandwidths.
        census: Steps and the share of the time each takes; the shares sum to 1.
        resident_ms: Measured resident step times by streams.

    """

    top_k: int
    row: ExpertRow
    page_bytes: int
    hardware: Hardware
    census: Sequence[tuple[Step, float]]
    resident_ms: Mapping[int, float]

    def throughput(self, served: Counts, outside: npt.NDArray[np.int64]) -> float:
        """Mean tokens per second of traffic under a placement."""
        total = 0.0
        for step, share in self.census:
            one = predict(
                served,
                outside,
                self.top_k,
                self.row,
                step,
                self.hardware,
                self.resident_ms.get(step.streams),
            )
            total += share * step.tokens_per_s(one.step_ms)
        return total


@dataclass(frozen=True)
class Placement:
    """Rankings and cuts of all layers, and what they leave outside HBM.

    Attributes:
        mask: `(num_layers, num_experts)`: which experts are hot.
        outside: `(num_layers, 2, num_experts)` int64 bytes.

    """

    mask: npt.NDArray[np.bool_]
    outside: npt.NDArray[np.int64]


def place(
    counts: Counts, cuts: npt.ArrayLike, row: ExpertRow, page_bytes: int
) -> Placement:
    """Place rows by counts, under given cuts."""
    rankings = rank(counts)
    cuts = np.asarray(cuts)
    outside = np.stack(
        [
            host_bytes(row, len(ranking), ranking[:hot], page_bytes)
            for ranking, hot in zip(rankings.tolist(), cuts.tolist(), strict=True)
        ]
    )
    return Placement(hot_mask(rankings, cuts), outside)


@dataclass(frozen=True)
class Outcome:
    """What a class of traffic gets from a placement.

    Attributes:
        cold_share: Share of its selections that are cold.
        tokens_per_s: Mean over the census.

    """

    cold_share: float
    tokens_per_s: float


def outcome(traffic: Traffic, placed: Placement, conditions: Conditions) -> Outcome:
    """Judge a placement by a class of traffic."""
    return Outcome(
        cold_share(traffic.served, placed.mask),
        conditions.throughput(traffic.served, placed.outside),
    )


@dataclass(frozen=True)
class Verdict:
    """An answer in numbers and a sentence.

    Attributes:
        answer: One word: what to do.
        reason: The sentence.
        gain: Throughput of what is advised over the alternative, less 1.

    """

    answer: str
    reason: str
    gain: float


def _mean_speed(classes: Sequence[Traffic], speed: Mapping[str, float]) -> float:
    """Tokens of all classes over the time they take together."""
    weight = sum(one.weight for one in classes)
    return weight / sum(one.weight / speed[one.label] for one in classes)


def _together(
    classes: Sequence[Traffic], outcomes: Mapping[str, Outcome]
) -> tuple[float, float]:
    """Mean speed and cold share of all classes."""
    weight = sum(one.weight for one in classes)
    cold = sum(one.weight * outcomes[one.label].cold_share for one in classes)
    speed = {label: one.tokens_per_s for label, one in outcomes.items()}
    return _mean_speed(classes, speed), cold / weight


def is_it_worth_it(
    classes: Sequence[Traffic],
    best: Mapping[str, Outcome],
    resident: Mapping[str, float],
    positional: Mapping[str, float],
    cold_rows: float,
    threshold: float,
) -> Verdict:
    """Whether maps beat offloading by position.

    Args:
        classes: The traffic.
        best: What each class gets from the map that is advised for it.
        resident: Tokens per second with every row in HBM.
        positional: The same with as many bytes offloaded by position.
        cold_rows: Share of the rows that the budget leaves cold.
        threshold: Gains below it are not worth acting on.

    """
    with_map, cold = _together(classes, best)
    by_position = _mean_speed(classes, positional)
    gain = with_map / by_position - 1
    if cold_rows == 0:
        return Verdict(
            "no",
            "Every row fits into the budget: serve with the resident provider, which "
            "needs no map.",
            0.0,
        )
    facts = (
        f"Maps leave {cold:.1%} of the selections cold with {cold_rows:.0%} of the "
        f"rows on the host; {with_map:.0f} tok/s against {by_position:.0f} offloaded "
        f"by position and {_mean_speed(classes, resident):.0f} if all fitted into HBM."
    )
    if gain < threshold:
        return Verdict("no", f"Not worth it: {gain:+.0%}. {facts}", gain)
    return Verdict("yes", f"Worth it: {gain:+.0%}. {facts}", gain)


def one_map_or_several(
    classes: Sequence[Traffic],
    own: Mapping[str, Outcome],
    blended: Mapping[str, Outcome],
    threshold: float,
) -> Verdict:
    """Whether one blended map serves every class nearly as well as its own."""
    if len(classes) == 1:
        return Verdict("one", "There is one class of traffic.", 0.0)
    losses = {
        traffic.label: 1
        - blended[traffic.label].tokens_per_s / own[traffic.label].tokens_per_s
        for traffic in classes
    }
    worst = max(losses, key=lambda label: losses[label])
    loss = losses[worst]
    cold = f"{own[worst].cold_share:.1%} to {blended[worst].cold_share:.1%}"
    if loss < threshold:
        return Verdict(
            "one",
            f"One blended map: no class loses more than {max(loss, 0):.1%} against its "
            f"own map ({worst}, cold {cold}).",
            max(loss, 0.0),
        )
    apart = [label for label, one in losses.items() if one >= threshold]
    return Verdict(
        "several",
        f"A map for each of {', '.join(apart)}: the blend costs {worst} {loss:.0%} of "
        f"its throughput (cold {cold}). Serve each class from servers of its own map.",
        loss,
    )


def is_it_time_for_a_new_map(
    classes: Sequence[Traffic],
    current: Mapping[str, Outcome],
    renewed: Mapping[str, Outcome],
    common: float,
    threshold: float,
) -> Verdict:
    """Whether the traffic moved away from the map that is served.

    Args:
        classes: The traffic now.
        current: What each class gets from the map that is served.
        renewed: What it would get from a new map with the same cuts.
        common: Share of the hot rows that both maps have.
        threshold: Gains below it are not worth a restart.

    """
    speed, cold = _together(classes, current)
    new_speed, new_cold = _together(classes, renewed)
    gain = new_speed / speed - 1
    facts = (
        f"the map leaves {cold:.1%} of the selections cold, a new one {new_cold:.1%}; "
        f"{common:.0%} of the hot rows stay"
    )
    if gain < threshold:
        return Verdict(
            "keep", f"Keep the map: a new one gives {gain:+.1%} ({facts}).", gain
        )
    return Verdict("renew", f"Make a new map: {gain:+.0%} ({facts}).", gain)


@dataclass(frozen=True)
class Assessment:
    """What every class of traffic gets from every map.

    Attributes:
        classes: The traffic.
        own: From a map of the class's own.
        foreign: From the maps of the other classes, by their labels.
        blend: From one map for all classes.
        current: From the maps that are there, by their names.
        common: Share of the hot rows of the class's best current map that its own map
            has, and that the blend has; by class.
        resident: Tokens per second with every row in HBM.
        positional: The same with as many bytes offloaded by position.
        cold_rows: Share of the rows that are cold.

    """

    classes: Sequence[Traffic]
    own: Mapping[str, Outcome]
    foreign: Mapping[str, Mapping[str, Outcome]]
    blend: Mapping[str, Outcome]
    current: Mapping[str, Mapping[str, Outcome]]
    common: Mapping[str, tuple[float, float]]
    resident: Mapping[str, float]
    positional: Mapping[str, float]
    cold_rows: float

    def best_current(self, label: str) -> str:
        """The map that is there and serves a class best."""
        there = self.current[label]
        return max(there, key=lambda name: there[name].tokens_per_s)


def blended(classes: Sequence[Traffic]) -> npt.NDArray[np.float64]:
    """Counts of all classes, each with its weight, to rank by."""
    return sum(one.ranked / one.ranked.sum() * one.weight for one in classes)


def assess(
    classes: Sequence[Traffic],
    cuts: npt.ArrayLike,
    current: Mapping[str, Placement],
    conditions: Conditions,
) -> Assessment:
    """Place and judge.

    Args:
        classes: The traffic.
        cuts: `(num_layers,)` hot rows of the maps that are made.
        current: Placements of the maps that are there, by their names.
        conditions: What they are judged under.

    """
    row, page_bytes = conditions.row, conditions.page_bytes
    shape = np.shape(classes[0].ranked)
    for_all = place(blended(classes), cuts, row, page_bytes)
    own = {one.label: place(one.ranked, cuts, row, page_bytes) for one in classes}
    hot_bytes = sum(
        hot_page_bytes(row, shape[1], np.flatnonzero(mask), page_bytes)
        for mask in for_all.mask
    )
    cold_bytes = max(shape[0] * shape[1] * row.num_bytes - hot_bytes, 0)
    by_position = positional_host_bytes(*shape, row, cold_bytes)
    nowhere = np.zeros_like(by_position)
    there = {
        one.label: {
            name: outcome(one, placed, conditions) for name, placed in current.items()
        }
        for one in classes
    }
    found = Assessment(
        classes=classes,
        own={one.label: outcome(one, own[one.label], conditions) for one in classes},
        foreign={
            one.label: {
                label: outcome(one, placed, conditions)
                for label, placed in own.items()
                if label != one.label
            }
            for one in classes
        },
        blend={one.label: outcome(one, for_all, conditions) for one in classes},
        current=there,
        common={},
        resident={
            one.label: conditions.throughput(one.served, nowhere) for one in classes
        },
        positional={
            one.label: conditions.throughput(one.served, by_position) for one in classes
        },
        cold_rows=1 - float(np.sum(cuts)) / (shape[0] * shape[1]),
    )
    if not current:
        return found
    common = {}
    for one in classes:
        mask = current[found.best_current(one.label)].mask
        common[one.label] = (
            float(overlap(mask, own[one.label].mask).mean()),
            float(overlap(mask, for_all.mask).mean()),
        )
    return replace(found, common=common)


def advise(found: Assessment, threshold: float) -> dict[str, Verdict]:
    """Answer every question.

    Args:
        found: What every class gets.
        threshold: Gains of throughput below it are not worth acting on.

    Returns:
        `worth_it` and `maps`, and `new_map` if there are maps.

    """
    classes = found.classes
    maps = one_map_or_several(classes, found.own, found.blend, threshold)
    several = maps.answer == "several"
    worth_it = is_it_worth_it(
        classes,
        found.own if several else found.blend,
        found.resident,
        found.positional,
        found.cold_rows,
        threshold,
    )
    verdicts = {"worth_it": worth_it, "maps": maps}
    if not found.common:
        return verdicts
    # One map that is served now is held against one new map.
    apart = several and len(next(iter(found.current.values()))) > 1
    verdicts["new_map"] = is_it_time_for_a_new_map(
        classes,
        {
            one.label: found.current[one.label][found.best_current(one.label)]
            for one in classes
        },
        found.own if apart else found.blend,
        float(np.mean([found.common[one.label][0 if apart else 1] for one in classes])),
        threshold,
    )
    return verdicts
