# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layers of every quantization for the tests of `pinned_hot` on a CUDA GPU."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from tests.kernels.moe.expert_provider_utils import (
    LAYER_NAMES,
    build_layer,
    routes,
    run,
)
from tests.kernels.moe.pinned_hot_utils import load_weights
from vllm.model_executor.layers.fused_moe.moe_align_block_size import (
    moe_align_block_size,
)
from vllm.model_executor.model_loader.expert_weights import bind_expert_providers

E, TOP_K, HIDDEN, INTERMEDIATE = 32, 4, 1024, 768
MODEL = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": E,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": 1,
}
HOT = (0, 1, 7, 20, E - 1, E)
# Up to here every quantization leaves pages of both kinds.
MIXED = 7
TOKENS = (1, 2, 16, 64, 300, 2048)
BIASED = {"has_bias": True, "activation": "swigluoai"}


def compressed_tensors(weights, format_name, inputs=None):
    from vllm.model_executor.layers.quantization.compressed_tensors import (
        compressed_tensors as module,
    )

    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return module.CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": format_name,
            "config_groups": {"group_0": group | {"format": format_name}},
            "ignore": [],
        }
    )


def int_weights(bits, symmetric, group=128):
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
    }


def fp8(scheme="dynamic", block=None):
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    return Fp8Config(True, scheme, weight_block_size=block)


def gptq(bits):
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig

    return AutoGPTQConfig(bits, 128, False, True, False, {}, {})


def awq():
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig

    return AutoAWQConfig(4, 128, True, False)


def modelopt(algorithm):
    from vllm.model_executor.layers.quantization import modelopt as module

    config = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16}
    names = {
        "NVFP4": "ModelOptNvFp4Config",
        "MXFP8": "ModelOptMxFp8Config",
        "FP8": "ModelOptFp8Config",
    }
    return getattr(module, names[algorithm]).from_config(
        {"quantization": config | {"exclude_modules": []}}
    )


def mxfp4(name):
    from vllm.model_executor.layers.quantization import mxfp4 as module

    return getattr(module, name)()


FP8_CHANNEL = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "channel",
    "dynamic": False,
}
FP8_TOKEN = FP8_CHANNEL | {"strategy": "token", "dynamic": True}
FP4_GROUP = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
    "dynamic": False,
}


@dataclass(frozen=True)
class Kind:
    """A quantization on the kernel that stock chooses for it on this GPU.

    Attributes:
        dtype: Activation dtype.
        online: `--quantization` of a method that quantizes while loading.
        checkpoint: Makes the configuration that a quantized checkpoint would bring.
        layer: More arguments of the layer.
        backend: `--moe-backend`.

    """

    dtype: str = "bfloat16"
    online: str | None = None
    checkpoint: Callable[[], object] | None = None
    layer: dict = field(default_factory=dict)
    backend: str = "auto"


KINDS = {
    "bf16": Kind(),
    "fp16": Kind("float16"),
    "bf16_bias": Kind(layer=BIASED),
    "fp8_per_tensor": Kind(online="fp8_per_tensor"),
    "fp8_per_block": Kind(online="fp8_per_block"),
    "fp8_per_channel": Kind(online="fp8_per_channel"),
    "int8_weight_only": Kind(online="int8_per_channel_weight_only"),
    "mxfp8_marlin": Kind(online="mxfp8"),
    "mxfp4_marlin": Kind(online="mxfp4"),
    "fp8_checkpoint_tensor": Kind(checkpoint=fp8),
    "fp8_checkpoint_static": Kind(checkpoint=partial(fp8, "static")),
    "fp8_checkpoint_block": Kind(checkpoint=partial(fp8, block=[128, 128])),
    "ct_fp8_channel": Kind(
        checkpoint=partial(
            compressed_tensors, FP8_CHANNEL, "float-quantized", FP8_TOKEN
        )
    ),
    "ct_int4": Kind(
        checkpoint=partial(compressed_tensors, int_weights(4, True), "pack-quantized")
    ),
    "ct_int4_zero_points": Kind(
        checkpoint=partial(compressed_tensors, int_weights(4, False), "pack-quantized")
    ),
    "ct_int8": Kind(
        checkpoint=partial(compressed_tensors, int_weights(8, True), "pack-quantized")
    ),
    "ct_nvfp4": Kind(
        checkpoint=partial(compressed_tensors, FP4_GROUP, "nvfp4-pack-quantized", None)
    ),
    "gptq_int4": Kind(checkpoint=partial(gptq, 4)),
    "gptq_int8": Kind(checkpoint=partial(gptq, 8)),
    "awq": Kind(checkpoint=awq),
    "modelopt_nvfp4": Kind(checkpoint=partial(modelopt, "NVFP4")),
    "modelopt_mxfp8": Kind(checkpoint=partial(modelopt, "MXFP8")),
    "modelopt_fp8": Kind(checkpoint=partial(modelopt, "FP8")),
    "mxfp4_checkpoint": Kind(checkpoint=partial(mxfp4, "Mxfp4Config")),
    "gpt_oss_mxfp4": Kind(
        checkpoint=partial(mxfp4, "GptOssMxfp4Config"), layer=BIASED, backend="marlin"
    ),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def options_of(kind):
    """Options of an engine with layers of a kind."""
    return {
        "dtype": kind.dtype,
        "quantization": kind.online,
        "moe_backend": kind.backend,
    }


def load(config, kind, names=LAYER_NAMES[:1]):
    """Take layers of a kind through the loader's steps, each with other weights."""
    quant_config = config.quant_config
    if kind.checkpoint is not None:
        quant_config = kind.checkpoint()
        quant_config.packed_modules_mapping = {}
    layers = [
        build_layer(
            name,
            DTYPES[kind.dtype],
            E,
            TOP_K,
            HIDDEN,
            INTERMEDIATE,
            quant_config=quant_config,
            **kind.layer,
        )
        for name in names
    ]
    model = torch.nn.ModuleList(layers)
    bind_expert_providers(model, config, config.model_config)
    for seed, layer in enumerate(layers):
        load_weights(layer, seed)
    return layers


def outputs(layer, holes):
    """Outputs for every batch size, and for a batch whose tail is padding.

    Args:
        layer: The layer to run.
        holes: Also give one slot of a real token the id -1, which not every kernel
            defines.

    """
    # The output may be a view of a workspace that the next call overwrites.
    found = [run(layer, m).clone() for m in TOKENS]
    x, weights, ids = routes(layer, 64)
    ids[40:] = -1
    if holes:
        ids[3, 1] = -1
    # Only the rows of real tokens: what a kernel writes for padding is undefined.
    found.append(layer.forward_modular(x, weights, ids)[:40].clone())
    # Tokens that name an expert twice, as the router does for logits of NaN.
    x, weights, ids = routes(layer, 64)
    ids[::3, 1] = ids[::3, 0]
    found.append(layer.forward_modular(x, weights, ids).clone())
    return found


def stable_alignment(topk_ids, block_size, *args, **kwargs):
    """Stock's alignment with the tokens of an expert in the order of their ids.

    Stock orders them by atomics once there are many, and Marlin splits the sum of a
    row by its place, so that two runs of stock differ in the last bits.
    """
    ids, experts, padded = moe_align_block_size(topk_ids, block_size, *args, **kwargs)
    used = int(padded)
    order = experts[: used // block_size].repeat_interleave(block_size).long()
    order = order * (topk_ids.numel() + 1) + ids[:used]
    ids[:used] = ids[:used][order.argsort()]
    return ids, experts, padded


def as_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def counts():
    return [(37 * expert) % 101 for expert in range(E)]
