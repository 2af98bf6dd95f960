# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm expert-map advise`: one map or several, a new or the old, worth it or not."""

import argparse
from dataclasses import asdict
from typing import Any

import numpy as np

from vllm.model_executor.layers.fused_moe.expert_profile.advise import (
    Conditions,
    Outcome,
    Placement,
    Traffic,
    divide,
    is_it_time_for_a_new_map,
    is_it_worth_it,
    one_map_or_several,
    outcome,
    place,
)
from vllm.model_executor.layers.fused_moe.expert_profile.errors import (
    ExpertPlanError,
)
from vllm.model_executor.layers.fused_moe.expert_profile.plan import (
    choose_cut,
    phase_counts,
)
from vllm.model_executor.layers.fused_moe.expert_profile.predict import (
    Step,
    positional_host_bytes,
)
from vllm.model_executor.layers.fused_moe.expert_profile.row_bytes import (
    ExpertRow,
    hot_page_bytes,
    map_host_bytes,
)
from vllm.model_executor.layers.fused_moe.expert_profile.score import (
    hot_mask,
    map_cuts,
    map_rankings,
    overlap,
)
from vllm.model_executor.layers.fused_moe.expert_profile.verbs.common import (
    Answer,
    NamedMap,
    add_phase,
    add_row_size,
    check_same_model,
    percent,
    row_of,
    table,
    weighted_profiles,
)
from vllm.model_executor.layers.fused_moe.expert_profile.verbs.hardware import (
    add_hardware,
    hardware_of,
    resident_times,
    step_of,
)
from vllm.model_executor.layers.fused_moe.expert_profile.verbs.index import maps_at
from vllm.model_executor.layers.fused_moe.expert_profile.verbs.plan import (
    add_budget,
    cut_request,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "profiles",
        nargs="+",
        metavar="PROFILE[=WEIGHT]",
        help="Classes of traffic; a weight is the class's share of it, the tokens of "
        "the profile if not given.",
    )
    parser.add_argument(
        "--census",
        nargs="+",
        default=["1"],
        metavar="STREAMS[=SHARE]",
        help="How many streams decode at the same time, and for which share of the "
        "time: 1=20 8=50 16=30.",
    )
    parser.add_argument(
        "--current", help="The map that is served now, or a folder of maps."
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.05,
        help="A gain of throughput below it is not worth acting on.",
    )
    parser.add_argument(
        "--exit-code",
        action="store_true",
        help="Exit with status 3 if a new map is advised; needs --current.",
    )
    add_budget(parser, required=False)
    add_phase(parser)
    add_row_size(parser)
    add_hardware(parser)


def run(args: argparse.Namespace) -> Answer:
    """Advise.

    Raises:
        ExpertMapError: The current map cannot be used.
        ExpertProfileError: A profile cannot be used.
        ExpertPlanError: An argument is missing or out of range.

    """
    if args.exit_code and args.current is None:
        raise ExpertPlanError("--exit-code has no effect without --current. Give both.")
    parts = weighted_profiles(args.profiles)
    weights = [weighted.weight for _, weighted in parts]
    if len({weight is None for weight in weights}) > 1:
        raise ExpertPlanError(
            "some profiles have a weight and others not. Weigh all or none."
        )
    recorded = parts[0][0].profile
    names = recorded.layer_names
    labels = [named.label for named, _ in parts]
    if len(set(labels)) < len(labels):
        labels = [str(named.path) for named, _ in parts]
    classes = [
        _traffic(args, named.profile, label, weighted.weight)
        for (named, weighted), label in zip(parts, labels, strict=True)
    ]
    row = row_of(args, recorded.fingerprint)
    conditions = Conditions(
        recorded.fingerprint.top_k,
        row,
        args.page_bytes,
        hardware_of(args),
        census_of(args),
        resident_times(args),
    )
    current = [] if args.current is None else maps_at(args.current)
    for named in current:
        check_same_model(named, recorded.fingerprint, names)
    blend = sum(one.ranked / one.ranked.sum() * one.weight for one in classes)
    cuts = _cuts(args, current, names, blend, recorded.fingerprint.top_k, row)
    shape = len(names), recorded.num_experts
    blended = place(blend, cuts, row, args.page_bytes)
    own = {one.label: place(one.ranked, cuts, row, args.page_bytes) for one in classes}
    served = {
        named.path.stem: Placement(
            hot_mask(
                map_rankings(named.expert_map, names),
                map_cuts(named.expert_map, names),
            ),
            map_host_bytes(named.expert_map, names, row, args.page_bytes),
        )
        for named in current
    }
    outcomes = {
        "own": {one.label: outcome(one, own[one.label], conditions) for one in classes},
        "blend": {one.label: outcome(one, blended, conditions) for one in classes},
    }
    foreign = {
        one.label: {
            other: outcome(one, placed, conditions)
            for other, placed in own.items()
            if other != one.label
        }
        for one in classes
    }
    existing = {
        one.label: {
            name: outcome(one, placed, conditions) for name, placed in served.items()
        }
        for one in classes
    }
    verdicts = _verdicts(
        args, classes, outcomes, existing, served, blended, own, conditions, shape, cuts
    )
    data: dict[str, Any] = {
        "hot_rows": int(np.sum(cuts)),
        "rows": shape[0] * shape[1],
        "classes": {
            one.label: {
                "weight": one.weight / sum(x.weight for x in classes),
                "held_out": one.held_out,
                "own": asdict(outcomes["own"][one.label]),
                "blend": asdict(outcomes["blend"][one.label]),
                "foreign": {k: asdict(v) for k, v in foreign[one.label].items()},
                "current": {k: asdict(v) for k, v in existing[one.label].items()},
            }
            for one in classes
        },
        "advice": {name: asdict(one) for name, one in verdicts.items()},
    }
    warnings = [
        f"{one.label}: its requests are not told apart, so its own map is judged by "
        "what it was ranked by, which is too good. Import requests (expert-map import) "
        "for a held-out judgement."
        for one in classes
        if not one.held_out
    ]
    renew = verdicts.get("new_map")
    satisfied = not (args.exit_code and renew and renew.answer == "renew")
    return Answer(data, _text(data), tuple(warnings), satisfied)


