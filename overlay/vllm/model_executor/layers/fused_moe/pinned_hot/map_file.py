# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The expert map file: which experts of which layer are used most.

JSON, written by a planner or by hand, read at start-up by `pinned_hot`:

    {
      "format": "vllm-expert-map",
      "version": 1,
      "fingerprint": {"architecture": "Qwen3MoeForCausalLM", "num_experts": 32,
                      "top_k": 4, "hidden_size": 128, "moe_intermediate_size": 64,
                      "num_moe_layers": 4, "quantization": null},
      "layers": {
        "model.layers.0.mlp.experts": {
          "ranking": [17, 3, …],       every logical expert once, hottest first
          "share": [0.11, 0.08, …],    its share of the layer's selections
          "hot": 24                    rows to keep hot
        }, …
      },
      "draft_layers": {},            the same for a speculative draft model
      "profiles": [{"label": "code", "sha256": "…", "tokens": 4096}],
      "expected_cold_share": 0.021,
      "budget": {"asked": "--hot-gib 20", "cut": "optimal", "phase": "both",
                 "hot_rows": 96, "hot_bytes": 21474836480}
    }

A layer is named as vLLM names it. `layers` covers every MoE layer of the model;
`draft_layers` is left out or covers every MoE layer of the draft model, which may
have another number of experts. A ranking is complete, so the cut can move without
a new map. `budget` is optional and not read when a model is served.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

FORMAT = "vllm-expert-map"
VERSION = 1
_SHARE_SUM_TOLERANCE = 1e-3


class ExpertMapError(ValueError):
    """A map that cannot be used; says which file, field and value, and the cure."""

    def __init__(self, path: str | Path, field: str, problem: str, cure: str):
        super().__init__(f"expert map {path}: {field}: {problem}. {cure}")


def _as_list(value: object) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"is {value!r:.40}, not a list")
    return value


class Strict(BaseModel):
    """Base of file schemas: no conversions, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Fingerprint(Strict):
    """What a map was made for. Describes the model, not where its files lie."""

    architecture: str
    """First entry of `architectures` in the model's config."""
    num_experts: int = Field(ge=1)
    """Routed logical experts of a layer."""
    top_k: int = Field(ge=1)
    """Experts selected per token."""
    hidden_size: int = Field(ge=1)
    moe_intermediate_size: int | None = Field(ge=1)
    """Intermediate size of one expert; null if the config names none."""
    num_moe_layers: int = Field(ge=1)
    """MoE layers of the target model, draft layers not counted."""
    quantization: str | None
    """vLLM's name of the quantization method; null if unquantized."""

    def differences(self, model: "Fingerprint", owner: str) -> str:
        """Name every field in which a model differs; empty if none does.

        Args:
            model: The fingerprint of the model at hand.
            owner: What this fingerprint lies in, for the message.

        """
        return "; ".join(
            f"{field} is {getattr(self, field)!r} in the {owner} and "
            f"{getattr(model, field)!r} in the model"
            for field in Fingerprint.model_fields
            if getattr(self, field) != getattr(model, field)
        )


