# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm expert-map merge`: add profiles up, or blend maps.

Profiles hold counts, so they add up as if their traffic had been recorded in one. Maps
hold shares only: a blend takes the weighted mean of the shares and cuts it anew.
Planning from the profiles themselves is the same and keeps their counts, so prefer it.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from vllm.model_executor.layers.fused_moe.expert_profile.errors import (
    ExpertPlanError,
)
from vllm.model_executor.layers.fused_moe.expert_profile.plan import (
    make_map,
    optimal_cut,
)
from vllm.model_executor.layers.fused_moe.expert_profile.profile_file import (
    merge_profiles,
    write_profile,
)
from vllm.model_executor.layers.fused_moe.expert_profile.score import (
    map_cuts,
    map_shares,
)
from vllm.model_executor.layers.fused_moe.expert_profile.verbs.common import (
    Answer,
    check_same_model,
    is_map,
    percent,
    read_map,
    split_weight,
    weighted_profiles,
    write_text,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import Budget

Split = Sequence[tuple[str, float | None]]
"""Path and weight of each argument."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE[=WEIGHT]",
        help="Profiles, or maps; only maps have weights (their tokens if not given).",
    )
    parser.add_argument("--out", "-o", required=True, help="The file to write.")
    parser.add_argument(
        "--hot-rows",
        type=int,
        help="Maps: hot rows of a layer, on average. Needed if the maps have "
        "different numbers of hot rows.",
    )


def run(args: argparse.Namespace) -> Answer:
    """Merge and write.

    Raises:
        ExpertMapError: A map cannot be used or is of another model.
        ExpertProfileError: The same of a profile.
        ExpertPlanError: Maps and profiles are mixed, or a weight is no number.

    """
    split = [split_weight(argument) for argument in args.files]
    kinds = {is_map(path) for path, _ in split}
    if len(kinds) > 1:
        raise ExpertPlanError(
            f"{' '.join(path for path, _ in split)}: these are maps and profiles. "
            "Merge files of one kind."
        )
    return _merge_maps(args, split) if kinds.pop() else _merge_profiles(args, split)


def _merge_profiles(args: argparse.Namespace, split: Split) -> Answer:
    if weighted := [path for path, weight in split if weight is not None]:
        raise ExpertPlanError(
            f"{weighted[0]}: a weight has no effect, since profiles hold counts. Give "
            "weights to vllm expert-map plan."
        )
    if args.hot_rows is not None:
        raise ExpertPlanError(
            "--hot-rows has no effect on profiles, which have no cut. Leave it out."
        )
    named = [one for one, _ in weighted_profiles([path for path, _ in split])]
    merged = merge_profiles([one.profile for one in named], [one.path for one in named])
    write_profile(merged, args.out)
    requests = merged.counts_request
    data = {
        "profile": args.out,
        "tokens_prefill": merged.tokens_prefill,
        "tokens_decode": merged.tokens_decode,
        "requests": None if requests is None else len(requests),
        "labels": list(merged.labels),
        "start": merged.start,
        "end": merged.end,
    }
    text = (
        f"profile      {args.out}\n"
        f"tokens       {merged.tokens_prefill:,} prefill, {merged.tokens_decode:,} "
        f"decode, from {len(named)} profiles "
        f"({', '.join(merged.labels) or 'no labels'})\n"
        f"requests     {'not told apart' if requests is None else len(requests)}"
    )
    return Answer(data, text)


def _merge_maps(args: argparse.Namespace, split: Split) -> Answer:
    maps = [read_map(path) for path, _ in split]
    first = maps[0].expert_map
    names = maps[0].layer_names
    for one in maps[1:]:
        check_same_model(one, first.fingerprint, names)
    if drafts := [one for one in maps if one.expert_map.draft_layers]:
        raise ExpertPlanError(
            f"{drafts[0].path}: draft_layers would be lost: blending covers the layers "
            "of the target model. Blend maps without them."
        )
    given = [weight for _, weight in split]
    if None in given and set(given) != {None}:
        raise ExpertPlanError(
            "some maps have a weight and others not. Weigh all or none."
        )
    weights = [
        sum(profile.tokens for profile in one.expert_map.profiles)
        if weight is None
        else weight
        for one, weight in zip(maps, given, strict=True)
    ]
    for one, weight in zip(maps, weights, strict=True):
        if not 0 < weight < float("inf"):
            raise ExpertPlanError(
                f"{one.path}: its weight is {weight:g}, not above 0. Give MAP=WEIGHT, "
                "the map's share of the traffic, for every map."
            )
    totals = {int(map_cuts(one.expert_map, names).sum()) for one in maps}
    if args.hot_rows is not None:
        total = args.hot_rows * len(names)
    elif len(totals) == 1:
        total = totals.pop()
    else:
        raise ExpertPlanError(
            f"the maps keep {sorted(totals)} rows hot. Say how many the blend shall "
            "keep in a layer, with --hot-rows."
        )
    shares = sum(
        map_shares(one.expert_map, names) * (weight / sum(weights))
        for one, weight in zip(maps, weights, strict=True)
    )
    experts = first.fingerprint.num_experts
    if not 0 <= total <= experts * len(names):
        raise ExpertPlanError(
            f"--hot-rows {args.hot_rows} is outside 0 … {experts}, the experts of a "
            "layer. Give the rows of one layer."
        )
    floor = min(first.fingerprint.top_k, total // len(names))
    cuts = optimal_cut(np.asarray(shares), 1, total, floor)
    sources = {
        profile.sha256: profile for one in maps for profile in one.expert_map.profiles
    }
    budget = Budget(
        asked=f"blend of {', '.join(one.path.name for one in maps)}",
        cut="optimal",
        phase=first.budget.phase if first.budget else "both",
        hot_rows=total,
    )
    profiles = list(sources.values())
    blended = make_map(shares, cuts, names, first.fingerprint, profiles, budget)
    write_text(args.out, blended.to_json())
    data = {
        "map": args.out,
        "hot_rows": total,
        "weights": [weight / sum(weights) for weight in weights],
        "expected_cold_share": blended.expected_cold_share,
    }
    text = (
        f"map          {args.out}, a blend of {len(maps)} maps\n"
        f"hot rows     {total} in {len(names)} layers\n"
        f"cold         {percent(blended.expected_cold_share)} of the blended traffic"
    )
    return Answer(data, text)
