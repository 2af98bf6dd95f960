# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm expert-map diff`: compare two maps or two profiles."""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm.model_executor.layers.fused_moe.expert_profile.errors import (
    ExpertPlanError,
)
from vllm.model_executor.layers.fused_moe.expert_profile.plan import phase_counts
from vllm.model_executor.layers.fused_moe.expert_profile.score import (
    HotMask,
    hot_mask,
    map_cuts,
    map_rankings,
    map_shares,
    overlap,
    rank,
    spearman,
)
from vllm.model_executor.layers.fused_moe.expert_profile.verbs.common import (
    Answer,
    add_phase,
    check_same_model,
    is_map,
    percent,
    read_map,
    read_profiles,
    table,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("one", metavar="FILE", help="A map or a profile.")
    parser.add_argument("other", metavar="FILE", help="Another one of the same kind.")
    add_phase(parser)
    parser.add_argument(
        "--hot-rows",
        type=int,
        help="Two profiles: compare the hot sets of this many rows a layer; a quarter "
        "of the experts if not given.",
    )
    parser.add_argument("--layers", action="store_true", help="Also print every layer.")
    parser.add_argument(
        "--exit-code",
        action="store_true",
        help="Exit with status 3 if hot sets (maps) or counts (profiles) differ.",
    )


def run(args: argparse.Namespace) -> Answer:
    """Compare.

    Raises:
        ExpertMapError: A map cannot be used, or the two are of different models.
        ExpertProfileError: The same of profiles.
        ExpertPlanError: One is a map and the other a profile.

    """
    kinds = is_map(args.one), is_map(args.other)
    if kinds[0] != kinds[1]:
        raise ExpertPlanError(
            f"{args.one} is a {'map' if kinds[0] else 'profile'} and {args.other} is "
            f"a {'map' if kinds[1] else 'profile'}. Compare two of a kind; vllm "
            "expert-map score judges a map by a profile."
        )
    return _diff_maps(args) if kinds[0] else _diff_profiles(args)


def _diff_maps(args: argparse.Namespace) -> Answer:
    if args.hot_rows is not None:
        raise ExpertPlanError(
            "--hot-rows has no effect on maps, which have their own cuts. Leave it out."
        )
    one, other = read_map(args.one), read_map(args.other)
    names = one.layer_names
    check_same_model(other, one.expert_map.fingerprint, names)
    cuts = [map_cuts(named.expert_map, names) for named in (one, other)]
    masks = [
        hot_mask(map_rankings(named.expert_map, names), cut)
        for named, cut in zip((one, other), cuts, strict=True)
    ]
    shares = [map_shares(named.expert_map, names) for named in (one, other)]
    return _answer(
        args, names, shares, masks, "hot rows", not (masks[0] ^ masks[1]).any()
    )


def _diff_profiles(args: argparse.Namespace) -> Answer:
    profiles = read_profiles([args.one, args.other])
    names = profiles[0].profile.layer_names
    experts = profiles[0].profile.num_experts
    hot = max(experts // 4, 1) if args.hot_rows is None else args.hot_rows
    if not 0 <= hot <= experts:
        raise ExpertPlanError(
            f"--hot-rows {hot} is outside 0 … {experts}, the experts of a layer. Give "
            "the rows of one layer."
        )
    counts = [phase_counts(named.profile, args.phase) for named in profiles]
    shares = [one / np.maximum(one.sum(axis=1, keepdims=True), 1) for one in counts]
    masks = [hot_mask(rank(one), np.full(len(names), hot)) for one in counts]
    same = bool((counts[0] == counts[1]).all())
    return _answer(args, names, shares, masks, f"hottest {hot} rows", same)


def _answer(
    args: argparse.Namespace,
    names: Sequence[str],
    shares: Sequence[np.ndarray],
    masks: Sequence[HotMask],
    what: str,
    same: bool,
) -> Answer:
    moved = (masks[1] & ~masks[0]).sum(axis=1)
    left = (masks[0] & ~masks[1]).sum(axis=1)
    overlaps = overlap(*masks)
    correlations = spearman(*shares)
    distance = np.abs(shares[0] - shares[1]).sum(axis=1) / 2
    layers = {
        name: {
            "hot": [int(masks[0][i].sum()), int(masks[1][i].sum())],
            "enter": int(moved[i]),
            "leave": int(left[i]),
            "overlap": float(overlaps[i]),
            "spearman": float(correlations[i]),
            "traffic_moved": float(distance[i]),
        }
        for i, name in enumerate(names)
    }
    data: dict[str, Any] = {
        "one": args.one,
        "other": args.other,
        "same": same,
        "enter": int(moved.sum()),
        "leave": int(left.sum()),
        "overlap": float(overlaps.mean()),
        "spearman": float(correlations.mean()),
        "traffic_moved": float(distance.mean()),
        "layers": layers,
    }
    moved_share = percent(data["traffic_moved"])
    text = (
        f"hot sets     {data['overlap']:.0%} in common; +{data['enter']} "
        f"−{data['leave']} {what} of {len(names)} layers\n"
        f"ranking      Spearman {data['spearman']:.2f}, mean over the layers\n"
        f"traffic      {moved_share} of the selections go to other experts"
    )
    if args.layers:
        rows = [
            (
                name,
                "{} → {}".format(*layer["hot"]),
                f"+{layer['enter']} −{layer['leave']}",
                f"{layer['overlap']:.0%}",
                f"{layer['spearman']:.2f}",
                percent(layer["traffic_moved"]),
            )
            for name, layer in layers.items()
        ]
        head = ("layer", "hot rows", "moved", "overlap", "Spearman", "traffic")
        text += "\n\n" + table(head, rows)
    return Answer(data, text, satisfied=same or not args.exit_code)
