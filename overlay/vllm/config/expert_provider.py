# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Configuration of where a MoE layer's expert weights live."""

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Literal

import regex as re
from pydantic import field_validator

from vllm.config.utils import config, hash_factors

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

ExpertLayout = Literal["auto", "range", "split"]
ExpertSplitMode = Literal["auto", "two_calls", "staged"]


@config
class ExpertProviderConfig:
    """Configuration for placing MoE expert weights by use."""

    expert_provider: str = "resident"
    """Who owns the expert weights of MoE layers. Built in:
    - "resident": every row in device memory, as the model was loaded.
    - "pinned_hot": the rows a routing profile found hot stay in fast memory,
      the others in memory the kernel reads in place. Needs `--expert-map`.
    Plugins may register more names."""

    expert_map: str | None = None
    """Path of the expert map (JSON) that ranks the experts of each MoE layer by
    use and says how many rows stay hot. Required by `--expert-provider
    pinned_hot`."""

    expert_layout: ExpertLayout = "auto"
    """How hot and cold rows of one expert tensor are laid out:
    - "auto": the best layout this platform supports.
    - "range": one address range whose pages lie in different memories; every
      kernel runs unchanged.
    - "split": two tensors and a row map, where the GPU reads host-backed ranges
      slowly or not at all. Kernels have to be told, so fewer are served."""

    expert_split_mode: ExpertSplitMode = "auto"
    """How a kernel gets at cold rows with `--expert-layout split`:
    - "auto": "two_calls" where the kernel has it, else "staged".
    - "two_calls": they are read where they lie, by a second call of the kernel, or
      by the same one if it takes the address of every row.
    - "staged": those that a batch needs are copied behind the hot rows, into fast
      memory that all layers share, and the kernel is called once."""

    expert_hbm_gib: str | None = None
    """A number of GiB, or "auto": fast memory per rank for expert rows (HBM;
    locked memory on the CPU backend). The pages that are read most, over all
    layers, get it. Default: the rows before the expert map's cut. "auto" is what
    weights, activations and the KV cache leave of `--gpu-memory-utilization`; it
    needs `--expert-keep-kv-tokens` or `--kv-cache-memory-bytes`."""

    expert_keep_kv_tokens: int | None = None
    """Tokens the KV cache shall have room for, with `--expert-hbm-gib auto`."""

    expert_cold_tier: str = "host"
    """Where cold rows lie on CUDA:
    - "host": pinned host memory of the GPU's NUMA node.
    - "peer:N": free memory of this process's GPU N, read over NVLink."""

    expert_cold_dir: str | None = None
    """Directory for the cold rows when they are served from disk (CPU backend).
    Needs a disk file system with room for the cold rows.
    Default: the system's temporary directory. The files have no name, so they
    vanish with the process, however it ends."""

    @field_validator("expert_hbm_gib", mode="before")
    @classmethod
    def _is_size_or_auto(cls, value: object) -> object:
        if value is None or value == "auto":
            return value
        try:
            size = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            size = math.nan
        if not 0 <= size < math.inf:
            raise ValueError(
                f"--expert-hbm-gib {value}: neither a number of GiB nor 'auto'."
            )
        return str(value)

    @field_validator("expert_keep_kv_tokens")
    @classmethod
    def _is_positive(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError(f"--expert-keep-kv-tokens {value}: not a number above 0.")
        return value

    @field_validator("expert_cold_tier")
    @classmethod
    def _is_tier(cls, value: str) -> str:
        if not re.fullmatch(r"host|peer:\d+", value):
            raise ValueError(
                f"--expert-cold-tier {value}: neither 'host' nor 'peer:N', where N is "
                "the index of another GPU of this process."
            )
        return value

    @property
    def peer_device(self) -> int | None:
        """Index of the GPU that holds cold rows; None for host memory."""
        kind, _, device = self.expert_cold_tier.partition(":")
        return int(device) if kind == "peer" else None

    def uuid(self) -> str:
        """Identify the config in compile-cache keys.

        Only what can change a traced graph takes part: the provider, the layout
        and its mode. The other options choose the memory behind unchanged tensors, so
        a new map must not cost a recompilation.
        """
        return hash_factors(
            {
                "expert_provider": self.expert_provider,
                "layout": self.expert_layout,
                "split_mode": self.expert_split_mode,
            }
        )

    def needs_routed_ids(self) -> bool:
        """Whether layers must use kernels that are given expert ids."""
        if self.expert_provider == "resident":
            return False
        from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
            expert_provider_class,
        )

        return expert_provider_class(self.expert_provider).needs_routed_ids(self)

    def validate_engine(self, vllm_config: "VllmConfig") -> None:
        """Run the provider's start-up checks against the whole configuration.

        With every option at its default nothing is imported and nothing is done.

        Raises:
            ValueError: Unknown provider, or one that cannot serve this engine.

        """
        if self == ExpertProviderConfig():
            return
        from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
            expert_provider_class,
        )

        expert_provider_class(self.expert_provider).validate(vllm_config)

    def given_options(self) -> list[str]:
        """Flags of this group, besides the provider, that differ from default."""
        default = ExpertProviderConfig()
        return [
            "--" + field.name.replace("_", "-")
            for field in fields(self)  # type: ignore[arg-type]
            if field.name != "expert_provider"
            and getattr(self, field.name) != getattr(default, field.name)
        ]
