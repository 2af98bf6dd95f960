# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm expert-map predict`: step time and tokens per second that a map will give."""

import argparse
from dataclasses import asdict
from typing import Any

import numpy as np

from vllm.model_executor.layers.fused_moe.expert_profile.errors import (
    ExpertPlanError,
)
from vllm.model_executor.layers.fused_moe.expert_profile.plan import phase_counts
from vllm.model_executor.layers.fused_moe.expert_profile.predict import (
    Prediction,
    Step,
    positional_host_bytes,
    predict,
)
from vllm.model_executor.layers.fused_moe.expert_profile.row_bytes import (
    map_host_bytes,
)
from vllm.model_executor.layers.fused_moe.expert_profile.score import planned_from
from vllm.model_executor.layers.fused_moe.expert_profile.verbs.common import (
    Answer,
    add_phase,
    add_row_size,
    check_same_model,
    gib,
    map_hot_bytes,
    read_map,
    read_profiles,
    row_of,
    table,
)
from vllm.model_executor.layers.fused_moe.expert_profile.verbs.hardware import (
    add_hardware,
    hardware_of,
    resident_times,
    step_of,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("map", help="The map that will be served.")
    parser.add_argument(
        "profiles",
        nargs="+",
        metavar="PROFILE",
        help="Traffic that will be served: rather of other requests than the map's.",
    )
    parser.add_argument(
        "--concurrency",
        "-c",
        type=int,
        nargs="+",
        default=[1, 8, 16],
        help="Streams that decode at the same time.",
    )
    add_phase(parser)
    add_row_size(parser)
    add_hardware(parser)


def run(args: argparse.Namespace) -> Answer:
    """Predict steps.

    Raises:
        ExpertMapError: The map cannot be used.
        ExpertProfileError: A profile cannot be used.
        ExpertPlanError: An argument is missing or out of range.

    """
    hardware, resident_ms = hardware_of(args), resident_times(args)
    steps = [step_of(args, streams) for streams in args.concurrency]
    if unused := resident_ms.keys() - set(args.concurrency):
        raise ExpertPlanError(
            f"--resident-ms {min(unused)}=… has no effect: --concurrency is "
            f"{' '.join(map(str, args.concurrency))}. Name the same streams in both."
        )
    profiles = read_profiles(args.profiles)
    named = read_map(args.map)
    recorded = profiles[0].profile
    names = recorded.layer_names
    check_same_model(named, recorded.fingerprint, names)
    row = row_of(args, recorded.fingerprint)
    outside = map_host_bytes(named.expert_map, names, row, args.page_bytes)
    shape = len(names), recorded.num_experts
    hot_bytes = map_hot_bytes(named.expert_map, row, args.page_bytes)
    cold_bytes = max(shape[0] * shape[1] * row.num_bytes - hot_bytes, 0)
    placements = {
        "map": outside,
        "positional": positional_host_bytes(*shape, row, cold_bytes),
    }
    top_k = recorded.fingerprint.top_k
    predictions = []
    for profile in profiles:
        counts = phase_counts(profile.profile, args.phase)
        if not counts.any():
            raise ExpertPlanError(
                f"{profile.path}: it has no selections of phase {args.phase!r}. Choose "
                "another --phase, or record its traffic."
            )
        for step in steps:
            by_placement = {
                name: predict(
                    counts,
                    placed,
                    top_k,
                    row,
                    step,
                    hardware,
                    resident_ms.get(step.streams),
                )
                for name, placed in placements.items()
            }
            predictions.append(_entry(profile.label, step, by_placement))
    warnings = [
        f"{args.map} was planned from {one.path}, so this is better than other traffic "
        "will be. Give a profile of other requests."
        for one in profiles
        if planned_from(
            named.expert_map, one.sha256, phase_counts(one.profile, args.phase), names
        )
    ]
    data = {
        "map": args.map,
        "hardware": asdict(hardware),
        "row_bytes": row.num_bytes,
        "hot_bytes": hot_bytes,
        "cold_bytes": int(np.sum(outside)),
        "resident_ms_measured": sorted(resident_ms),
        "predictions": predictions,
    }
    return Answer(data, _text(data, row.source), tuple(warnings))


def _entry(
    label: str, step: Step, by_placement: dict[str, Prediction]
) -> dict[str, Any]:
    resident_ms = by_placement["map"].resident_ms
    entry: dict[str, Any] = {
        "profile": label,
        "streams": step.streams,
        "tokens": step.tokens,
        "unique_experts": by_placement["map"].unique,
        "resident": {
            "step_ms": resident_ms,
            "tokens_per_s": step.tokens_per_s(resident_ms),
        },
    }
    for name, one in by_placement.items():
        entry[name] = {
            "step_ms": one.step_ms,
            "tokens_per_s": step.tokens_per_s(one.step_ms),
            "cold_experts": one.cold,
            "host_bytes": one.host_bytes,
            "fetch_tax": one.fetch_tax,
        }
    return entry


def _text(data: dict[str, Any], source: str) -> str:
    hardware = data["hardware"]
    rows = [
        (
            one["profile"],
            one["streams"],
            *(f"{one[x]['step_ms']:.2f}" for x in ("resident", "map", "positional")),
            *(
                f"{one[x]['tokens_per_s']:.0f}"
                for x in ("resident", "map", "positional")
            ),
            f"{one['map']['cold_experts']:.1f} of {one['unique_experts']:.0f}",
            f"{one['map']['host_bytes'] / 1e6:.0f}",
            f"{one['map']['fetch_tax']:.0%}",
        )
        for one in data["predictions"]
    ]
    head = (
        *("profile", "C", "resident ms", "map ms", "positional ms"),
        *("tok/s", "map", "positional", "cold reads", "MB", "fetch tax"),
    )
    measured = data["resident_ms_measured"]
    basis = f"measured for C {measured}" if measured else "estimated from bytes"
    facts = (
        f"hot memory   {gib(data['hot_bytes'])} of one GPU, {gib(data['cold_bytes'])} "
        f"on the host; a row is {data['row_bytes']} bytes ({source})\n"
        f"hardware     HBM {hardware['hbm_gbps']:g} GB/s, host "
        f"{hardware['host_gbps']:g} GB/s; resident steps {basis}"
    )
    notes = (
        "C: streams that decode at the same time. resident: if every row was in HBM.\n"
        "positional: whole tensors of the first layers on the host, as many bytes.\n"
        "cold reads: different experts of a step, over all layers. MB: read over the "
        "link.\nfetch tax: what the link adds to the resident step."
    )
    return "\n\n".join([facts, table(head, rows), notes])
