# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm expert-map advise`: one map or several, a new or the old, worth it or not."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.model_executor.layers.fused_moe.expert_profile.advise import (
    Assessment,
    Conditions,
    Placement,
    Traffic,
    advise,
    assess,
    blended,
    divide,
)
from vllm.model_executor.layers.fused_moe.expert_profile.errors import (
    ExpertPlanError,
)
from vllm.model_executor.layers.fused_moe.expert_profile.plan import (
    choose_cut,
    phase_counts,
)
from vllm.model_executor.layers.fused_moe.expert_profile.predict import Step
from vllm.model_executor.layers.fused_moe.expert_profile.profile_file import (
    ExpertProfile,
)
from vllm.model_executor.layers.fused_moe.expert_profile.row_bytes import (
    ExpertRow,
    map_host_bytes,
)
from vllm.model_executor.layers.fused_moe.expert_profile.score import (
    hot_mask,
    map_cuts,
    map_rankings,
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
    cuts = _cuts(args, current, names, classes, recorded.fingerprint.top_k, row)
    placements = {
        named.path.stem: Placement(
            hot_mask(
                map_rankings(named.expert_map, names),
                map_cuts(named.expert_map, names),
            ),
            map_host_bytes(named.expert_map, names, row, args.page_bytes),
        )
        for named in current
    }
    found = assess(classes, cuts, placements, conditions)
    verdicts = advise(found, args.threshold)
    data: dict[str, Any] = {
        "hot_rows": int(np.sum(cuts)),
        "rows": len(names) * recorded.num_experts,
        "classes": {one.label: _class_data(found, one) for one in classes},
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


def _traffic(
    args: argparse.Namespace,
    profile: ExpertProfile,
    label: str,
    weight: float | None,
) -> Traffic:
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


def _cuts(
    args: argparse.Namespace,
    current: list[NamedMap],
    names: Sequence[str],
    classes: Sequence[Traffic],
    top_k: int,
    row: ExpertRow,
) -> npt.NDArray[np.int64]:
    request = cut_request(args)
    given = (request.hot_rows, request.cold_fraction, request.hot_gib)
    if any(value is not None for value in given):
        counts = blended(classes)
        return choose_cut(counts, request, top_k, row, args.page_bytes)
    if not current:
        raise ExpertPlanError(
            "there is no budget to plan for. Give --hot-gib, --hot-rows or "
            "--cold-fraction, or --current, whose cuts are taken then."
        )
    return map_cuts(current[0].expert_map, names)


def _class_data(found: Assessment, one: Traffic) -> dict[str, Any]:
    foreign, current = found.foreign[one.label], found.current[one.label]
    return {
        "weight": one.weight / sum(each.weight for each in found.classes),
        "held_out": one.held_out,
        "own": asdict(found.own[one.label]),
        "blend": asdict(found.blend[one.label]),
        "foreign": {name: asdict(each) for name, each in foreign.items()},
        "current": {name: asdict(each) for name, each in current.items()},
        "resident_tokens_per_s": found.resident[one.label],
        "positional_tokens_per_s": found.positional[one.label],
    }


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
