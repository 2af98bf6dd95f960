# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`pinned_hot` on a CUDA GPU: unmodified kernels on mixed ranges, and the ranges."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch

from tests.kernels.moe.expert_provider_utils import (
    LAYER_NAMES,
    build_layer,
    engine_config,
    routes,
    run,
    single_rank,
    write_model,
)
from tests.kernels.moe.pinned_hot_utils import load_weights
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.experts import marlin_moe
from vllm.model_executor.layers.fused_moe.moe_align_block_size import (
    moe_align_block_size,
)
from vllm.model_executor.layers.fused_moe.pinned_hot import provider as provider_module
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import (
    expert_map_from_counts,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.provider import (
    model_fingerprint,
)
from vllm.model_executor.model_loader.expert_weights import bind_expert_providers
from vllm.platforms import current_platform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not current_platform.is_cuda(), reason="needs a CUDA GPU"),
]

needs_two_gpus = pytest.mark.skipif(
    torch.accelerator.device_count() < 2, reason="needs two GPUs"
)
TIERS = ("host", pytest.param("peer:1", marks=needs_two_gpus))
MEMORIES = {"host": "host memory", "peer:1": "memory of GPU 1"}
PAGE = 2 << 20
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


def load(config, kind):
    quant_config = config.quant_config
    if kind.checkpoint is not None:
        quant_config = kind.checkpoint()
        quant_config.packed_modules_mapping = {}
    layer = build_layer(
        LAYER_NAMES[0],
        DTYPES[kind.dtype],
        E,
        TOP_K,
        HIDDEN,
        INTERMEDIATE,
        quant_config=quant_config,
        **kind.layer,
    )
    model = torch.nn.ModuleList([layer])
    bind_expert_providers(model, config, config.model_config)
    load_weights(layer)
    return layer


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


@pytest.fixture(autouse=True)
def fresh_maps():
    provider_module._read_map.cache_clear()
    yield
    gc.collect()
    torch.accelerator.empty_cache()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tier", TIERS)
def test_layer_is_bit_identical(tmp_path, tier, name, monkeypatch):
    kind = KINDS[name]
    options = {
        "dtype": kind.dtype,
        "quantization": kind.online,
        "moe_backend": kind.backend,
    }
    model = write_model(tmp_path / "model", **MODEL)
    stock = engine_config(model, **options)
    with single_rank(stock, tmp_path):
        reference = load(stock, kind)
        kernel = type(reference.quant_method.moe_kernel.fused_experts).__name__
        print(type(reference.quant_method).__name__, kernel)
        holes = kernel != "MarlinExperts"
        if kernel == "MarlinExperts":
            monkeypatch.setattr(marlin_moe, "moe_align_block_size", stable_alignment)
        expected = outputs(reference, holes)
        again = outputs(reference, holes)
        assert all(map(torch.equal, again, expected)), "stock differs from itself"
        assert all(output.isfinite().all() for output in expected), name
        assert all(output.count_nonzero() > 0 for output in expected), name
        tensors = {n: p.data.clone() for n, p in reference.named_parameters()}
        del reference
        for hot in HOT:
            fingerprint = model_fingerprint(stock.model_config, 1)
            made = expert_map_from_counts(
                {LAYER_NAMES[0]: counts()}, hot, fingerprint, []
            )
            path = tmp_path / f"map{hot}.json"
            path.write_text(made.to_json())
            flags = {
                "expert_provider": "pinned_hot",
                "expert_map": str(path),
                "expert_cold_tier": tier,
            }
            config = engine_config(model, **options, **flags)
            with set_current_vllm_config(config):
                layer = load(config, kind)
                residency = layer.expert_provider.residency()
                assert residency.memories == ("HBM", MEMORIES[tier])
                # Pages of hot rows may cover neighbours that are smaller than a page.
                assert hot <= residency.hot_rows, residency
                assert residency.hot_rows + residency.cold_rows == E, residency
                assert residency.hot_bytes > 0 or hot == 0, residency
                assert residency.cold_bytes > 0 or hot > MIXED, residency
                parameters = dict(layer.named_parameters())
                assert parameters.keys() == tensors.keys()
                for parameter_name, tensor in tensors.items():
                    found = parameters[parameter_name].data
                    assert found.stride() == tensor.stride() and found.is_cuda
                    assert found.shape == tensor.shape and found.dtype == tensor.dtype
                    same = as_bytes(found) == as_bytes(tensor)
                    assert bool(same.all()), parameter_name
                for number, (got, want) in enumerate(
                    zip(outputs(layer, holes), expected, strict=True)
                ):
                    assert torch.equal(got, want), (name, hot, number)
                del layer, parameters, found, same