class LayerMap(Strict):
    """Ranking of one layer's experts."""

    ranking: tuple[int, ...] = Field(strict=False)
    """Logical expert ids, hottest first: a permutation of 0 … E-1."""
    share: tuple[float, ...] = Field(strict=False)
    """Share of the layer's selections per expert, in ranking order. Sums to 1,
    or is all 0 for a layer that saw no traffic."""
    hot: int
    """Rows to keep hot, 0 … E: the first `hot` entries of the ranking."""

    # Before pydantic's own conversions: JSON's `true` and `3.0` would pass for ids.
    @field_validator("share", mode="before")
    @classmethod
    def _is_numbers(cls, value: object) -> object:
        for index, item in enumerate(_as_list(value)):
            if isinstance(item, bool) or not isinstance(item, (int, float)):
                raise ValueError(f"entry {index} is {item!r}, not a number")
        return value

    @field_validator("ranking", mode="before")
    @classmethod
    def _is_permutation(cls, value: object) -> object:
        ranking = _as_list(value)
        num_experts = len(ranking)
        seen: dict[int, int] = {}
        for index, expert in enumerate(ranking):
            if isinstance(expert, bool) or not isinstance(expert, int):
                raise ValueError(f"entry {index} is {expert!r}, not an integer")
            if not 0 <= expert < num_experts:
                raise ValueError(
                    f"entry {index} is expert {expert}, outside 0 … {num_experts - 1}"
                )
            if expert in seen:
                missing = min(set(range(num_experts)) - set(ranking))
                raise ValueError(
                    f"expert {expert} stands at entries {seen[expert]} and {index}, "
                    f"and expert {missing} is missing"
                )
            seen[expert] = index
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "LayerMap":
        num_experts = len(self.ranking)
        if len(self.share) != num_experts:
            raise ValueError(
                f"share has {len(self.share)} entries, ranking has {num_experts}"
            )
        if not 0 <= self.hot <= num_experts:
            raise ValueError(f"hot is {self.hot}, outside 0 … {num_experts}")
        if not all(math.isfinite(x) and x >= 0 for x in self.share):
            raise ValueError("share has a negative or non-finite entry")
        for index in range(1, num_experts):
            if self.share[index] > self.share[index - 1]:
                raise ValueError(
                    f"share rises from entry {index - 1} to {index}; the ranking "
                    "is hottest first"
                )
        total = math.fsum(self.share)
        if total != 0 and abs(total - 1) > _SHARE_SUM_TOLERANCE:
            raise ValueError(f"share sums to {total:.6g}, not to 1")
        return self

    @property
    def hot_rows(self) -> tuple[int, ...]:
        """Experts before the cut."""
        return self.ranking[: self.hot]

    @property
    def expected_cold_share(self) -> float:
        """Share of the layer's selections beyond the cut, 0 to 1."""
        return math.fsum(self.share[self.hot :])


class Profile(Strict):
    """Where a map's counts came from."""

    label: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tokens: int = Field(ge=0)


class Budget(Strict):
    """What a map's cuts were chosen for; for people and for planning again."""

    asked: str
    """The option that said it, such as `--hot-gib 20`."""
    cut: Literal["uniform", "optimal"]
    """The same rows in every layer, or the best rows of all layers."""
    phase: Literal["both", "prefill", "decode"]
    """Which selections were ranked."""
    hot_rows: int = Field(ge=0)
    """Hot rows of all layers together."""
    hot_bytes: int | None = Field(default=None, ge=0)
    """HBM of one GPU that their pages take; null if the size of a row is unknown."""


class ExpertMap(Strict):
    """A whole map file; see the module's docstring for the format."""

    format: Literal["vllm-expert-map"]
    version: Literal[1]
    fingerprint: Fingerprint
    layers: dict[str, LayerMap] = Field(min_length=1)
    draft_layers: dict[str, LayerMap] = {}
    profiles: tuple[Profile, ...] = Field(strict=False)
    expected_cold_share: float = Field(ge=0, le=1)
    budget: Budget | None = None

    @model_validator(mode="after")
    def _layers_match_fingerprint(self) -> "ExpertMap":
        expected = self.fingerprint.num_experts
        for name, layer in self.layers.items():
            if len(layer.ranking) != expected:
                raise ValueError(
                    f"layer {name} ranks {len(layer.ranking)} experts and "
                    f"fingerprint.num_experts is {expected}"
                )
        if len(self.layers) != self.fingerprint.num_moe_layers:
            raise ValueError(
                f"layers has {len(self.layers)} entries and "
                f"fingerprint.num_moe_layers is {self.fingerprint.num_moe_layers}"
            )
        return self

    def to_json(self) -> str:
        """Text of the map file, with a final newline."""
        unset = {"budget"} if self.budget is None else set()
        return json.dumps(self.model_dump(mode="json", exclude=unset), indent=1) + "\n"

    def check_model(self, model: Fingerprint, path: str | Path) -> None:
        """Refuse a map that was made for another model.

        Raises:
            ExpertMapError: Names every field that differs.

        """
        if differing := self.fingerprint.differences(model, "map"):
            raise ExpertMapError(
                path,
                "fingerprint",
                differing,
                "This map belongs to another model: record a profile with this "
                "model and make a map from it.",
            )

    def names(self, layer_name: str) -> bool:
        """Whether the map has an entry for a layer, of target or draft."""
        return layer_name in self.layers or layer_name in self.draft_layers

    def check_layers(
        self, num_experts: Mapping[str, int], path: str | Path, draft: bool = False
    ) -> None:
        """Refuse a map that does not cover exactly the given layers.

        Args:
            num_experts: Routed logical experts by name of every layer to cover.
            path: The file, for the message.
            draft: Compare with `draft_layers` instead of `layers`.

        Raises:
            ExpertMapError: A layer is missing, unknown, or of another size.

        """
        section = "draft_layers" if draft else "layers"
        entries = self.draft_layers if draft else self.layers
        missing = sorted(num_experts.keys() - entries.keys())
        unknown = sorted(entries.keys() - num_experts.keys())
        if missing or unknown:
            raise ExpertMapError(
                path,
                section,
                f"the model's layers {missing or 'none'} are missing and the map's "
                f"layers {unknown or 'none'} are not MoE layers of the model",
                "Every MoE layer needs one entry under vLLM's own layer name, for "
                f"example {min(num_experts, default='none')!r}.",
            )
        for name, expected in num_experts.items():
            if (ranked := len(entries[name].ranking)) != expected:
                raise ExpertMapError(
                    path,
                    f"{section}[{name!r}].ranking",
                    f"{ranked} experts are ranked, the layer has {expected}",
                    "Make the map from a profile of this model.",
                )


