# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm expert-map plan`: make a map from profiles under a budget."""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm.model_executor.layers.fused_moe.expert_profile.plan import (
    Counts,
    CutRequest,
    choose_cut,
    combine,
    make_map,
    phase_counts,
    phase_tokens,
    silent_layers,
)
from vllm.model_executor.layers.fused_moe.expert_profile.row_bytes import ExpertRow
from vllm.model_executor.layers.fused_moe.expert_profile.score import (
    cold_share,
    hot_mask,
    rank,
)
from vllm.model_executor.layers.fused_moe.expert_profile.verbs.common import (
    Answer,
    add_phase,
    add_row_size,
    gib,
    map_hot_bytes,
    percent,
    row_if_known,
    row_of,
    table,
    weighted_profiles,
    write_text,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import Budget, Profile


def add_budget(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add the options of a cut."""
    budget = parser.add_mutually_exclusive_group(required=required)
    budget.add_argument(
        "--hot-gib",
        type=float,
        help="HBM of one GPU for hot rows, in GiB, page edges included.",
    )
    budget.add_argument("--hot-rows", type=int, help="Hot rows of each layer.")
    budget.add_argument(
        "--cold-fraction",
        type=float,
        help="Share of the rows that stays in host memory, 0 to 1.",
    )
    parser.add_argument(
        "--cut",
        choices=("optimal", "uniform"),
        default="optimal",
        help="The best rows of all layers, or the same number in every layer.",
    )
    parser.add_argument(
        "--floor",
        type=int,
        help="Rows that the optimal cut keeps hot in every layer; the model's top-k "
        "if not given.",
    )


def cut_request(args: argparse.Namespace) -> CutRequest:
    """The arguments of `add_budget`."""
    return CutRequest(
        cut=args.cut,
        hot_rows=args.hot_rows,
        cold_fraction=args.cold_fraction,
        hot_gib=args.hot_gib,
        floor=args.floor,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "profiles",
        nargs="+",
        metavar="PROFILE[=WEIGHT]",
        help="Profiles of one model. Without weights every recorded token counts "
        "alike; a weight is the profile's share of the traffic to plan for.",
    )
    parser.add_argument("--out", "-o", required=True, help="The map file to write.")
    add_budget(parser)
    add_phase(parser)
    add_row_size(parser)


def run(args: argparse.Namespace) -> Answer:
    """Plan and write a map.

    Raises:
        ExpertProfileError: A profile cannot be used.
        ExpertPlanError: The budget or a weight cannot.

    """
    parts = weighted_profiles(args.profiles)
    first = parts[0][0].profile
    fingerprint, names = first.fingerprint, first.layer_names
    request = cut_request(args)
    row, row_unknown = row_if_known(args, fingerprint)
    if request.hot_gib is not None and row is None:
        row = row_of(args, fingerprint)
    counts = combine([weighted for _, weighted in parts], args.phase)
    hot = choose_cut(counts, request, fingerprint.top_k, row, args.page_bytes)
    profiles = [
        Profile(
            label=named.label,
            sha256=named.sha256,
            tokens=phase_tokens(named.profile, args.phase),
        )
        for named, _ in parts
    ]
    expert_map = make_map(counts, hot, names, fingerprint, profiles)
    hot_bytes = None
    if row is not None:
        hot_bytes = map_hot_bytes(expert_map, row, args.page_bytes)
    budget = Budget(
        asked=str(request),
        cut=request.cut,
        phase=args.phase,
        hot_rows=int(hot.sum()),
        hot_bytes=hot_bytes,
    )
    expert_map = expert_map.model_copy(update={"budget": budget})
    write_text(args.out, expert_map.to_json())

    mask = hot_mask(rank(counts), hot)
    per_profile = [
        {
            "label": named.label,
            "path": str(named.path),
            "tokens": phase_tokens(named.profile, args.phase),
            "weight": weighted.weight,
            "cold_share": cold_share(phase_counts(named.profile, args.phase), mask),
        }
        for named, weighted in parts
    ]
    data = {
        "map": args.out,
        "layers": len(names),
        "num_experts": fingerprint.num_experts,
        "hot_rows": int(hot.sum()),
        "hot_rows_min": int(hot.min()),
        "hot_rows_max": int(hot.max()),
        "cold_rows": int(hot.size * fingerprint.num_experts - hot.sum()),
        "row_bytes": None if row is None else row.num_bytes,
        "hot_bytes": hot_bytes,
        "cold_share": cold_share(counts, mask),
        "profiles": per_profile,
        "never_selected": int((np.asarray(counts) == 0).sum()),
    }
    warnings = _warnings(counts, names, data)
    return Answer(data, _text(args, data, row, row_unknown), warnings)


def _warnings(
    counts: Counts, names: Sequence[str], data: dict[str, Any]
) -> tuple[str, ...]:
    warnings = []
    if silent := silent_layers(counts, names):
        warnings.append(
            f"{len(silent)} of {len(names)} layers saw no traffic and are ranked by "
            f"expert id, the first of them {silent[0]}. Record more, or check that "
            "the recording covers every layer."
        )
    if not data["cold_rows"]:
        warnings.append(
            "the budget holds every row, so nothing is cold: the model fits, and "
            "--expert-provider resident serves it without a map."
        )
    if not data["hot_rows"]:
        warnings.append(
            "the budget holds no row, so every selection is read from host memory. "
            "Raise the budget."
        )
    return tuple(warnings)


def _text(
    args: argparse.Namespace,
    data: dict[str, Any],
    row: ExpertRow | None,
    row_unknown: str | None,
) -> str:
    experts = data["num_experts"]
    low, high = data["hot_rows_min"], data["hot_rows_max"]
    cut = f"{low} of {experts}" if low == high else f"{low} to {high} of {experts}"
    everything = data["hot_rows"] + data["cold_rows"]
    lines = [f"map          {args.out}"]
    lines.append(
        f"hot rows     {data['hot_rows']} of {everything} in {data['layers']} layers, "
        f"{cut} in a layer"
    )
    if row is None:
        lines.append(f"hot memory   not known: {row_unknown}")
    else:
        edges = data["hot_bytes"] / max(data["hot_rows"] * row.num_bytes, 1) - 1
        lines.append(
            f"hot memory   {gib(data['hot_bytes'])} on each GPU, page edges "
            f"{percent(max(edges, 0))}; a row is {row.num_bytes} bytes ({row.source})"
        )
    lines.append(
        f"cold         {percent(data['cold_share'])} of the selections planned from; "
        "traffic that was not planned from has more (expert-map score)"
    )
    rows = [
        (
            one["label"],
            f"{one['tokens']:,}",
            "–" if one["weight"] is None else f"{one['weight']:g}",
            percent(one["cold_share"]),
        )
        for one in data["profiles"]
    ]
    return (
        "\n".join(lines) + "\n\n" + table(("profile", "tokens", "weight", "cold"), rows)
    )
