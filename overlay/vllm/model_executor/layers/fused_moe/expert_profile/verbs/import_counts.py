# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm expert-map import`: make a profile from what other tools recorded."""

import argparse
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from vllm.model_executor.layers.fused_moe.expert_profile.errors import (
    ExpertPlanError,
)
from vllm.model_executor.layers.fused_moe.expert_profile.importers import (
    Imported,
    Layout,
    Request,
    count_loads,
    count_requests,
    layer_index,
    read_arrays,
    read_csv,
    read_requests,
)
from vllm.model_executor.layers.fused_moe.expert_profile.profile_file import (
    ExpertProfile,
    ExpertProfileError,
    read_profile,
    write_profile,
)
from vllm.model_executor.layers.fused_moe.expert_profile.verbs.common import (
    Answer,
    is_map,
    progress,
    read_map,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import Fingerprint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        choices=("routes", "eplb", "csv"),
        help="routes: what --enable-return-routed-experts returns, as API responses "
        "(.json, .jsonl) or arrays (.npy, .npz, .safetensors). eplb: expert loads "
        "(.npy, .npz, .safetensors, .pt, .json). csv: layer,expert,count[,phase]"
        "[,request].",
    )
    parser.add_argument("--out", "-o", required=True, help="The profile to write.")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--like", help="A map or profile of the same model, for its layers."
    )
    model.add_argument("--model", help="The model: a path, or a name on the Hub.")
    parser.add_argument(
        "--layer-names",
        metavar="TEMPLATE",
        help="With --model: name of the MoE layers in vLLM, {} for the number; "
        "model.layers.{}.mlp.experts if not given.",
    )
    parser.add_argument(
        "--moe-layers",
        metavar="RANGES",
        help="With --model: which hidden layers have experts, such as 1-47; all if not "
        "given.",
    )
    parser.add_argument(
        "--phase",
        choices=("prefill", "decode"),
        help="Of counts that do not say; decode if not given.",
    )
    parser.add_argument(
        "--logical",
        action="store_true",
        help="eplb: the loads are of logical experts, or no expert was moved.",
    )
    parser.add_argument(
        "--label", action="append", default=[], help="What the traffic was. Repeat it."
    )


def run(args: argparse.Namespace) -> Answer:
    """Import and write a profile.

    Raises:
        ExpertPlanError: A recording cannot be used, as its message says.
        ExpertProfileError: The counts lost or doubled traffic.

    """
    _check_options(args)
    files = [Path(file) for file in args.files]
    fingerprint, layout = _layout(args)
    phase = args.phase or "decode"
    if args.source == "routes":
        read = _requests(files)
        found = count_requests(progress("requests", None)(read), layout, phase)
    elif args.source == "eplb":
        shape = len(layout.names), layout.num_experts
        loads = sum(
            count_loads(read_arrays(file), layout, args.logical, file) for file in files
        )
        counts = {name: np.zeros(shape, np.int64) for name in ("prefill", "decode")}
        counts[phase] = loads
        found = Imported(counts["prefill"], counts["decode"], None)
    else:
        found = _add([read_csv(file, layout, phase) for file in files])
    profile = _profile(args, files, fingerprint, layout, found)
    try:
        write_profile(profile, args.out)
    except ExpertProfileError as error:
        if args.source == "routes":
            raise
        raise ExpertPlanError(
            f"{' '.join(args.files)}: these are not the selections of whole tokens in "
            f"every layer: {error}"
        ) from None
    return _answer(args, profile, found)


def _check_options(args: argparse.Namespace) -> None:
    if args.like is not None:
        for option in ("layer_names", "moe_layers"):
            if getattr(args, option) is not None:
                raise ExpertPlanError(
                    f"--{option.replace('_', '-')} has no effect beside --like, which "
                    "names the layers. Give one of them."
                )
    if args.logical and args.source != "eplb":
        raise ExpertPlanError(
            f"--logical has no effect on --from {args.source}, whose experts are "
            "logical ones. Leave it out."
        )


