# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Real MoE layers on the CPU backend for the tests of expert providers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, RoutedExperts
from vllm.platforms import current_platform
from vllm.v1.worker.workspace import init_workspace_manager

NUM_EXPERTS = 8
TOP_K = 2
HIDDEN = 64
INTERMEDIATE = 96
LAYER_NAMES = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "moe_intermediate_size": INTERMEDIATE,
    "num_hidden_layers": len(LAYER_NAMES),
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def write_model(directory: Path, **changes: object) -> Path:
    """Write the config of a tiny MoE model; there are no weights."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return directory


def engine_args(model: Path, **kwargs: object) -> EngineArgs:
    """Arguments of an engine over the tiny model, with dummy weights."""
    defaults: dict = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": 64,
        "enforce_eager": True,
    }
    return EngineArgs(**(defaults | kwargs))


def engine_config(model: Path, **kwargs: object) -> VllmConfig:
    return engine_args(model, **kwargs).create_engine_config()


@contextmanager
def single_rank(config: VllmConfig, tmp_path: Path) -> Iterator[None]:
    """Enter an engine's configuration with a process group of one rank."""
    with set_current_vllm_config(config):
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{tmp_path}/rendezvous",
            backend=current_platform.dist_backend,
        )
        initialize_model_parallel(1, 1)
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()  # the kernel lets only threads that asked use AMX
        device = torch.device(current_platform.device_type)
        if current_platform.is_cuda():
            init_workspace_manager(device)
        try:
            with device:
                yield
        finally:
            cleanup_dist_env_and_memory()


def build_layer(
    name: str = LAYER_NAMES[0],
    dtype: torch.dtype = torch.float32,
    num_experts: int = NUM_EXPERTS,
    top_k: int = TOP_K,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    **kwargs: object,
) -> RoutedExperts:
    """Build a MoE layer inside `single_rank`; its weights are not set."""
    runner = FusedMoEFactory(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=intermediate,
        params_dtype=dtype,
        prefix=name,
        **kwargs,
    )
    return runner.routed_experts


def fill(layer: RoutedExperts, seed: int = 0) -> None:
    """Give every expert different weights, scales and biases."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, parameter in layer.named_parameters():
        shape = parameter.shape
        if parameter.dtype == torch.uint8:
            # MXFP4: any nibble is a number; scales are powers of two around 1/64.
            low, high = (118, 125) if "scale" in name else (0, 256)
            values = torch.randint(low, high, shape, generator=generator, device="cpu")
        elif parameter.dtype == torch.int32:
            # Packed integers and zero points: every bit pattern is a number.
            low, high = -(1 << 31), 1 << 31
            values = torch.randint(low, high, shape, generator=generator, device="cpu")
        elif "scale" in name:
            values = torch.rand(shape, generator=generator, device="cpu") * 0.5 + 0.01
        else:
            values = torch.randn(shape, generator=generator, device="cpu") * 0.1
        parameter.data.copy_(values.to(parameter.dtype))


def routes(
    layer: RoutedExperts, num_tokens: int, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw tokens `(M, hidden)`, routing weights and ids `(M, top_k)`."""
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (num_tokens, layer.hidden_size)
    x = torch.randn(shape, generator=generator, device="cpu")
    shape = (num_tokens, layer.global_num_experts)
    scores = torch.rand(shape, generator=generator, device="cpu")
    weights, ids = scores.topk(layer.top_k, dim=-1)
    device = next(layer.parameters()).device
    ids = ids.to(device, torch.int32)
    return x.to(device, layer.params_dtype), weights.to(device), ids


def run(layer: RoutedExperts, num_tokens: int, seed: int = 1) -> torch.Tensor:
    """Run a layer on random tokens and routes, `(num_tokens, hidden)`."""
    return layer.forward_modular(*routes(layer, num_tokens, seed))
