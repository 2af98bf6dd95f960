# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The expert profile file: how often each expert of each MoE layer was selected.

safetensors, so reading it runs no code and every language can read it. Tensors:

    counts_prefill  int64 (num_moe_layers, num_experts)   selections by prompt tokens
    counts_decode   int64 (num_moe_layers, num_experts)   selections by other tokens
    counts_request  int64 (num_requests, num_moe_layers, num_experts), optional:
                    both of them, apart by request

Ids are logical: those the router gives, before any expert is replicated or moved. The
one metadata entry, `vllm_expert_profile`, is JSON:

    {
      "version": 1,
      "fingerprint": {…},            as in an expert map
      "layer_names": ["model.layers.0.mlp.experts", …],   as vLLM names them
      "tokens_prefill": 81920,       tokens that passed every layer
      "tokens_decode": 4096,
      "vllm_version": "…",
      "overlay": null,               what patched that vLLM, if anything
      "labels": ["code"],
      "start": "2026-11-30T03:12:00+00:00", "end": "2026-11-30T04:12:00+00:00"
    }

Every token selects `fingerprint.top_k` experts in every layer, so each row of counts
sums to tokens times top_k, exactly. A file that breaks this lost or doubled traffic and
is refused.

One file describes one model. The MoE layers of a draft model, which may have another
number of experts, are a profile of their own.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import (
    Fingerprint,
    Strict,
    first_problem,
    unique_keys,
)

METADATA_KEY = "vllm_expert_profile"
VERSION = 1
_COUNTS = ("counts_prefill", "counts_decode")
_REQUESTS = "counts_request"
_RECORD = "Record the profile again."

Counts = npt.NDArray[np.int64]


class ExpertProfileError(ValueError):
    """A profile that cannot be used; says which file, field and value, and the cure."""

    def __init__(self, path: str | Path, field: str, problem: str, cure: str):
        super().__init__(f"expert profile {path}: {field}: {problem}. {cure}")


class _Metadata(Strict):
    version: Literal[1]
    fingerprint: Fingerprint
    layer_names: tuple[str, ...] = Field(strict=False, min_length=1)
    tokens_prefill: int = Field(ge=0)
    tokens_decode: int = Field(ge=0)
    vllm_version: str
    overlay: str | None
    labels: tuple[str, ...] = Field(strict=False)
    start: str
    end: str


@dataclass(frozen=True, eq=False)
class ExpertProfile:
    """Selections of a model's experts over a span of traffic.

    Attributes:
        fingerprint: The model. Its `num_moe_layers`, `num_experts` and `top_k` are
            those of the counts.
        layer_names: MoE layers in model order, as vLLM names them.
        counts_prefill: Selections by prompt tokens, int64
            `(num_moe_layers, num_experts)`, by logical expert id.
        counts_decode: The same for all other tokens.
        tokens_prefill: Prompt tokens that passed the layers.
        tokens_decode: Other tokens that passed the layers.
        vllm_version: Version that recorded; several, comma-separated, if merged.
        start: First moment of the traffic, ISO 8601 in UTC.
        end: Last moment of the traffic.
        overlay: What patched the vLLM that recorded; None if nothing is known.
        labels: What the traffic was, for people.
        counts_request: Selections apart by request, int64
            `(num_requests, num_moe_layers, num_experts)`; they sum to `counts`.
            None if requests were not told apart.

    """

    fingerprint: Fingerprint
    layer_names: tuple[str, ...]
    counts_prefill: Counts
    counts_decode: Counts
    tokens_prefill: int
    tokens_decode: int
    vllm_version: str
    start: str
    end: str
    overlay: str | None = None
    labels: tuple[str, ...] = ()
    counts_request: Counts | None = None

    @property
    def top_k(self) -> int:
        """Experts selected per token and layer."""
        return self.fingerprint.top_k

    @property
    def num_experts(self) -> int:
        """Logical experts of a layer."""
        return self.fingerprint.num_experts

    @property
    def counts(self) -> Counts:
        """Selections by all tokens, int64 `(num_moe_layers, num_experts)`."""
        return self.counts_prefill + self.counts_decode

    @property
    def tokens(self) -> int:
        """All tokens that passed the layers."""
        return self.tokens_prefill + self.tokens_decode

    def check(self, path: str | Path) -> None:
        """Check that the profile is consistent in itself.

        Args:
            path: Where it comes from or goes to, for the message.

        Raises:
            ExpertProfileError: The first contradiction found.

        """
        for problem in _contradictions(self):
            raise ExpertProfileError(path, *problem)

    def check_model(self, model: Fingerprint, path: str | Path) -> None:
        """Refuse a profile that was recorded on another model.

        Raises:
            ExpertProfileError: Names every field that differs.

        """
        if differing := self.fingerprint.differences(model, "profile"):
            raise ExpertProfileError(
                path,
                "fingerprint",
                differing,
                "This profile belongs to another model: record one with this model.",
            )


