# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which engines an expert profile can be recorded of."""

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.expert_profile.profile_file import (
    check_writable,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.fingerprint import (
    model_fingerprint,
)
from vllm.platforms import current_platform

logger = init_logger(__name__)

_SHUTDOWN_TIMEOUT_S = 5


def _why_not_engine(vllm_config: VllmConfig) -> str | None:
    """Why this engine's routes cannot be counted, with the cure, or None."""
    model_config = vllm_config.model_config
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    if model_config is None or not model_config.is_moe:
        return "the model has no MoE layers. Drop the flag."
    if not (current_platform.is_cuda_alike() or current_platform.is_cpu()):
        return (
            f"routes are counted on CUDA and on the CPU backend, not on "
            f"{current_platform.device_type!r}. Drop the flag."
        )
    if model_config.enable_sleep_mode:
        return (
            "sleep mode discards the counters with the weights. Drop "
            "--enable-sleep-mode."
        )
    if vllm_config.aux_output_config.enabled:
        return (
            "--enable-return-routed-experts listens at the same place. Drop one of "
            "the two; its output can be imported into a profile."
        )
    # The others change which row of a batch belongs to which request.
    if parallel.use_ubatching:
        return "micro-batches are not told apart. Drop --enable-dbo and --ubatch-size."
    if parallel.prefill_context_parallel_size > 1:
        return "context-parallel prefill deals out rows. Use 1 for it."
    if parallel.use_sequence_parallel_moe:
        return (
            "sequence-parallel MoE layers deal out rows to ranks. Use another "
            "--all2all-backend, or drop --enable-expert-parallel."
        )
    if parallel.enable_elastic_ep:
        return "elastic expert parallelism changes ranks. Drop --enable-elastic-ep."
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        return "some layers skip prompt rows. Drop --kv-sharing-fast-prefill."
    if speculative is not None and speculative.enable_adaptive_verification:
        return (
            "adaptive verification drops rows on the device. Drop "
            "enable_adaptive_verification from --speculative-config."
        )
    return None


def admit_engine(path: str, vllm_config: VllmConfig) -> None:
    """Check that an engine's routes can be counted and added to a file.

    A server that is told to stop kills its engines at once unless it has a shutdown
    timeout, so one is set for the last write.

    Args:
        path: The profile, which may be there already.
        vllm_config: The engine.

    Raises:
        ValueError: Says why not, and the cure.

    """
    if reason := _why_not_engine(vllm_config):
        raise ValueError(f"--expert-profile-out: {reason}")
    if vllm_config.shutdown_timeout == 0:
        logger.info("--shutdown-timeout is %d s to write %s", _SHUTDOWN_TIMEOUT_S, path)
        vllm_config.shutdown_timeout = _SHUTDOWN_TIMEOUT_S
    if (present := check_writable(path)) is not None:
        # How many MoE layers there are is known once the model is built.
        model = model_fingerprint(
            vllm_config.model_config, present.fingerprint.num_moe_layers
        )
        present.check_model(model, path)
