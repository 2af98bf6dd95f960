# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Counts from what other tools recorded.

*Routes* are the ids that `--enable-return-routed-experts` returns: of each request an
array `(tokens, layers, top_k)`, uint8 up to 256 experts and uint16 above, where a
padding id of -1 has become 255 or 65535. The layers are all hidden layers; those
without experts were never written and hold zeros. The last token of an answer has no
row.

*Expert loads* are EPLB's counters, `(layers, experts)` or with steps in front. EPLB
counts physical experts, which may be replicated and moved; they are put back to logical
ones with the map that was in force.

*CSV* has a header and the columns `layer`, `expert`, `count`, and optionally `phase`
(`prefill` or `decode`) and `request`.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pybase64 as base64

from vllm.model_executor.layers.fused_moe.expert_profile.errors import (
    ExpertPlanError,
)

Counts = npt.NDArray[np.int64]
Progress = Callable[[Iterable], Iterator]

_PHASES = ("prefill", "decode")
_CSV_COLUMNS = ("layer", "expert", "count")
# Names of arrays in dumps; EPLB itself has no file format.
_LOADS = ("logical_count", "expert_load", "expert_load_window", "expert_load_pass")
_PHYSICAL_TO_LOGICAL = "physical_to_logical_map"


class RecordingError(ExpertPlanError):
    """A recording that cannot be used; says which file, field, value, and the cure."""

    def __init__(self, path: str | Path, field: str, problem: str, cure: str):
        super().__init__(f"{path}: {field}: {problem}. {cure}")


@dataclass(frozen=True)
class Layout:
    """Which layers of a recording are MoE layers.

    Attributes:
        num_experts: Logical experts of a layer, E.
        top_k: Experts per token.
        names: MoE layers, as vLLM names them.
        indices: Which hidden layer each of them is.

    """

    num_experts: int
    top_k: int
    names: tuple[str, ...]
    indices: tuple[int, ...]


@dataclass
class Imported:
    """Counts of a recording.

    Attributes:
        prefill: Selections by prompt tokens, int64 `(num_layers, num_experts)`.
        decode: The same for other tokens.
        requests: Both by request, or None.
        padding: Rows that were padding and are not counted.
        cached: Prompt rows that are not counted, since their tokens were in the prefix
            cache and read no experts.

    """

    prefill: Counts
    decode: Counts
    requests: list[Counts] | None
    padding: int = 0
    cached: int = 0


def layer_index(name: str) -> int:
    """Which hidden layer a name such as `model.layers.3.mlp.experts` is of.

    Raises:
        ExpertPlanError: The name has no number, or several.

    """
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ExpertPlanError(
            f"layer {name!r} has {len(numbers)} numbers in its name, so which hidden "
            "layer it is cannot be told. Give a name with one, such as "
            "model.layers.3.mlp.experts."
        )
    return numbers[0]


def layer_columns(layout: Layout, num_layers: int, path: str | Path) -> list[int]:
    """Where the MoE layers are on the layer axis of a recording.

    Args:
        layout: The MoE layers.
        num_layers: Length of the axis.
        path: The recording, for the message.

    Raises:
        RecordingError: The axis covers neither the MoE layers nor all hidden layers.

    """
    if num_layers == len(layout.names):
        return list(range(num_layers))
    if max(layout.indices) < num_layers:
        return list(layout.indices)
    raise RecordingError(
        path,
        "layers",
        f"it has {num_layers} layers; the model has {len(layout.names)} MoE layers, "
        f"the last of them hidden layer {max(layout.indices)}",
        "Give the recording of this model, or the model of this recording.",
    )