def _contradictions(profile: ExpertProfile) -> Iterator[tuple[str, str, str]]:
    """Yield field, problem and cure of what is wrong with a profile."""
    fingerprint = profile.fingerprint
    names = profile.layer_names
    if len(names) != fingerprint.num_moe_layers:
        problem = (
            f"{len(names)} layers are named and fingerprint.num_moe_layers is "
            f"{fingerprint.num_moe_layers}"
        )
        yield "layer_names", problem, _RECORD
    if repeated := {name for name in names if names.count(name) > 1}:
        yield "layer_names", f"{min(repeated)!r} stands twice", _RECORD
    shape = (fingerprint.num_moe_layers, fingerprint.num_experts)
    tokens = profile.tokens_prefill, profile.tokens_decode
    for field, seen in zip(_COUNTS, tokens, strict=True):
        counts = getattr(profile, field)
        yield from _bad_array(field, counts, shape)
        yield from _bad_sums(profile, field, counts, seen)
    if profile.counts_request is not None:
        yield from _bad_array(_REQUESTS, profile.counts_request, (None, *shape))
        total = profile.counts_request.sum(axis=0)
        for layer, expert in np.argwhere(total != profile.counts):
            problem = (
                f"all requests select expert {expert} of {names[layer]} "
                f"{total[layer, expert]} times, the counts say "
                f"{profile.counts[layer, expert]}"
            )
            yield _REQUESTS, problem, "Import the requests again, all of them."
    moments = {}
    for field in ("start", "end"):
        value = getattr(profile, field)
        try:
            moments[field] = datetime.fromisoformat(value)
        except ValueError:
            yield field, f"{value!r} is no ISO 8601 time", _RECORD
        if moments[field].utcoffset() != timedelta(0):
            yield field, f"{value!r} is not in UTC", "Write it with +00:00 at its end."
    if moments["start"] > moments["end"]:
        yield "end", f"{profile.end} is before start {profile.start}", _RECORD


def _bad_array(
    field: str, array: Counts, shape: tuple[int | None, ...]
) -> Iterator[tuple[str, str, str]]:
    if array.dtype != np.int64:
        yield field, f"its dtype is {array.dtype}, not int64", _RECORD
    fits = array.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, array.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        problem = (
            f"its shape is {array.shape}, not ({wanted}), which are the MoE layers and "
            "experts of the fingerprint"
        )
        yield field, problem, _RECORD
    for index in np.argwhere(array < 0):
        at = ", ".join(map(str, index))
        yield field, f"entry [{at}] is {array[tuple(index)]}, below 0", _RECORD


def _bad_sums(
    profile: ExpertProfile, field: str, counts: Counts, tokens: int
) -> Iterator[tuple[str, str, str]]:
    top_k = profile.top_k
    for name, row in zip(profile.layer_names, counts, strict=True):
        # Python's integers: a product of two int64 may not fit in one.
        if (total := sum(row.tolist())) != tokens * top_k:
            problem = (
                f"layer {name} has {total} selections, {tokens} tokens × top_k {top_k} "
                f"are {tokens * top_k}"
            )
            yield field, problem, f"Selections were lost or counted twice. {_RECORD}"
        if top_k > 1 and tokens and row.max() == total:
            problem = (
                f"all {total} selections of layer {name} are of expert {row.argmax()}, "
                f"and a token selects {top_k} different ones"
            )
            yield field, problem, f"The layer's routes were not read. {_RECORD}"


def _to_bytes(profile: ExpertProfile) -> bytes:
    metadata = {
        "version": VERSION,
        "fingerprint": profile.fingerprint.model_dump(mode="json"),
        "layer_names": profile.layer_names,
        "tokens_prefill": profile.tokens_prefill,
        "tokens_decode": profile.tokens_decode,
        "vllm_version": profile.vllm_version,
        "overlay": profile.overlay,
        "labels": profile.labels,
        "start": profile.start,
        "end": profile.end,
    }
    tensors = {field: getattr(profile, field) for field in _COUNTS}
    if profile.counts_request is not None:
        tensors[_REQUESTS] = profile.counts_request
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    # One entry: safetensors does not keep the order of several.
    return save(tensors, metadata={METADATA_KEY: json.dumps(metadata)})


