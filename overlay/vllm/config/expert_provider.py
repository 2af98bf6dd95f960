# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Configuration of where a MoE layer's expert weights live."""

from typing import TYPE_CHECKING, Literal

from vllm.config.utils import config, hash_factors

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

ExpertLayout = Literal["auto", "range", "split"]


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
    - "split": two tensors and a row map."""

    expert_cold_dir: str | None = None
    """Directory for the cold rows when they are served from disk (CPU backend).
    Needs a disk file system with room for the cold rows.
    Default: the system's temporary directory. The files have no name, so they
    vanish with the process, however it ends."""

    def uuid(self) -> str:
        """Identify the config in compile-cache keys.

        Only what can change a traced graph takes part: the provider and the
        layout. The map and the cold directory choose the memory behind
        unchanged tensors, so a new map must not cost a recompilation.
        """
        return hash_factors(
            {"expert_provider": self.expert_provider, "layout": self.expert_layout}
        )

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
            "--" + name.replace("_", "-")
            for name in ("expert_map", "expert_layout", "expert_cold_dir")
            if getattr(self, name) != getattr(default, name)
        ]
