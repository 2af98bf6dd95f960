# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm expert-map score`: how much of a profile's traffic a map leaves cold."""

import argparse
from typing import Any

from vllm.model_executor.layers.fused_moe.expert_profile.errors import (
    ExpertPlanError,
)
from vllm.model_executor.layers.fused_moe.expert_profile.plan import phase_counts
from vllm.model_executor.layers.fused_moe.expert_profile.score import (
    bootstrap,
    cold_share,
    cold_share_by_layer,
    held_out_cold_share,
    hot_mask,
    map_cuts,
    map_rankings,
    map_shares,
    overlap,
    planned_from,
    rank,
    spearman,
)
from vllm.model_executor.layers.fused_moe.expert_profile.verbs.common import (
    Answer,
    NamedMap,
    NamedProfile,
    add_phase,
    check_same_model,
    percent,
    progress,
    read_profiles,
    table,
)
from vllm.model_executor.layers.fused_moe.expert_profile.verbs.index import (
    maps_at,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("map", help="A map, or a folder of maps.")
    parser.add_argument("profiles", nargs="+", metavar="PROFILE")
    add_phase(parser)
    parser.add_argument(
        "--folds",
        type=int,
        help="Where requests are known: plan on all folds but one and score on that "
        "one; as many folds as requests if not given (leave one out).",
    )
    parser.add_argument("--layers", action="store_true", help="Also print every layer.")
    parser.add_argument(
        "--max-cold",
        type=float,
        metavar="SHARE",
        help="Exit with status 3 if a cold share is above it, 0 to 1.",
    )
    parser.add_argument(
        "--confidence", type=float, default=0.95, help="Of the interval."
    )
    parser.add_argument("--seed", type=int, default=0, help="Of folds and interval.")


def run(args: argparse.Namespace) -> Answer:
    """Score maps on profiles.

    Raises:
        ExpertMapError: A map cannot be used.
        ExpertProfileError: A profile cannot be used.
        ExpertPlanError: An argument is out of range.

    """
    for option in ("confidence", "max_cold"):
        value = getattr(args, option)
        if value is not None and not 0 <= value <= 1:
            raise ExpertPlanError(
                f"--{option.replace('_', '-')} {value:g} is outside 0 … 1. Give a "
                "share."
            )
    profiles = read_profiles(args.profiles)
    maps = maps_at(args.map)
    scores = [score(args, one, profile) for one in maps for profile in profiles]
    warnings = [
        f"{one['map']} was planned from {one['profile']}, so its cold share is too "
        "good for other traffic; see the held-out column, or score a profile of other "
        "requests."
        for one in scores
        if one["planned_from_this_profile"]
    ]
    satisfied = args.max_cold is None or all(
        one["cold_share"] <= args.max_cold for one in scores
    )
    return Answer({"scores": scores}, _text(args, scores), tuple(warnings), satisfied)


def score(
    args: argparse.Namespace, named: NamedMap, profile: NamedProfile
) -> dict[str, Any]:
    """Score one map on one profile."""
    recorded = profile.profile
    names = recorded.layer_names
    check_same_model(named, recorded.fingerprint, names)
    counts = phase_counts(recorded, args.phase)
    if not counts.any():
        raise ExpertPlanError(
            f"{profile.path}: it has no selections of phase {args.phase!r}. Choose "
            "another --phase, or record its traffic."
        )
    cuts = map_cuts(named.expert_map, names)
    mask = hot_mask(map_rankings(named.expert_map, names), cuts)
    own = hot_mask(rank(counts), cuts)
    requests = recorded.counts_request if args.phase == "both" else None
    interval = bootstrap(
        counts, requests, mask, confidence=args.confidence, seed=args.seed
    )
    by_layer = cold_share_by_layer(counts, mask)
    overlaps = overlap(mask, own)
    correlations = spearman(map_shares(named.expert_map, names), counts)
    held_out, num_folds = None, None
    if requests is not None and len(requests) > 1:
        num_folds = len(requests) if args.folds is None else args.folds
        if not 2 <= num_folds <= len(requests):
            raise ExpertPlanError(
                f"--folds {num_folds} is outside 2 … {len(requests)}, the requests of "
                f"{profile.path}. Give fewer folds."
            )
        held_out = held_out_cold_share(
            requests, cuts, num_folds, args.seed, progress("folds", num_folds)
        )
    elif args.folds is not None:
        raise ExpertPlanError(
            f"--folds has no effect on {profile.path}, which does not tell requests of "
            f"phase {args.phase!r} apart. Leave it out, or import the requests "
            "(expert-map import)."
        )
    return {
        "map": str(named.path),
        "profile": str(profile.path),
        "label": profile.label,
        "cold_share": cold_share(counts, mask),
        "cold_share_low": interval.low,
        "cold_share_high": interval.high,
        "interval_over": interval.unit,
        "planned_from_this_profile": planned_from(
            named.expert_map, profile.sha256, counts, names
        ),
        "held_out_cold_share": held_out,
        "folds": num_folds,
        "best_cold_share": cold_share(counts, own),
        "overlap": float(overlaps.mean()),
        "spearman": float(correlations.mean()),
        "worst_layer": names[int(by_layer.argmax())],
        "layers": {
            name: {
                "hot": int(hot),
                "cold_share": float(cold),
                "overlap": float(common),
                "spearman": float(rho),
            }
            for name, hot, cold, common, rho in zip(
                names, cuts, by_layer, overlaps, correlations, strict=True
            )
        },
    }


def _text(args: argparse.Namespace, scores: list[dict[str, Any]]) -> str:
    rows = [
        (
            one["map"],
            one["label"],
            percent(one["cold_share"]) + ("*" * one["planned_from_this_profile"]),
            f"{percent(one['cold_share_low'])} … {percent(one['cold_share_high'])}",
            "–"
            if one["held_out_cold_share"] is None
            else percent(one["held_out_cold_share"]),
            percent(one["best_cold_share"]),
            f"{one['overlap']:.0%}",
            f"{one['spearman']:.2f}",
        )
        for one in scores
    ]
    head = (
        *("map", "profile", "cold", f"{args.confidence:.0%} interval"),
        *("held out", "own map", "overlap", "Spearman"),
    )
    notes = [
        "cold: share of the profile's selections that the map leaves in host memory.",
        "own map: the same cuts, ranked by this very profile.",
        "overlap: of the hot sets of the two.",
    ]
    if any(one["planned_from_this_profile"] for one in scores):
        notes.append("*: scored on what it was planned from, so too good.")
    if any(one["held_out_cold_share"] is not None for one in scores):
        notes.append(
            "held out: the same cuts, ranked by the profile's other requests and "
            f"scored on each fold ({scores[0]['folds']} folds)."
        )
    if any(one["interval_over"] == "selections" for one in scores):
        notes.append(
            "The interval takes selections as independent, for want of requests: it is "
            "too narrow."
        )
    blocks = [table(head, rows), "\n".join(notes)]
    if args.layers:
        for one in scores:
            blocks.append(f"{one['map']} on {one['label']}\n" + _layers(one["layers"]))
    return "\n\n".join(blocks)


def _layers(layers: dict[str, dict[str, float]]) -> str:
    return table(
        ("layer", "hot rows", "cold", "overlap", "Spearman"),
        [
            (
                name,
                one["hot"],
                percent(one["cold_share"]),
                f"{one['overlap']:.0%}",
                f"{one['spearman']:.2f}",
            )
            for name, one in layers.items()
        ],
    )