def write_profile(profile: ExpertProfile, path: str | Path) -> None:
    """Write a profile so that the path always holds a whole file.

    A reader, or a process killed at any moment, sees the old file or the new one.

    Args:
        profile: What to write.
        path: The file; replaced if it is there.

    Raises:
        ExpertProfileError: The profile contradicts itself, or cannot be written.

    """
    profile.check(path)
    path = Path(path)
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with open(new, "wb") as stream:
                stream.write(_to_bytes(profile))
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
        _sync_directory(path.parent)
    except OSError as error:
        raise ExpertProfileError(
            path,
            "file",
            f"cannot be written: {error}",
            "Give a path on a writable disk with room.",
        ) from error


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_profile(path: str | Path) -> ExpertProfile:
    """Read a profile and check it completely.

    Raises:
        ExpertProfileError: The file cannot be read or is no consistent profile.

    """
    try:
        with safe_open(path, framework="numpy") as stream:
            text = (stream.metadata() or {}).get(METADATA_KEY)
            if text is None:
                raise ExpertProfileError(
                    path,
                    f"metadata.{METADATA_KEY}",
                    "it is missing, so this is another kind of safetensors file",
                    "Give a file that --expert-profile-out wrote.",
                )
            metadata = _parse_metadata(text, path)
            arrays = {}
            present = set(stream.keys())
            for name in sorted(present | set(_COUNTS)):
                if name not in (*_COUNTS, _REQUESTS) or name not in present:
                    state = "is missing" if name not in present else "is unknown"
                    raise ExpertProfileError(path, name, f"the tensor {state}", _RECORD)
                dtype = stream.get_slice(name).get_dtype()
                if dtype != "I64":
                    raise ExpertProfileError(
                        path, name, f"its dtype is {dtype}, not I64 (int64)", _RECORD
                    )
                arrays[name] = stream.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ExpertProfileError(
            path,
            "file",
            f"cannot be read as safetensors: {error}",
            "Check the path; a file cut short has to be recorded again.",
        ) from None
    fields = {name: getattr(metadata, name) for name in _Metadata.model_fields}
    del fields["version"]
    profile = ExpertProfile(**fields, **arrays)
    profile.check(path)
    return profile


def _parse_metadata(text: str, path: str | Path) -> _Metadata:
    field = f"metadata.{METADATA_KEY}"
    try:
        data = json.loads(text, object_pairs_hook=unique_keys)
    except ValueError as error:
        raise ExpertProfileError(
            path, field, f"not valid JSON: {error}", _RECORD
        ) from None
    version = data.get("version") if isinstance(data, dict) else None
    if isinstance(version, int) and (version != VERSION or isinstance(version, bool)):
        raise ExpertProfileError(
            path,
            "version",
            f"{version!r} is not {VERSION}, the one this vLLM reads",
            "Record the profile with this vLLM version.",
        )
    try:
        return _Metadata.model_validate(data)
    except ValidationError as error:
        where, problem = first_problem(error)
        raise ExpertProfileError(path, where or field, problem, _RECORD) from None


def merge_profiles(
    profiles: Sequence[ExpertProfile], paths: Sequence[str | Path]
) -> ExpertProfile:
    """Add profiles of one model up, as if their traffic had been recorded in one.

    Requests stay apart only if they are in every profile.

    Args:
        profiles: One or more profiles.
        paths: Where each of them comes from, for the message.

    Raises:
        ExpertProfileError: One is of another model or names other layers.

    """
    first = profiles[0]
    counts = {field: np.zeros_like(getattr(first, field)) for field in _COUNTS}
    requests: list[Counts] = []
    for profile, path in zip(profiles, paths, strict=True):
        profile.check_model(first.fingerprint, path)
        if differing := set(profile.layer_names) ^ set(first.layer_names):
            raise ExpertProfileError(
                path,
                "layer_names",
                f"{sorted(differing)} are not in both it and {paths[0]}",
                "Merge profiles that name their layers alike.",
            )
        order = [profile.layer_names.index(name) for name in first.layer_names]
        for field in _COUNTS:
            counts[field] += getattr(profile, field)[order]
        if profile.counts_request is not None:
            requests.append(profile.counts_request[:, order])
    return replace(
        first,
        **counts,
        tokens_prefill=sum(p.tokens_prefill for p in profiles),
        tokens_decode=sum(p.tokens_decode for p in profiles),
        vllm_version=", ".join(dict.fromkeys(p.vllm_version for p in profiles)),
        overlay=", ".join(dict.fromkeys(p.overlay for p in profiles if p.overlay))
        or None,
        labels=tuple(dict.fromkeys(label for p in profiles for label in p.labels)),
        start=min((p.start for p in profiles), key=datetime.fromisoformat),
        end=max((p.end for p in profiles), key=datetime.fromisoformat),
        counts_request=np.concatenate(requests)
        if len(requests) == len(profiles)
        else None,
    )


def add_to_profile(profile: ExpertProfile, path: str | Path) -> None:
    """Add counts to a profile file, which need not be there yet.

    Any number of processes may add to one file at a time; no count is lost. Beside the
    file lies an empty lock file.

    Raises:
        ExpertProfileError: The file is damaged, is of another model, or cannot be
            written. It is then as it was.

    """
    with _locked(Path(path)):
        if Path(path).exists():
            profile = merge_profiles([read_profile(path), profile], [path, "(new)"])
        write_profile(profile, path)


def check_writable(path: str | Path) -> ExpertProfile | None:
    """Find out whether counts can be added to a file, and change nothing but a lock.

    Returns:
        The profile that is there, None if there is none.

    Raises:
        ExpertProfileError: The directory cannot be written to, the path is no file, or
            a file is there and is no profile.

    """
    path = Path(path)
    with _locked(path):
        if path.exists() and not path.is_file():
            raise ExpertProfileError(
                path, "file", "it is no regular file", "Give the path of a file."
            )
        return read_profile(path) if path.exists() else None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = path.with_name(f".{path.name}.lock")
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ExpertProfileError(
            path,
            "file",
            f"cannot be written: {error}",
            "Give a path in a directory that is there and can be written to.",
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
