# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm expert-map show`: describe a map or profiles, as text or in pictures."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from vllm.model_executor.layers.fused_moe.expert_profile.errors import (
    ExpertPlanError,
)
from vllm.model_executor.layers.fused_moe.expert_profile.pictures import (
    coverage,
    drift,
    heat_map,
    shares_of,
)
from vllm.model_executor.layers.fused_moe.expert_profile.plan import (
    optimal_cut,
    phase_counts,
    phase_tokens,
    ranked_counts,
)
from vllm.model_executor.layers.fused_moe.expert_profile.row_bytes import ExpertRow
from vllm.model_executor.layers.fused_moe.expert_profile.score import (
    map_cuts,
    map_shares,
)
from vllm.model_executor.layers.fused_moe.expert_profile.verbs.common import (
    GIB,
    Answer,
    NamedMap,
    NamedProfile,
    add_phase,
    add_row_size,
    check_same_model,
    gib,
    is_map,
    map_hot_bytes,
    percent,
    read_map,
    read_profiles,
    row_if_known,
    table,
    write_bytes,
)

_COVERED = (0.5, 0.9, 0.95, 0.99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="At most one map, and profiles."
    )
    parser.add_argument("--html", metavar="PATH", help="Draw into this page.")
    parser.add_argument("--png", metavar="PATH", help="Draw into this picture.")
    parser.add_argument("--layers", action="store_true", help="Also print every layer.")
    add_phase(parser)
    add_row_size(parser)


def run(args: argparse.Namespace) -> Answer:
    """Describe and draw.

    Raises:
        ExpertMapError: A map cannot be used.
        ExpertProfileError: A profile cannot be used.
        ExpertPlanError: There are several maps, or a plotting library is missing.

    """
    maps = [read_map(file) for file in args.files if is_map(file)]
    if len(maps) > 1:
        raise ExpertPlanError(
            f"{maps[0].path} and {maps[1].path} are two maps. Show one at a time, or "
            "compare them: vllm expert-map diff."
        )
    named = maps[0] if maps else None
    paths = [file for file in args.files if not is_map(file)]
    profiles = read_profiles(paths) if paths else []
    for one in profiles:
        if not phase_tokens(one.profile, args.phase):
            raise ExpertPlanError(
                f"{one.path}: it has no tokens of phase {args.phase!r}. Choose another "
                "--phase, or record its traffic."
            )
    if named is not None and profiles:
        recorded = profiles[0].profile
        check_same_model(named, recorded.fingerprint, recorded.layer_names)
    fingerprint = (
        profiles[0].profile if profiles else named.expert_map  # type: ignore[union-attr]
    ).fingerprint
    row, _ = row_if_known(args, fingerprint)
    data: dict[str, Any] = {"fingerprint": fingerprint.model_dump(mode="json")}
    blocks = [_model_text(data["fingerprint"], row)]
    if named is not None:
        data["map"] = _map_data(args, named, row)
        blocks.append(_map_text(data["map"]))
    data["profiles"] = [_profile_data(args, one) for one in profiles]
    if profiles:
        blocks.append(_profiles_text(data["profiles"]))
    facts = "\n\n".join(blocks)
    _draw(args, facts, named, profiles, row)
    if args.layers:
        blocks.append(_layers_text(args, named, profiles))
    return Answer(data, "\n\n".join(blocks))


def _model_text(fingerprint: dict[str, Any], row: ExpertRow | None) -> str:
    size = "" if row is None else f", a row {gib(row.num_bytes)}"
    return (
        f"model        {fingerprint['architecture']}, {fingerprint['num_moe_layers']} "
        f"MoE layers of {fingerprint['num_experts']} experts, top-"
        f"{fingerprint['top_k']}, {fingerprint['quantization'] or 'unquantized'}{size}"
    )


def _map_data(
    args: argparse.Namespace, named: NamedMap, row: ExpertRow | None
) -> dict[str, Any]:
    expert_map = named.expert_map
    cuts = map_cuts(expert_map, named.layer_names)
    hot_bytes = None if row is None else map_hot_bytes(expert_map, row, args.page_bytes)
    return {
        "path": str(named.path),
        "sha256": named.sha256,
        "hot_rows": int(cuts.sum()),
        "rows": int(cuts.size * expert_map.fingerprint.num_experts),
        "hot_rows_min": int(cuts.min()),
        "hot_rows_max": int(cuts.max()),
        "hot_bytes": hot_bytes,
        "expected_cold_share": expert_map.expected_cold_share,
        "budget": None
        if expert_map.budget is None
        else expert_map.budget.model_dump(mode="json"),
        "planned_from": [one.model_dump(mode="json") for one in expert_map.profiles],
        "draft_layers": len(expert_map.draft_layers),
        "layers": {
            name: {
                "hot": layer.hot,
                "cold_share": layer.expected_cold_share,
                "top_share": layer.share[0],
            }
            for name, layer in expert_map.layers.items()
        },
    }


def _map_text(data: dict[str, Any]) -> str:
    low, high = data["hot_rows_min"], data["hot_rows_max"]
    cut = f"{low}" if low == high else f"{low} to {high}"
    lines = [
        f"map          {data['path']}",
        f"hot rows     {data['hot_rows']} of {data['rows']}, {cut} in a layer",
    ]
    if data["hot_bytes"] is not None:
        lines.append(f"hot memory   {gib(data['hot_bytes'])} on each GPU")
    cold = percent(data["expected_cold_share"])
    lines.append(f"cold         {cold} of what it was planned from")
    if data["budget"] is not None:
        budget = data["budget"]
        lines.append(
            f"budget       {budget['asked']}, {budget['cut']} cut, phase "
            f"{budget['phase']}"
        )
    for one in data["planned_from"]:
        lines.append(
            f"planned from {one['label']}, {one['tokens']:,} tokens, sha256 "
            f"{one['sha256'][:12]}"
        )
    if data["draft_layers"]:
        lines.append(f"draft        {data['draft_layers']} layers")
    return "\n".join(lines)