def parse_expert_map(text: str, path: str | Path) -> ExpertMap:
    """Parse and validate a map file's text.

    Args:
        text: The JSON text.
        path: The file, for messages.

    Raises:
        ExpertMapError: The first problem found, with its field.

    """
    try:
        data = json.loads(text, object_pairs_hook=unique_keys)
    except ValueError as error:
        raise ExpertMapError(
            path, "file", f"not valid JSON: {error}", "Write the map again."
        ) from None
    if isinstance(data, dict) and data.get("format") == FORMAT:
        version = data.get("version")
        if version != VERSION or isinstance(version, bool):
            raise ExpertMapError(
                path,
                "version",
                f"{version!r} is not {VERSION}, the one this vLLM reads",
                "Make the map with the tools of this vLLM version.",
            )
    try:
        return ExpertMap.model_validate(data)
    except ValidationError as error:
        field, message = first_problem(error)
        raise ExpertMapError(
            path, field or "file", message, "Correct the file or make the map again."
        ) from None


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Field and message of the first thing pydantic found wrong with a file."""
    first = error.errors(include_url=False)[0]
    field = "".join(
        f"[{part!r}]" if "." in str(part) or isinstance(part, int) else f".{part}"
        for part in first["loc"]
    ).lstrip(".")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] not in ("value_error", "missing", "extra_forbidden"):
        message += f", not {first['input']!r:.80}"
    return field, message


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a JSON object, as `object_pairs_hook`, and refuse a repeated key."""
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {repeated!r} stands twice in one object")
    return result


def load_expert_map(path: str | Path) -> ExpertMap:
    """Read and validate a map file.

    Raises:
        ExpertMapError: The file cannot be read or is not a valid map.

    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExpertMapError(
            path, "file", f"cannot be read: {error}", "Check --expert-map."
        ) from None
    return parse_expert_map(text, path)


def rank_experts(counts: Sequence[float], hot: int) -> LayerMap:
    """Rank a layer's experts by their selection counts.

    Args:
        counts: Selections per logical expert, `(E,)`.
        hot: Rows to keep hot, 0 … E.

    Returns:
        The ranking; ties go to the lowest expert id.

    """
    total = sum(counts)
    ranking = sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert))
    share = [counts[expert] / total if total else 0.0 for expert in ranking]
    return LayerMap(ranking=tuple(ranking), share=tuple(share), hot=hot)


def expert_map_from_counts(
    counts: Mapping[str, Sequence[float]],
    hot: int | Mapping[str, int],
    fingerprint: Fingerprint,
    profiles: Sequence[Profile],
    budget: Budget | None = None,
) -> ExpertMap:
    """Make a map from selection counts and cuts.

    Args:
        counts: Selections per logical expert, `(E,)`, by layer name.
        hot: Rows to keep hot, 0 … E: in every layer, or by layer name.
        fingerprint: The model the counts were recorded on.
        profiles: Where the counts came from.
        budget: What the cuts were chosen for.

    """
    layers = {
        name: rank_experts(layer, hot if isinstance(hot, int) else hot[name])
        for name, layer in counts.items()
    }
    cold = sum(layer.expected_cold_share for layer in layers.values()) / len(layers)
    return ExpertMap(
        format=FORMAT,
        version=VERSION,
        fingerprint=fingerprint,
        layers=layers,
        profiles=tuple(profiles),
        expected_cold_share=min(cold, 1.0),
        budget=budget,
    )