def _traffic(args, profile, label: str, weight: float | None) -> Traffic:
    counts = phase_counts(profile, args.phase)
    if not counts.any():
        raise ExpertPlanError(
            f"{label}: the profile has no selections of phase {args.phase!r}. Choose "
            "another --phase, or record its traffic."
        )
    requests = profile.counts_request if args.phase == "both" else None
    if weight is None:
        weight = float(counts.sum())
    if not 0 < weight < float("inf"):
        raise ExpertPlanError(
            f"{label}: weight {weight:g} is not above 0. Give its share of the traffic."
        )
    return divide(counts, requests, label, weight)


def census_of(args: argparse.Namespace) -> list[tuple[Step, float]]:
    """The steps of `--census` and their shares of the time, which sum to 1.

    Raises:
        ExpertPlanError: An entry is not STREAMS[=SHARE].

    """
    census = []
    for entry in args.census:
        streams, equals, share = entry.partition("=")
        try:
            step, part = int(streams), float(share) if equals else 1.0
            if not 0 < part < float("inf"):
                raise ValueError
        except ValueError:
            raise ExpertPlanError(
                f"--census {entry!r} is not STREAMS=SHARE. Give, for example, 8=50."
            ) from None
        census.append((step_of(args, step), part))
    total = sum(share for _, share in census)
    return [(step, share / total) for step, share in census]


def _cuts(args, current: list[NamedMap], names, blend, top_k: int, row: ExpertRow):
    request = cut_request(args)
    given = (request.hot_rows, request.cold_fraction, request.hot_gib)
    if any(value is not None for value in given):
        return choose_cut(blend, request, top_k, row, args.page_bytes)
    if not current:
        raise ExpertPlanError(
            "there is no budget to plan for. Give --hot-gib, --hot-rows or "
            "--cold-fraction, or --current, whose cuts are taken then."
        )
    return map_cuts(current[0].expert_map, names)


def _verdicts(
    args, classes, outcomes, existing, served, blended, own, conditions, shape, cuts
):
    row, page_bytes = conditions.row, conditions.page_bytes
    everything = np.zeros((shape[0], 2, shape[1]), dtype=np.int64)
    hot_bytes = sum(
        hot_page_bytes(row, shape[1], np.flatnonzero(mask), page_bytes)
        for mask in blended.mask
    )
    cold_bytes = max(shape[0] * shape[1] * row.num_bytes - hot_bytes, 0)
    by_position = positional_host_bytes(*shape, row, cold_bytes)
    resident, positional = (
        {one.label: conditions.throughput(one.served, outside) for one in classes}
        for outside in (everything, by_position)
    )
    cold_rows = 1 - float(np.sum(cuts)) / (shape[0] * shape[1])
    maps = one_map_or_several(
        classes, outcomes["own"], outcomes["blend"], args.threshold
    )
    advised = outcomes["own" if maps.answer == "several" else "blend"]
    verdicts = {
        "worth_it": is_it_worth_it(
            classes, advised, resident, positional, cold_rows, args.threshold
        ),
        "maps": maps,
    }
    if served:
        # Each class is served by the best of the maps that are there.
        best: dict[str, Outcome] = {}
        chosen: dict[str, str] = {}
        for one in classes:
            there = existing[one.label]
            chosen[one.label] = max(there, key=lambda name: there[name].tokens_per_s)
            best[one.label] = there[chosen[one.label]]
        several = maps.answer == "several" and len(served) > 1
        renewed = outcomes["own"] if several else outcomes["blend"]
        common = np.mean(
            [
                overlap(
                    served[chosen[one.label]].mask,
                    own[one.label].mask if several else blended.mask,
                ).mean()
                for one in classes
            ]
        )
        verdicts["new_map"] = is_it_time_for_a_new_map(
            classes, best, renewed, float(common), args.threshold
        )
    return verdicts


def _text(data: dict[str, Any]) -> str:
    rows = []
    for label, one in data["classes"].items():
        foreign = max(
            one["foreign"].values(), key=lambda x: x["cold_share"], default=None
        )
        current = max(
            one["current"].items(), key=lambda x: x[1]["tokens_per_s"], default=None
        )
        rows.append(
            (
                label,
                f"{one['weight']:.0%}",
                _cell(one["own"]) + ("" if one["held_out"] else "*"),
                _cell(one["blend"]),
                "–" if foreign is None else _cell(foreign),
                "–" if current is None else f"{_cell(current[1])} ({current[0]})",
            )
        )
    head = ("class", "traffic", "own map", "blended map", "worst foreign", "current")
    notes = (
        "Cells: cold selections, tok/s over the census. *: judged by what it was "
        "ranked by."
    )
    advice = "\n".join(one["reason"] for one in data["advice"].values())
    return "\n\n".join([table(head, rows), notes, advice])


def _cell(one: dict[str, float]) -> str:
    return f"{percent(one['cold_share'])}, {one['tokens_per_s']:.0f}"