def _layout(args: argparse.Namespace) -> tuple[Fingerprint, Layout]:
    if args.like is not None:
        if is_map(args.like):
            named = read_map(args.like)
            fingerprint, names = named.expert_map.fingerprint, named.layer_names
        else:
            profile = read_profile(args.like)
            fingerprint, names = profile.fingerprint, profile.layer_names
    else:
        fingerprint, names = _layout_of_model(args)
    indices = tuple(layer_index(name) for name in names)
    return fingerprint, Layout(
        fingerprint.num_experts, fingerprint.top_k, names, indices
    )


def _layout_of_model(args: argparse.Namespace) -> tuple[Fingerprint, tuple[str, ...]]:
    # These read a model's config, which nothing else here needs.
    from vllm.config import ModelConfig
    from vllm.model_executor.layers.fused_moe.pinned_hot.fingerprint import (
        model_fingerprint,
    )

    config = ModelConfig(model=args.model)
    if not config.get_num_experts():
        raise ExpertPlanError(
            f"--model {args.model}: the model has no experts. Give a MoE model."
        )
    template = args.layer_names or "model.layers.{}.mlp.experts"
    if template.count("{}") != 1:
        raise ExpertPlanError(
            f"--layer-names {template!r} has not one {{}}. Give the place of the "
            "layer's number."
        )
    count = config.get_total_num_hidden_layers()
    numbers = _ranges(args.moe_layers, count)
    names = tuple(template.replace("{}", str(number)) for number in numbers)
    return model_fingerprint(config, len(names)), names


def _ranges(text: str | None, count: int) -> list[int]:
    """Parse `1-47` or `0,2,4-7`."""
    if text is None:
        return list(range(count))
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            chosen = range(int(first), int(last or first) + 1)
        except ValueError:
            chosen = range(0)
        if not chosen or chosen[-1] >= count or chosen[0] < 0:
            raise ExpertPlanError(
                f"--moe-layers {text!r}: {part!r} is no range of 0 … {count - 1}. Give "
                "numbers and ranges, such as 1-47."
            )
        numbers.update(chosen)
    return sorted(numbers)


def _requests(files: list[Path]) -> Iterator[Request]:
    for file in files:
        yield from read_requests(file)


def _add(parts: list[Imported]) -> Imported:
    apart = all(part.requests is not None for part in parts)
    return Imported(
        sum(part.prefill for part in parts),
        sum(part.decode for part in parts),
        [one for part in parts for one in part.requests or ()] if apart else None,
    )


def _profile(
    args: argparse.Namespace,
    files: Sequence[Path],
    fingerprint: Fingerprint,
    layout: Layout,
    found: Imported,
) -> ExpertProfile:
    tokens = {}
    for name in ("prefill", "decode"):
        # The profile's check compares every layer with it.
        tokens[name] = int(getattr(found, name)[0].sum()) // layout.top_k
    moments = sorted(file.stat().st_mtime for file in files)
    start, end = (
        datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")
        for moment in (moments[0], moments[-1])
    )
    return ExpertProfile(
        fingerprint=fingerprint,
        layer_names=layout.names,
        counts_prefill=found.prefill,
        counts_decode=found.decode,
        tokens_prefill=tokens["prefill"],
        tokens_decode=tokens["decode"],
        vllm_version=f"imported from {args.source}",
        start=start,
        end=end,
        labels=tuple(args.label),
        counts_request=None if found.requests is None else np.stack(found.requests),
    )


def _answer(
    args: argparse.Namespace, profile: ExpertProfile, found: Imported
) -> Answer:
    requests = None if found.requests is None else len(found.requests)
    data = {
        "profile": args.out,
        "tokens_prefill": profile.tokens_prefill,
        "tokens_decode": profile.tokens_decode,
        "layers": len(profile.layer_names),
        "requests": requests,
        "padding_rows": found.padding,
        "cached_rows": found.cached,
    }
    text = (
        f"profile      {args.out}\n"
        f"tokens       {profile.tokens_prefill:,} prefill, {profile.tokens_decode:,} "
        f"decode, in {len(profile.layer_names)} layers\n"
        f"requests     {'not told apart' if requests is None else requests}"
    )
    if found.padding or found.cached:
        text += (
            f"\nleft out     {found.padding} rows of padding, {found.cached} rows of "
            "prompts that were cached or shared"
        )
    return Answer(data, text)
