# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Configuration of recording how often traffic selects each expert."""

from typing import TYPE_CHECKING

from pydantic import Field

from vllm.config.utils import config, hash_factors

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig


@config
class ExpertProfileConfig:
    """Configuration for recording an expert profile."""

    expert_profile_out: str | None = None
    """Record how often each expert of each MoE layer is selected, and add the
    counts to this file (safetensors). Counts of the same model that are in the
    file already are kept. The file is written at an interval and when the server
    is told to stop, for which a `--shutdown-timeout` of 0 becomes 5 seconds."""

    expert_profile_interval: float = Field(default=60.0, gt=0)
    """Seconds of traffic after which `--expert-profile-out` is written. A process
    that is killed loses no more than that."""

    expert_profile_label: str | None = None
    """What the recorded traffic is, for the people who read the profile."""

    def uuid(self) -> str:
        """Identify the config in compile-cache keys.

        Counting adds to the graph; where the counts go does not.
        """
        return hash_factors({"expert_profile": self.expert_profile_out is not None})

    def validate_engine(self, vllm_config: "VllmConfig") -> None:
        """Refuse what cannot be recorded before anything is built.

        With every option at its default nothing is imported and nothing is done.

        Raises:
            ValueError: An option has no effect, this engine cannot be recorded, or the
                file cannot be added to.

        """
        default = ExpertProfileConfig()
        if self == default:
            return
        if self.expert_profile_out is None:
            given = [
                "--" + name.replace("_", "-")
                for name in ("expert_profile_interval", "expert_profile_label")
                if getattr(self, name) != getattr(default, name)
            ]
            raise ValueError(
                f"{', '.join(given)} has no effect without --expert-profile-out PATH: "
                "add it or drop the flag."
            )
        from vllm.model_executor.layers.fused_moe.expert_profile.admission import (
            admit_engine,
        )

        admit_engine(self.expert_profile_out, vllm_config)