def check_routes(
    routes: npt.NDArray, layout: Layout, path: str | Path
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Take the MoE layers out of one request's routes and find its padding.

    Args:
        routes: `(tokens, layers, top_k)`, of any integer dtype.
        layout: The MoE layers.
        path: The file, for messages.

    Returns:
        Routes int64 `(tokens, num_moe_layers, top_k)`, and `(tokens,)` which of them
        are padding.

    Raises:
        RecordingError: The shape or an id is not of the model.

    """
    if routes.ndim != 3 or routes.shape[2] != layout.top_k:
        raise RecordingError(
            path,
            "routed_experts",
            f"its shape is {routes.shape}, not (tokens, layers, {layout.top_k})",
            "Give what the request returned, unchanged.",
        )
    if not np.issubdtype(routes.dtype, np.integer):
        raise RecordingError(
            path,
            "routed_experts",
            f"its dtype is {routes.dtype}, not an integer",
            "Give what the request returned, unchanged.",
        )
    columns = layer_columns(layout, routes.shape[1], path)
    ids = routes[:, columns].astype(np.int64)
    # What -1 becomes in an unsigned dtype may be an expert too, but a token's experts
    # are different ones, so a whole row of it is padding.
    absent = ids < 0
    highest = np.iinfo(routes.dtype).max
    if layout.top_k > 1 or highest >= layout.num_experts:
        absent |= ids == highest
    padding = absent.all(axis=(1, 2))
    kept = ids[~padding]
    for token, layer, slot in np.argwhere((kept < 0) | (kept >= layout.num_experts)):
        raise RecordingError(
            path,
            "routed_experts",
            f"{layout.names[layer]} selects {kept[token, layer, slot]}, outside 0 … "
            f"{layout.num_experts - 1}",
            "Padding is whole rows of -1; a row with both is no route of this model.",
        )
    ordered = np.sort(kept, axis=2)
    for token, layer in np.argwhere(
        (ordered[..., 1:] == ordered[..., :-1]).any(axis=2)
    ):
        if (kept[:, layer] == kept[0, layer, 0]).all():
            raise RecordingError(
                path,
                "routed_experts",
                f"every token selects expert {kept[0, layer, 0]} of "
                f"{layout.names[layer]}, {layout.top_k} times",
                "The layer's routes were not captured, or it has no experts: name the "
                "MoE layers with --moe-layers, or record with another MoE backend.",
            )
        raise RecordingError(
            path,
            "routed_experts",
            f"token {token} selects {kept[token, layer].tolist()} in "
            f"{layout.names[layer]}: one expert twice",
            "A token's experts are different ones: give what the request returned.",
        )
    return ids, padding


def count(ids: npt.NDArray[np.int64], num_experts: int) -> Counts:
    """Count `(tokens, layers, top_k)` ids as `(layers, num_experts)`."""
    layers = ids.shape[1]
    offset = ids + np.arange(layers)[:, None] * num_experts
    flat = np.bincount(offset.ravel(), minlength=layers * num_experts)
    return flat.reshape(layers, num_experts).astype(np.int64)


@dataclass(frozen=True)
class Request:
    """One request's routes as they were found.

    Attributes:
        where: File and place in it, for messages.
        routes: `(tokens, layers, top_k)`.
        prompt_rows: How many of the rows are of prompt tokens; None if not known.
        skip: Rows in front that are not counted.

    """

    where: str
    routes: npt.NDArray
    prompt_rows: int | None
    skip: int = 0


def count_requests(requests: Iterable[Request], layout: Layout, phase: str) -> Imported:
    """Count the routes of requests.

    Args:
        requests: Their routes.
        layout: The MoE layers.
        phase: What rows are if a request does not say which are its prompt's.

    Raises:
        RecordingError: A route is not of the model, or there is none.

    """
    shape = len(layout.names), layout.num_experts
    result = Imported(np.zeros(shape, np.int64), np.zeros(shape, np.int64), [])
    assert result.requests is not None
    where = "the recording"
    for request in requests:
        where = request.where
        ids, padding = check_routes(request.routes, layout, where)
        result.cached += int((~padding[: request.skip]).sum())
        result.padding += int(padding.sum())
        rows = np.arange(len(ids))
        counted = ~padding & (rows >= request.skip)
        if request.prompt_rows is None:
            is_prompt = np.full(len(ids), phase == "prefill")
        else:
            is_prompt = rows < request.prompt_rows
        prefill = count(ids[counted & is_prompt], layout.num_experts)
        decode = count(ids[counted & ~is_prompt], layout.num_experts)
        result.prefill += prefill
        result.decode += decode
        result.requests.append(prefill + decode)
    if not result.prefill.any() and not result.decode.any():
        raise RecordingError(
            where, "routed_experts", "no token was routed", "Record some traffic."
        )
    return result


def read_requests(path: Path) -> Iterator[Request]:
    """Read the routes in a file.

    `.npy` holds one request, `.npz` and `.safetensors` one in each array, `.json` and
    `.jsonl` responses of the OpenAI-compatible API.

    Raises:
        RecordingError: The file cannot be read or has no routes.

    """
    if path.suffix in (".json", ".jsonl"):
        for number, response in _json_objects(path):
            yield from _response_requests(f"{path}:{number}", response)
        return
    for name, array in read_arrays(path).items():
        yield Request(f"{path}[{name}]" if name else str(path), array, None)


def _json_objects(path: Path) -> Iterator[tuple[int, Any]]:
    with _opened(path) as stream:
        if path.suffix == ".json":
            try:
                data = json.load(stream)
            except ValueError as error:
                raise _not_json(path, error) from None
            yield from enumerate(data if isinstance(data, list) else [data], 1)
            return
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise _not_json(f"{path}:{number}", error) from None


def _not_json(where: object, error: ValueError) -> RecordingError:
    return RecordingError(
        str(where), "file", f"not valid JSON: {error}", "Give whole responses."
    )


def _response_requests(where: str, response: Any) -> Iterator[Request]:
    choices = response.get("choices") if isinstance(response, Mapping) else None
    if not isinstance(choices, list) or not choices:
        raise RecordingError(
            where, "choices", "there are none", "Give responses of the server's API."
        )
    usage = response.get("usage") or {}
    prompt = usage.get("prompt_tokens")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for index, choice in enumerate(choices):
        encoded = choice.get("routed_experts")
        field = f"choices[{index}].routed_experts"
        if not isinstance(encoded, str):
            raise RecordingError(
                where,
                field,
                "it is missing",
                "Serve with --enable-return-routed-experts.",
            )
        try:
            routes = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)))
        except ValueError as error:
            raise RecordingError(
                where, field, f"no base64 of a .npy: {error}", "Give it unchanged."
            ) from None
        prompt_rows, skip = None, 0
        if prompt is not None:
            start = 0
            if len(choices) == 1 and usage.get("completion_tokens") is not None:
                # Rows that `routed_experts_prompt_start` left out.
                start = prompt + usage["completion_tokens"] - 1 - len(routes)
            if start < 0:
                raise RecordingError(
                    where,
                    field,
                    f"{len(routes)} rows, and usage has {prompt} prompt and "
                    f"{usage['completion_tokens']} completion tokens, of which the "
                    "last has none",
                    "Give the response unchanged.",
                )
            prompt_rows = max(prompt - start, 0)
            # Several answers share one prompt, which was computed once.
            skip = max(cached - start, 0) if index == 0 else prompt_rows
        yield Request(f"{where} choice {index}", routes, prompt_rows, skip)


def read_arrays(path: Path) -> dict[str, npt.NDArray]:
    """Read the arrays in a file; nothing in it is run.

    Args:
        path: `.npy` (its array has the name ""), `.npz`, `.safetensors`, `.pt`, or
            `.json` with nested lists.

    Raises:
        RecordingError: The file cannot be read or is of another kind.

    """
    try:
        if path.suffix == ".npy":
            return {"": np.load(path, allow_pickle=False)}
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            return dict(load_file(path))
        if path.suffix in (".pt", ".pth"):
            return _torch_arrays(path)
        if path.suffix == ".json":
            data = json.loads(path.read_text("utf-8"))
            named = data if isinstance(data, dict) else {"": data}
            return {
                name: np.array(value)
                for name, value in named.items()
                if isinstance(value, list)
            }
    # Each library has its own; all of them mean that the file is not what it says.
    except Exception as error:
        raise RecordingError(
            path,
            "file",
            f"cannot be read as {path.suffix}: {error}",
            "Check the path; a file cut short has to be recorded again.",
        ) from None
    raise RecordingError(
        path,
        "file",
        f"{path.suffix or 'a name without suffix'} is no kind of file that is known",
        "Give .npy, .npz, .safetensors, .pt, .json or .jsonl.",
    )


def _torch_arrays(path: Path) -> dict[str, npt.NDArray]:
    import torch

    data = torch.load(path, map_location="cpu", weights_only=True)
    named = data if isinstance(data, dict) else {"": data}
    return {
        name: value.numpy()
        for name, value in named.items()
        if isinstance(value, torch.Tensor)
    }


def count_loads(
    arrays: Mapping[str, npt.NDArray], layout: Layout, logical: bool, path: Path
) -> Counts:
    """Count EPLB's expert loads.

    Args:
        arrays: Arrays of a dump: the load, and `physical_to_logical_map`
            `(layers, physical experts)` if it is of physical experts.
        layout: The MoE layers.
        logical: Whether the user says that the load is of logical experts.
        path: The dump, for messages.

    Returns:
        int64 `(num_moe_layers, num_experts)`.

    Raises:
        RecordingError: The arrays are not of the model, or it is not known which
            logical expert each physical one is.

    """
    loads = [name for name in arrays if name in (*_LOADS, "")]
    if len(loads) != 1:
        raise RecordingError(
            path,
            "arrays",
            f"it has {', '.join(arrays) or 'none'}",
            f"Give one of {', '.join(_LOADS)}.",
        )
    load = arrays[loads[0]]
    if np.issubdtype(load.dtype, np.floating) and (load == np.rint(load)).all():
        load = load.astype(np.int64)
    if not np.issubdtype(load.dtype, np.integer) or load.ndim not in (2, 3):
        raise RecordingError(
            path,
            loads[0] or "array",
            f"its shape is {load.shape} and its dtype {load.dtype}, not whole numbers "
            "(layers, experts) or (steps, layers, experts)",
            "Give counts, not means or shares.",
        )
    if (load < 0).any():
        raise RecordingError(
            path, loads[0] or "array", f"it has {load.min()}, below 0", "Give counts."
        )
    total = load.astype(np.int64).sum(axis=0) if load.ndim == 3 else load
    columns = layer_columns(layout, len(total), path)
    total = total[columns].astype(np.int64)
    mapping = arrays.get(_PHYSICAL_TO_LOGICAL)
    if mapping is not None:
        return _to_logical(total, mapping, columns, layout, path)
    if not logical and loads[0] != "logical_count":
        raise RecordingError(
            path,
            _PHYSICAL_TO_LOGICAL,
            "it is missing, and EPLB's loads are of physical experts, which it moves",
            "Put the map into the dump, or say --logical if no expert was moved or the "
            "loads are of logical experts.",
        )
    if total.shape[1] != layout.num_experts:
        raise RecordingError(
            path,
            loads[0] or "array",
            f"it has {total.shape[1]} experts, the model has {layout.num_experts}",
            f"With replicas the dump needs {_PHYSICAL_TO_LOGICAL}.",
        )
    return total


def _to_logical(
    total: Counts,
    mapping: npt.NDArray,
    columns: Sequence[int],
    layout: Layout,
    path: Path,
) -> Counts:
    mapping = mapping[columns] if mapping.ndim == 2 else mapping
    if mapping.shape != total.shape:
        raise RecordingError(
            path,
            _PHYSICAL_TO_LOGICAL,
            f"its shape is {mapping.shape}, the load's is {total.shape}",
            "Give the map that was in force while the load was counted.",
        )
    if (mapping >= layout.num_experts).any():
        raise RecordingError(
            path,
            _PHYSICAL_TO_LOGICAL,
            f"it names expert {mapping.max()}, outside 0 … {layout.num_experts - 1}",
            "Give the map of this model.",
        )
    # -1 is a physical slot that holds no expert.
    if (empty := (mapping < 0) & (total > 0)).any():
        layer, slot = np.argwhere(empty)[0]
        raise RecordingError(
            path,
            _PHYSICAL_TO_LOGICAL,
            f"slot {slot} of {layout.names[layer]} holds no expert and has load "
            f"{total[layer, slot]}",
            "Give the map that was in force while the load was counted.",
        )
    result = np.zeros((len(total), layout.num_experts), np.int64)
    rows = np.broadcast_to(np.arange(len(total))[:, None], mapping.shape)
    held = mapping >= 0
    np.add.at(result, (rows[held], mapping[held]), total[held])
    return result


def read_csv(path: Path, layout: Layout, phase: str) -> Imported:
    """Read counts from CSV.

    Args:
        path: The file.
        layout: The MoE layers; a layer of the file is a name or a hidden layer's
            number.
        phase: What rows are of if there is no column `phase`.

    Raises:
        RecordingError: A column is missing, a value is none, or a cell stands twice.

    """
    shape = len(layout.names), layout.num_experts
    by_phase = {name: np.zeros(shape, np.int64) for name in _PHASES}
    requests: dict[str, Counts] = {}
    places = {name: i for i, name in enumerate(layout.names)} | {
        str(index): i for i, index in enumerate(layout.indices)
    }
    seen: dict[tuple, int] = {}
    with _opened(path) as stream:
        reader = csv.DictReader(stream, strict=True)
        columns = reader.fieldnames or []
        for column in _CSV_COLUMNS:
            if column not in columns:
                raise RecordingError(
                    path,
                    "header",
                    f"column {column!r} is missing from {', '.join(columns) or 'none'}",
                    f"Give the columns {', '.join(_CSV_COLUMNS)}.",
                )
        for row in reader:
            where = f"{path}:{reader.line_num}"
            layer = (row["layer"] or "").strip()
            if layer not in places:
                raise RecordingError(
                    where,
                    "layer",
                    f"{layer!r} is no MoE layer of the model",
                    f"Give a name such as {layout.names[0]!r} or a layer's number.",
                )
            expert = _whole(where, row, "expert", layout.num_experts)
            counted = _whole(where, row, "count", None)
            in_phase = (row.get("phase") or phase).strip()
            if in_phase not in _PHASES:
                raise RecordingError(
                    where, "phase", f"it is {in_phase!r}", "Give prefill or decode."
                )
            request = row.get("request")
            cell = places[layer], expert, in_phase, request
            if cell in seen:
                raise RecordingError(
                    where,
                    "expert",
                    f"layer {layer}, expert {expert} stands in line {seen[cell]} too",
                    "Give every count once.",
                )
            seen[cell] = reader.line_num
            by_phase[in_phase][places[layer], expert] += counted
            if request is not None:
                counts = requests.setdefault(request, np.zeros(shape, np.int64))
                counts[places[layer], expert] += counted
    return Imported(
        by_phase["prefill"],
        by_phase["decode"],
        list(requests.values()) if "request" in columns else None,
    )


def _whole(
    where: str, row: Mapping[str, str | None], column: str, below: int | None
) -> int:
    text = (row[column] or "").strip()
    limit = "" if below is None else f" … {below - 1}"
    if not text.isdecimal() or (below is not None and int(text) >= below):
        raise RecordingError(
            where,
            column,
            f"{text!r} is not a whole number, 0{limit}",
            "Correct the line.",
        )
    return int(text)


def _opened(path: Path) -> io.TextIOWrapper:
    try:
        return open(path, encoding="utf-8-sig", newline="")
    except OSError as error:
        raise RecordingError(
            path, "file", f"cannot be read: {error}", "Check the path."
        ) from None