def _profile_data(args: argparse.Namespace, named: NamedProfile) -> dict[str, Any]:
    profile = named.profile
    counts = phase_counts(profile, args.phase)
    requests = profile.counts_request
    return {
        "path": str(named.path),
        "sha256": named.sha256,
        "label": named.label,
        "tokens_prefill": profile.tokens_prefill,
        "tokens_decode": profile.tokens_decode,
        "requests": None if requests is None else len(requests),
        "start": profile.start,
        "end": profile.end,
        "vllm_version": profile.vllm_version,
        "overlay": profile.overlay,
        "never_selected": int((counts == 0).sum()),
        "rows_to_cover": {f"{x:g}": rows_to_cover(counts, x) for x in _COVERED},
        "rows": int(counts.size),
    }


def rows_to_cover(counts: np.ndarray, share: float) -> int:
    """Fewest rows over all layers that cover a share of the selections."""
    covered = np.cumsum(np.sort(counts, axis=None)[::-1])
    return int(np.searchsorted(covered, share * covered[-1])) + 1


def _profiles_text(profiles: list[dict[str, Any]]) -> str:
    rows = [
        (
            one["label"],
            f"{one['tokens_prefill']:,}",
            f"{one['tokens_decode']:,}",
            "–" if one["requests"] is None else one["requests"],
            *(f"{n / one['rows']:.0%}" for n in one["rows_to_cover"].values()),
            f"{one['never_selected'] / one['rows']:.0%}",
        )
        for one in profiles
    ]
    head = (
        *("profile", "prefill", "decode", "requests"),
        *(f"rows for {x:.0%}" for x in _COVERED),
        "never",
    )
    return table(head, rows)


def _layers_text(
    args: argparse.Namespace, named: NamedMap | None, profiles: list[NamedProfile]
) -> str:
    if named is not None:
        return table(
            ("layer", "hot rows", "cold", "most used"),
            [
                (
                    name,
                    layer.hot,
                    percent(layer.expected_cold_share),
                    f"{percent(layer.share[0])} (expert {layer.ranking[0]})",
                )
                for name, layer in named.expert_map.layers.items()
            ],
        )
    rows = []
    for one in profiles:
        counts = phase_counts(one.profile, args.phase)
        shares = ranked_counts(shares_of(counts))
        for index, name in enumerate(one.profile.layer_names):
            rows.append(
                (
                    name,
                    one.label,
                    percent(float(shares[index, 0])),
                    *(
                        f"{rows_to_cover(counts[index], x) / counts.shape[1]:.0%}"
                        for x in _COVERED
                    ),
                )
            )
    head = ("layer", "profile", "most used", *(f"rows for {x:.0%}" for x in _COVERED))
    return table(head, rows)


def _draw(
    args: argparse.Namespace,
    facts: str,
    named: NamedMap | None,
    profiles: list[NamedProfile],
    row: ExpertRow | None,
) -> None:
    if args.html is None and args.png is None:
        return
    pictures = pictures_of(args, named, profiles, row)
    files = [named.path] if named is not None else [one.path for one in profiles]
    title = "Expert map " if named is not None else "Expert profile "
    title += ", ".join(path.name for path in files)
    if args.html is not None:
        from vllm.model_executor.layers.fused_moe.expert_profile.pictures_html import (
            draw_html,
        )

        page = draw_html(title, facts, pictures)
        write_bytes(Path(args.html), page.encode())
    if args.png is not None:
        from vllm.model_executor.layers.fused_moe.expert_profile.pictures_png import (
            draw_png,
        )

        write_bytes(Path(args.png), draw_png(title, pictures))


def pictures_of(
    args: argparse.Namespace,
    named: NamedMap | None,
    profiles: list[NamedProfile],
    row: ExpertRow | None,
) -> list:
    """Choose what to draw: use with the cut, coverage, and drift of two."""
    traffic = [(one.label, phase_counts(one.profile, args.phase)) for one in profiles]
    shares = [(label, shares_of(counts)) for label, counts in traffic]
    if named is not None:
        names = profiles[0].profile.layer_names if profiles else named.layer_names
        cuts = map_cuts(named.expert_map, names)
        ranked_by = map_shares(named.expert_map, names)
        source = "the map's traffic"
        traffic = [(source, ranked_by), *traffic]
        shares = [(source, ranked_by), *shares]
        hot_rows = int(cuts.sum())
    else:
        names, cuts, hot_rows = profiles[0].profile.layer_names, None, None
        source, ranked_by = shares[0]
    pictures: list = [
        heat_map(f"Use of experts: {source}", names, ranked_by, cuts),
        coverage(
            f"Selections covered, ranked by {source}",
            ranked_by,
            traffic,
            None if row is None else row.num_bytes / GIB,
            hot_rows,
        ),
    ]
    for label, other in shares[1:]:
        hot = cuts
        if hot is None:
            quarter = max(ranked_by.size // 4, 1)
            hot = optimal_cut(ranked_by, 1, quarter, 0)
        pictures.append(
            drift(f"Drift: {source} to {label}", names, ranked_by, other, hot)
        )
    return pictures