def test_graph_replay_is_bit_identical(tmp_path):
    """A captured graph reads the range through the pointer it captured."""
    model = write_model(tmp_path / "model", **MODEL)
    config = engine_config(model, dtype="bfloat16")
    made = expert_map_from_counts(
        {LAYER_NAMES[0]: counts()}, 20, model_fingerprint(config.model_config, 1), []
    )
    path = tmp_path / "map.json"
    path.write_text(made.to_json())
    config = engine_config(
        model, dtype="bfloat16", expert_provider="pinned_hot", expert_map=str(path)
    )
    with single_rank(config, tmp_path):
        layer = load(config, KINDS["bf16"])
        x, weights, ids = routes(layer, 16)
        eager = layer.forward_modular(x, weights, ids).clone()
        torch.accelerator.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer.forward_modular(x, weights, ids)
        captured.fill_(float("nan"))
        graph.replay()
        torch.accelerator.synchronize()
        assert torch.equal(captured, eager)


# ------------------------------------------------------------------ the ranges


@pytest.fixture
def backing():
    from vllm.model_executor.layers.fused_moe.pinned_hot.device_backing import (
        DeviceBacking,
    )

    return DeviceBacking(torch.accelerator.current_device_index())


PATTERNS = ("hhcc", "cchh", "hchc", "cccc", "hhhh")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_range_is_an_ordinary_tensor(backing, pattern):
    hot = np.array([letter == "h" for letter in pattern])
    source = torch.randn(4, PAGE // 2 - 24, device="cuda").to(torch.bfloat16)
    home = backing.build(source, hot, "layer.weight")
    assert torch.equal(home, source) and home.device == source.device
    assert home.data_ptr() % PAGE == 0 and home.is_contiguous()
    assert torch.equal(home.cpu(), source.cpu())
    assert torch.from_dlpack(home).data_ptr() == home.data_ptr()
    home.copy_(source.flip(0))
    assert torch.equal(home, source.flip(0))
    home.copy_(source.cpu())
    assert torch.equal(home[3], source[3])


def device_bytes(device=None):
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    return torch.accelerator.get_memory_info(device)[0]


def test_driver_counts_hot_pages_only(backing):
    """From the driver, since every tensor of a range says it is on the GPU."""
    source = torch.zeros(64, PAGE, dtype=torch.uint8, device="cuda")
    hot = np.arange(64) < 20
    before = device_bytes()
    home = backing.build(source, hot, "layer.weight")
    assert before - device_bytes() == 20 * PAGE
    view = home[7]
    del home
    assert before - device_bytes() == 20 * PAGE  # the view keeps the range
    assert torch.equal(view, source[7])
    del view
    gc.collect()
    assert device_bytes() == before


@needs_two_gpus
def test_peer_holds_the_cold_pages():
    from vllm.model_executor.layers.fused_moe.pinned_hot.device_backing import (
        DeviceBacking,
    )

    source = torch.arange(64 * PAGE, device="cuda:0", dtype=torch.uint8)
    hot = np.arange(64) % 3 == 0
    before = [device_bytes(device) for device in (0, 1)]
    home = DeviceBacking(0, peer=1).build(source, hot, "layer.weight")
    taken = [free - device_bytes(device) for device, free in enumerate(before)]
    assert taken == [hot.sum() * PAGE, (~hot).sum() * PAGE]
    assert torch.equal(home, source) and home.device == source.device
    del home
    gc.collect()
    assert [device_bytes(device) for device in (0, 1)] == before


def test_many_lives(backing):
    source = torch.arange(8 * PAGE, device="cuda", dtype=torch.uint8)
    hot = np.arange(8) % 2 == 0
    before = device_bytes()
    for _ in range(50):
        assert torch.equal(backing.build(source, hot, "x"), source)
    gc.collect()
    assert device_bytes() == before


def test_out_of_memory_names_tensor_and_numbers(backing):
    free = torch.accelerator.get_memory_info()[0]
    pages = free // PAGE + 1000
    huge = torch.empty(1, device="cuda", dtype=torch.uint8).expand(pages * PAGE)
    with pytest.raises(
        RuntimeError, match="model.layers.3.w2: cannot re-home"
    ) as error:
        backing.build(huge, np.ones(pages, dtype=bool), "model.layers.3.w2")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(error.value) and "GiB" in str(error.value)
    assert abs(device_bytes() - free) < 64 << 20
