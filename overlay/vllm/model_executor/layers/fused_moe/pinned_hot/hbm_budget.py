# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How much HBM is left for expert rows, before any of them is loaded.

Activations are not known before the model has run once, and it runs only after the
experts are placed. They are estimated from the shapes that dominate them; what the
estimate leaves over goes to the KV cache, which vLLM sizes afterwards.
"""

from dataclasses import dataclass

import torch

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.math_utils import cdiv

# CUDA graphs, library workspaces and what allocators round up to.
_FIXED_BYTES = 1 << 30
# Copies that live beside the largest activations while a layer runs.
_ACTIVATION_COPIES = 2
_LOGITS_BYTES = 4


@dataclass(frozen=True)
class HbmPlan:
    """Where a GPU's memory goes, in bytes.

    Attributes:
        usable: What this process may still take: of its `--gpu-memory-utilization`
            and of what is free.
        kv_cache: Kept for the KV cache.
        other_weights: Kept for weights that are not loaded yet.
        activations: Kept for activations and CUDA graphs, an estimate.

    """

    usable: int
    kv_cache: int
    other_weights: int
    activations: int

    @property
    def experts(self) -> int:
        """Bytes left for expert rows; negative if the rest does not fit."""
        return self.usable - self.kv_cache - self.other_weights - self.activations


def plan_hbm(vllm_config: VllmConfig, device: int, unloaded_bytes: int) -> HbmPlan:
    """Plan a GPU's memory around the KV cache that was asked for.

    Args:
        vllm_config: The engine's configuration; its attention layers are built.
        device: Index of the GPU.
        unloaded_bytes: Bytes of parameters that have no memory yet, expert rows not
            counted.

    """
    free, total = torch.accelerator.get_memory_info(device)
    cache = vllm_config.cache_config
    kv_cache = cache.kv_cache_memory_bytes
    if kv_cache is None:
        tokens = vllm_config.offload_config.experts.expert_keep_kv_tokens
        assert tokens is not None
        kv_cache = kv_cache_bytes(vllm_config, tokens)
    # Like vLLM's own budget, without what other processes hold of the GPU.
    ours = int(total * cache.gpu_memory_utilization)
    return HbmPlan(
        usable=min(ours - torch.accelerator.memory_reserved(device), free),
        kv_cache=kv_cache,
        other_weights=unloaded_bytes,
        activations=activation_bytes(vllm_config),
    )


def kv_cache_bytes(vllm_config: VllmConfig, tokens: int) -> int:
    """Bytes of a KV cache for a number of tokens, in whole blocks of every layer."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)  # type: ignore[type-abstract]
    total = 0
    for layer in layers.values():
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is not None:
            total += cdiv(tokens, spec.block_size) * spec.page_size_bytes
    return total


def activation_bytes(vllm_config: VllmConfig) -> int:
    """Estimate the memory of one forward pass of the largest batch, in bytes.

    Counted: what the expert kernels keep per selection (gate and up, their product,
    the output), the hidden states, and the logits of every sequence in float32.
    """
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    config = model.hf_text_config
    hidden = model.get_hidden_size()
    intermediate = getattr(config, "moe_intermediate_size", None)
    intermediate = intermediate or config.intermediate_size
    selections = scheduler.max_num_batched_tokens * model.get_num_experts_per_tok()
    item = torch.empty((), dtype=model.dtype).element_size()
    experts = selections * (3 * intermediate + hidden) * item
    tokens = scheduler.max_num_batched_tokens * hidden * item
    logits = scheduler.max_num_seqs * model.get_vocab_size() * _LOGITS_BYTES
    return _FIXED_BYTES + experts + _ACTIVATION_COPIES * (tokens + logits)
