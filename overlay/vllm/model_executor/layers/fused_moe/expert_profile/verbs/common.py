# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What several verbs of `vllm expert-map` share: files, arguments, answers."""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm.model_executor.layers.fused_moe.expert_profile.errors import (
    ExpertPlanError,
)
from vllm.model_executor.layers.fused_moe.expert_profile.plan import Weighted
from vllm.model_executor.layers.fused_moe.expert_profile.profile_file import (
    ExpertProfile,
    merge_profiles,
    read_profile,
)
from vllm.model_executor.layers.fused_moe.expert_profile.row_bytes import (
    DEVICE_PAGE_BYTES,
    ExpertRow,
    expert_row,
    hot_page_bytes,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import (
    ExpertMap,
    Fingerprint,
    load_expert_map,
)

GIB = 2**30


@dataclass(frozen=True)
class Answer:
    """What a verb found.

    Attributes:
        data: For machines; a JSON object.
        text: For people.
        warnings: For people, apart from the answer.
        satisfied: False if a condition that was asked for does not hold.

    """

    data: dict[str, Any]
    text: str
    warnings: tuple[str, ...] = ()
    satisfied: bool = True


@dataclass(frozen=True)
class NamedProfile:
    """A profile and the file it was read from."""

    path: Path
    sha256: str
    profile: ExpertProfile

    @property
    def label(self) -> str:
        """Its labels, or the name of its file."""
        return "+".join(self.profile.labels) or self.path.stem


@dataclass(frozen=True)
class NamedMap:
    """A map and the file it was read from."""

    path: Path
    sha256: str
    expert_map: ExpertMap

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Its layers of the target model, in its order."""
        return tuple(self.expert_map.layers)


def sha256_of(path: Path) -> str:
    """Hash of a file's bytes, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_profiles(paths: Sequence[str | Path]) -> list[NamedProfile]:
    """Read profiles of one model and put their layers in the order of the first.

    Raises:
        ExpertProfileError: One cannot be read, is of another model, or names other
            layers.

    """
    profiles = [read_profile(path) for path in paths]
    merge_profiles(profiles, paths)
    names = profiles[0].layer_names
    return [
        NamedProfile(Path(path), sha256_of(Path(path)), _in_order(profile, names))
        for path, profile in zip(paths, profiles, strict=True)
    ]


def _in_order(profile: ExpertProfile, names: tuple[str, ...]) -> ExpertProfile:
    order = [profile.layer_names.index(name) for name in names]
    requests = profile.counts_request
    return replace(
        profile,
        layer_names=names,
        counts_prefill=profile.counts_prefill[order],
        counts_decode=profile.counts_decode[order],
        counts_request=None if requests is None else requests[:, order],
    )


def read_map(path: str | Path) -> NamedMap:
    """Read a map.

    Raises:
        ExpertMapError: It cannot be read or is no valid map.

    """
    expert_map = load_expert_map(path)
    return NamedMap(Path(path), sha256_of(Path(path)), expert_map)


def check_same_model(named: NamedMap, fingerprint: Fingerprint, layers: object) -> None:
    """Refuse a map of another model than the profiles.

    Raises:
        ExpertMapError: A field of the fingerprint or a layer's name differs.

    """
    named.expert_map.check_model(fingerprint, named.path)
    names = {name: fingerprint.num_experts for name in layers}
    named.expert_map.check_layers(names, named.path)


def split_weight(argument: str) -> tuple[str, float | None]:
    """Split `PROFILE=WEIGHT`; a name that exists as it stands has no weight."""
    path, equals, weight = argument.rpartition("=")
    if not equals or os.path.exists(argument):
        return argument, None
    try:
        return path, float(weight)
    except ValueError:
        raise ExpertPlanError(
            f"{argument!r}: {weight!r} is no number. Give PROFILE or PROFILE=WEIGHT."
        ) from None


def weighted_profiles(arguments: Sequence[str]) -> list[tuple[NamedProfile, Weighted]]:
    """Read the profiles of `PROFILE[=WEIGHT]` arguments.

    Raises:
        ExpertProfileError: One cannot be read or does not go with the others.
        ExpertPlanError: A weight is no number, or a file is given twice.

    """
    split = [split_weight(argument) for argument in arguments]
    named = read_profiles([path for path, _ in split])
    seen: dict[str, Path] = {}
    for one in named:
        if one.sha256 in seen:
            raise ExpertPlanError(
                f"{one.path} and {seen[one.sha256]} are the same profile, which would "
                "count twice. Leave one out, or give weights to different profiles."
            )
        seen[one.sha256] = one.path
    return [
        (one, Weighted(one.profile, one.sha256, one.label, weight))
        for one, (_, weight) in zip(named, split, strict=True)
    ]


def add_phase(parser: argparse.ArgumentParser) -> None:
    """Add `--phase`."""
    parser.add_argument(
        "--phase",
        choices=("both", "prefill", "decode"),
        default="both",
        help="Which selections of the profiles to use.",
    )


def add_row_size(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how large an expert is."""
    group = parser.add_argument_group(
        "size of an expert",
        "Found from the model's fingerprint where its quantization says it.",
    )
    group.add_argument(
        "--row-bytes", type=int, help="Bytes of one expert's weights in one layer."
    )
    group.add_argument("--weight-bits", type=int, help="Bits of an expert's weight.")
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        help="GPUs that share every expert; sizes and budgets are those of one GPU.",
    )
    group.add_argument(
        "--page-bytes",
        type=int,
        default=DEVICE_PAGE_BYTES,
        help="Page size of the fast memory: 2 MiB on CUDA, 4096 on the CPU backend.",
    )


def row_of(args: argparse.Namespace, fingerprint: Fingerprint) -> ExpertRow:
    """Size of an expert by the arguments of `add_row_size`.

    Raises:
        ExpertPlanError: It is not known, or an argument is not above 0.

    """
    for option in ("row_bytes", "weight_bits", "tensor_parallel_size", "page_bytes"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise ExpertPlanError(
                f"--{option.replace('_', '-')} {value} is below 1. Give a size."
            )
    if args.row_bytes is not None and args.weight_bits is not None:
        raise ExpertPlanError(
            "--weight-bits has no effect beside --row-bytes. Give one of them."
        )
    return expert_row(
        fingerprint, args.row_bytes, args.weight_bits, args.tensor_parallel_size
    )


def row_if_known(
    args: argparse.Namespace, fingerprint: Fingerprint
) -> tuple[ExpertRow | None, str | None]:
    """Size of an expert, or None and why it is not known."""
    try:
        return row_of(args, fingerprint), None
    except ExpertPlanError as error:
        if args.row_bytes is not None or args.weight_bits is not None:
            raise
        return None, str(error)


def map_hot_bytes(expert_map: ExpertMap, row: ExpertRow, page_bytes: int) -> int:
    """HBM that a map's hot pages take on one GPU, page edges included."""
    return sum(
        hot_page_bytes(row, len(layer.ranking), layer.hot_rows, page_bytes)
        for layer in expert_map.layers.values()
    )


def write_text(path: str | Path, text: str) -> None:
    """`write_bytes` of UTF-8 text."""
    write_bytes(Path(path), text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that the path always holds a whole one.

    Raises:
        ExpertPlanError: It cannot be written.

    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ExpertPlanError(
            f"{path}: cannot be written: {error}. Give a path in a directory that is "
            "there and can be written to."
        ) from None


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned text: the first column to the left, the others to the right."""
    lines = [tuple(map(str, line)) for line in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def percent(share: float) -> str:
    """A share as text, with the digits that matter."""
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}"


def gib(num_bytes: float) -> str:
    """Bytes as text."""
    if num_bytes >= GIB / 8:
        return f"{num_bytes / GIB:.2f} GiB"
    if num_bytes >= 2**17:
        return f"{num_bytes / 2**20:.2f} MiB"
    return f"{num_bytes / 2**10:g} KiB"


def as_json(answer: Answer) -> str:
    """The answer for machines, warnings included."""
    return json.dumps(answer.data | {"warnings": list(answer.warnings)}, indent=1)


def progress(what: str, total: int | None) -> Callable[[Iterable], Iterator]:
    """A wrapper that shows on a terminal how far an iteration is, if it takes long."""
    return partial(
        tqdm,
        desc=what,
        total=total,
        delay=1,
        leave=False,
        disable=None,  # off unless stderr is a terminal
        file=sys.stderr,
    )


def is_map(path: str | Path) -> bool:
    """Whether a file is a map (JSON) and not a profile (safetensors).

    Raises:
        ExpertPlanError: It cannot be read.

    """
    try:
        with open(path, "rb") as stream:
            # safetensors begin with the length of their header, eight bytes.
            return stream.read(9)[8:] != b"{"
    except OSError as error:
        raise ExpertPlanError(
            f"{path}: cannot be read: {error}. Give a map or a profile."
        ) from None
