# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Describe a model as expert maps and profiles do."""

from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import Fingerprint


def model_fingerprint(model_config: ModelConfig, num_moe_layers: int) -> Fingerprint:
    """Describe a model as an expert map does.

    Args:
        model_config: The target model.
        num_moe_layers: Its MoE layers.

    """
    text_config = model_config.hf_text_config
    intermediate = getattr(text_config, "moe_intermediate_size", None)
    return Fingerprint(
        architecture=model_config.architectures[0],
        num_experts=model_config.get_num_experts(),
        top_k=model_config.get_num_experts_per_tok(),
        hidden_size=model_config.get_hidden_size(),
        moe_intermediate_size=intermediate
        or getattr(text_config, "intermediate_size", None),
        num_moe_layers=num_moe_layers,
        quantization=model_config.quantization,
    )
