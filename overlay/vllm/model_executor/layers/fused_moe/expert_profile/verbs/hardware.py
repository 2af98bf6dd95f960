# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Arguments about hardware and steps, for the verbs that predict speed."""

import argparse
from dataclasses import replace

from vllm.model_executor.layers.fused_moe.expert_profile.errors import (
    ExpertPlanError,
)
from vllm.model_executor.layers.fused_moe.expert_profile.predict import (
    MEASURED,
    Hardware,
    Step,
)


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how fast memory is and what a step is."""
    group = parser.add_argument_group("hardware")
    group.add_argument(
        "--hardware", choices=sorted(MEASURED), help="Bandwidths measured on it."
    )
    group.add_argument(
        "--hbm-gbps", type=float, help="What a plain read of HBM achieves, GB/s."
    )
    group.add_argument(
        "--host-gbps",
        type=float,
        help="What a GPU achieves reading host memory in place, GB/s.",
    )
    group.add_argument(
        "--kernel-efficiency",
        type=float,
        help="Share of --hbm-gbps that the expert kernels achieve.",
    )
    group.add_argument(
        "--layer-us",
        type=float,
        help="Time of a layer beside its expert reads, in microseconds.",
    )
    group.add_argument(
        "--resident-ms",
        action="append",
        default=[],
        metavar="STREAMS=MS",
        help="Measured time of a decode step with every row in HBM, for one number of "
        "streams; without it the GPU's time is estimated from bytes. Repeat it.",
    )
    step = parser.add_argument_group("steps")
    step.add_argument(
        "--draft-tokens",
        type=int,
        default=0,
        help="Draft tokens that are verified with each stream's token.",
    )
    step.add_argument(
        "--accepted",
        type=float,
        help="How many draft tokens of a stream are accepted, on average.",
    )


def hardware_of(args: argparse.Namespace) -> Hardware:
    """Hardware by the arguments of `add_hardware`.

    Raises:
        ExpertPlanError: A bandwidth is missing or not above 0.

    """
    given = {
        field: getattr(args, field)
        for field in ("hbm_gbps", "host_gbps", "kernel_efficiency", "layer_us")
        if getattr(args, field) is not None
    }
    for field, value in given.items():
        if not 0 < value < float("inf"):
            raise ExpertPlanError(
                f"--{field.replace('_', '-')} {value:g} is not above 0. Give what was "
                "measured."
            )
    if args.hardware is not None:
        return replace(MEASURED[args.hardware], **given)
    if missing := {"hbm_gbps", "host_gbps"} - given.keys():
        names = " and ".join(f"--{one.replace('_', '-')}" for one in sorted(missing))
        raise ExpertPlanError(
            f"{names} missing: how fast memory is decides the step time. Give "
            "bandwidths, or --hardware for one that was measured."
        )
    return Hardware(**given)


def step_of(args: argparse.Namespace, streams: int) -> Step:
    """A step of some streams by the arguments of `add_hardware`.

    Raises:
        ExpertPlanError: Streams, draft tokens or their acceptance are out of range.

    """
    if streams < 1:
        raise ExpertPlanError(f"{streams} streams are below 1. Give 1 or more.")
    if args.draft_tokens < 0:
        raise ExpertPlanError(
            f"--draft-tokens {args.draft_tokens} is below 0. Give how many are "
            "verified with each token, or leave it out."
        )
    if (args.accepted is None) != (args.draft_tokens == 0):
        raise ExpertPlanError(
            "--draft-tokens and --accepted go together: tokens per second depend on "
            "how many draft tokens are accepted. Give both or none."
        )
    accepted = args.accepted or 0.0
    if not 0 <= accepted <= args.draft_tokens:
        raise ExpertPlanError(
            f"--accepted {accepted:g} is outside 0 … {args.draft_tokens}, the draft "
            "tokens of a stream. Give their mean number."
        )
    return Step(streams, args.draft_tokens, accepted)


def resident_times(args: argparse.Namespace) -> dict[int, float]:
    """Measured resident step times in milliseconds, by streams.

    Raises:
        ExpertPlanError: An entry is not STREAMS=MS.

    """
    times = {}
    for entry in args.resident_ms:
        streams, _, time_ms = entry.partition("=")
        try:
            times[int(streams)] = float(time_ms)
            if not 0 < times[int(streams)] < float("inf"):
                raise ValueError
        except ValueError:
            raise ExpertPlanError(
                f"--resident-ms {entry!r} is not STREAMS=MS. Give, for example, 8=3.47."
            ) from None
    return times
