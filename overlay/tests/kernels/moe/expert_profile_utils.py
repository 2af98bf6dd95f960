# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Profiles of random traffic for the tests of expert maps."""

import numpy as np

from vllm.model_executor.layers.fused_moe.expert_profile.plan import Weighted
from vllm.model_executor.layers.fused_moe.expert_profile.profile_file import (
    ExpertProfile,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import Fingerprint

LAYERS, EXPERTS, TOP_K = 3, 16, 2


def make_fingerprint(
    layers: int = LAYERS,
    experts: int = EXPERTS,
    top_k: int = TOP_K,
    hidden: int = 64,
    intermediate: int = 96,
) -> Fingerprint:
    return Fingerprint(
        architecture="Qwen3MoeForCausalLM",
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        num_moe_layers=layers,
        quantization=None,
    )


def layer_names(layers: int = LAYERS) -> tuple[str, ...]:
    return tuple(f"model.layers.{i}.mlp.experts" for i in range(layers))


def draw_routes(
    tokens: int, seed: int, layers: int, experts: int, top_k: int, skew: float
) -> np.ndarray:
    """Draw `(tokens, layers, top_k)` ids, distinct for a token, some far more often."""
    random = np.random.default_rng(seed)
    heat = -skew * np.log1p(np.arange(experts))
    order = np.stack([random.permutation(experts) for _ in range(layers)])
    noise = random.gumbel(size=(tokens, layers, experts))
    ranked = np.argsort(-(heat + noise), axis=-1)[..., :top_k]
    return np.take_along_axis(order[None], ranked, axis=-1)


def count_routes(routes: np.ndarray, experts: int) -> np.ndarray:
    """Count `(tokens, layers, top_k)` ids as `(layers, experts)`."""
    counts = np.zeros((routes.shape[1], experts), dtype=np.int64)
    for layer in range(routes.shape[1]):
        counts[layer] = np.bincount(routes[:, layer].ravel(), minlength=experts)
    return counts


def make_profile(
    tokens: int = 200,
    decode_tokens: int | None = None,
    seed: int = 0,
    requests: int | None = None,
    layers: int = LAYERS,
    experts: int = EXPERTS,
    top_k: int = TOP_K,
    skew: float = 1.0,
    labels: tuple[str, ...] = (),
) -> ExpertProfile:
    """Make a profile of random traffic, two thirds of it prompts if not said."""
    decode = tokens // 3 if decode_tokens is None else decode_tokens
    prefill = tokens - decode if decode_tokens is None else tokens
    routes = draw_routes(prefill + decode, seed, layers, experts, top_k, skew)
    by_request = None
    if requests is not None:
        parts = np.array_split(routes, requests)
        by_request = np.stack([count_routes(part, experts) for part in parts])
    return ExpertProfile(
        fingerprint=make_fingerprint(layers, experts, top_k),
        layer_names=layer_names(layers),
        counts_prefill=count_routes(routes[:prefill], experts),
        counts_decode=count_routes(routes[prefill:], experts),
        tokens_prefill=prefill,
        tokens_decode=decode,
        vllm_version="test",
        start="2026-11-30T03:12:00Z",
        end="2026-11-30T04:12:00Z",
        labels=labels,
        counts_request=by_request,
    )


def named(profile: ExpertProfile, label: str, weight: float | None = None) -> Weighted:
    return Weighted(profile, label * 64, label, weight)
