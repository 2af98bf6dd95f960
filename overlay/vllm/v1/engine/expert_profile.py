# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The engine's side of recording an expert profile: gather, merge, write.

The workers count; one process per data-parallel rank writes, and all of them add to
one file. The counters are read by a call to the workers, which lie in one queue with
the batches, so every pipeline stage is read after the same batch.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.version import __version__ as VLLM_VERSION

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.expert_profile.profile_file import (
        ExpertProfile,
    )
    from vllm.model_executor.layers.fused_moe.expert_profile.recorder import (
        RecordedRoutes,
    )
    from vllm.v1.executor import Executor

logger = init_logger(__name__)

# A worker that has ended already does not answer.
_SHUTDOWN_TIMEOUT_S = 2.0


def create_expert_profile_writer(
    vllm_config: VllmConfig, executor: "Executor"
) -> "ExpertProfileWriter | None":
    """Make the engine's writer, or None if no profile is recorded."""
    config = vllm_config.observability_config.expert_profile
    if config.expert_profile_out is None:
        return None
    return ExpertProfileWriter(vllm_config, executor)


class ExpertProfileWriter:
    """Adds what the workers count to the profile file.

    Args:
        vllm_config: The engine's configuration.
        executor: The engine's workers.

    """

    def __init__(self, vllm_config: VllmConfig, executor: "Executor"):
        config = vllm_config.observability_config.expert_profile
        assert config.expert_profile_out is not None
        self.path = config.expert_profile_out
        self._vllm_config = vllm_config
        self._executor = executor
        self._interval = config.expert_profile_interval
        self._labels = (
            (config.expert_profile_label,)
            if (config.expert_profile_label is not None)
            else ()
        )
        # Some runners warm up with batches that look real; all that came before is
        # not traffic.
        self._written = self._read(None)
        self._created = False
        self._since = _now()
        self._due = time.monotonic() + self._interval
        self._closed = False

    def write(self, timeout: float | None = None) -> dict[str, int]:
        """Add what was counted since the last write to the file.

        Waits for the passes that were launched.

        Args:
            timeout: Seconds to wait for the workers.

        Returns:
            The tokens that were added, by phase.

        Raises:
            ExpertProfileError: The file cannot be added to, or the counts contradict
                each other. Nothing is lost; the next write has them again.

        """
        from vllm.model_executor.layers.fused_moe.expert_profile.profile_file import (
            add_to_profile,
        )

        self._due = time.monotonic() + self._interval
        routes = self._read(timeout)
        until = _now()
        profile = self._profile(routes, until)
        if profile.tokens == 0 and not self._created:
            logger.warning(
                "No token has passed the model yet: adding zeros to %s", self.path
            )
        if profile.tokens or not self._created:
            add_to_profile(profile, self.path)
            self._created = True
            logger.info(
                "Added %d prompt and %d other tokens to expert profile %s",
                profile.tokens_prefill,
                profile.tokens_decode,
                self.path,
            )
            self._written, self._since = routes, until
        return {
            "tokens_prefill": profile.tokens_prefill,
            "tokens_decode": profile.tokens_decode,
        }

    def write_if_due(self) -> None:
        """Write once an interval; a failure is logged and tried again."""
        if time.monotonic() >= self._due:
            self._write_or_log(None)

    def begin_shutdown(self) -> None:
        """Write at once: what drains from now on may be cut short."""
        self._write_or_log(_SHUTDOWN_TIMEOUT_S)

    def close(self) -> None:
        """Write what is left; the workers must still be there."""
        if not self._closed:
            self._closed = True
            self._write_or_log(_SHUTDOWN_TIMEOUT_S)

    def _write_or_log(self, timeout: float | None) -> None:
        try:
            self.write(timeout)
        except Exception as error:
            logger.error(
                "Expert profile %s may lack the traffic since its last write: %r",
                self.path,
                error,
            )

    def _read(self, timeout: float | None) -> "RecordedRoutes":
        from vllm.model_executor.layers.fused_moe.expert_profile.recorder import (
            read_routes,
        )

        return merge_stages(self._executor.collective_rpc(read_routes, timeout))

    def _profile(self, routes: "RecordedRoutes", until: str) -> "ExpertProfile":
        from vllm.model_executor.layers.fused_moe.expert_profile.profile_file import (
            ExpertProfile,
        )
        from vllm.model_executor.layers.fused_moe.pinned_hot.fingerprint import (
            model_fingerprint,
        )

        counts = routes.counts - self._written.counts
        prefill, decode = np.subtract(routes.tokens, self._written.tokens).tolist()
        return ExpertProfile(
            fingerprint=model_fingerprint(
                self._vllm_config.model_config, len(routes.layer_names)
            ),
            layer_names=routes.layer_names,
            counts_prefill=counts[:, 0],
            counts_decode=counts[:, 1],
            tokens_prefill=prefill,
            tokens_decode=decode,
            vllm_version=VLLM_VERSION,
            start=self._since,
            end=until,
            overlay=_overlay_version(),
            labels=self._labels,
        )


def merge_stages(ranks: "Sequence[RecordedRoutes | None]") -> "RecordedRoutes":
    """Join what the ranks of one engine counted.

    Args:
        ranks: Answers in rank order; None from ranks that repeat another's work.

    Raises:
        ValueError: Pipeline stages passed different tokens.

    """
    from vllm.model_executor.layers.fused_moe.expert_profile.recorder import (
        RecordedRoutes,
    )

    stages = [rank for rank in ranks if rank is not None]
    if len(tokens := {stage.tokens for stage in stages}) > 1:
        raise ValueError(
            f"--expert-profile-out: pipeline stages passed different tokens, "
            f"{sorted(tokens)} (prompt, other)"
        )
    return RecordedRoutes(
        layer_names=tuple(name for stage in stages for name in stage.layer_names),
        counts=np.concatenate([stage.counts for stage in stages]),
        tokens=stages[0].tokens,
    )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())


def _overlay_version() -> str | None:
    """Version of the pinned-hot-experts overlay that is installed, if one is."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vllm-pinned-hot-overlay")
    except PackageNotFoundError:
        return None
