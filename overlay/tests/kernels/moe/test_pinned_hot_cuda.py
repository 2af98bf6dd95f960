# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`pinned_hot` on a CUDA GPU: unmodified kernels on mixed ranges, and the ranges."""

import gc

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
from vllm.model_executor.layers.fused_moe.pinned_hot import provider as provider_module
from vllm.model_executor.layers.fused_moe.pinned_hot import tensors as tensors_module
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import (
    expert_map_from_counts,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.provider import (
    model_fingerprint,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.tensors import ExpertTensors
from vllm.model_executor.model_loader.expert_weights import bind_expert_providers
from vllm.platforms import current_platform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not current_platform.is_cuda(), reason="needs a CUDA GPU"),
]

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
TOKENS = (1, 2, 16, 64, 300, 2048)
# name -> engine options, layer options
KINDS = {
    "bf16": ({"dtype": "bfloat16"}, {}),
    "fp16": ({"dtype": "float16"}, {}),
    "bf16_bias": (
        {"dtype": "bfloat16"},
        {"has_bias": True, "activation": "swigluoai"},
    ),
    "fp8_per_tensor": ({"dtype": "bfloat16", "quantization": "fp8_per_tensor"}, {}),
    "fp8_per_block": ({"dtype": "bfloat16", "quantization": "fp8_per_block"}, {}),
    "fp8_per_channel": ({"dtype": "bfloat16", "quantization": "fp8_per_channel"}, {}),
    "int8_weight_only": (
        {"dtype": "bfloat16", "quantization": "int8_per_channel_weight_only"},
        {},
    ),
    "mxfp8_marlin": ({"dtype": "bfloat16", "quantization": "mxfp8"}, {}),
    "mxfp4_marlin": ({"dtype": "bfloat16", "quantization": "mxfp4"}, {}),
}
# Not admitted yet: a case that passes here on a GPU is what admits a pair.
_SCALES = ("w13_bias", "w2_bias", "w13_weight_scale", "w2_weight_scale")
CANDIDATES = {
    "Mxfp8OnlineMoEMethod": ExpertTensors(_SCALES, ("MarlinExperts",), bits=8),
    "Mxfp4OnlineMoEMethod": ExpertTensors(_SCALES, ("MarlinExperts",), bits=4),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def load(config, kind):
    options, layer_options = KINDS[kind]
    layer = build_layer(
        LAYER_NAMES[0],
        DTYPES[options["dtype"]],
        E,
        TOP_K,
        HIDDEN,
        INTERMEDIATE,
        quant_config=config.quant_config,
        **layer_options,
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


def counts():
    return [(37 * expert) % 101 for expert in range(E)]


@pytest.fixture(autouse=True)
def fresh_maps():
    provider_module._read_map.cache_clear()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("kind", KINDS)
def test_layer_is_bit_identical(tmp_path, kind, monkeypatch):
    for method, tensors_of_method in CANDIDATES.items():
        monkeypatch.setitem(tensors_module._BY_METHOD, method, tensors_of_method)
    options, _ = KINDS[kind]
    model = write_model(tmp_path / "model", **MODEL)
    stock = engine_config(model, **options)
    with single_rank(stock, tmp_path):
        reference = load(stock, kind)
        holes = "marlin" not in kind
        expected = outputs(reference, holes)
        assert all(output.isfinite().all() for output in expected), kind
        tensors = {n: p.data.clone() for n, p in reference.named_parameters()}
        del reference
        for hot in HOT:
            fingerprint = model_fingerprint(stock.model_config, 1)
            made = expert_map_from_counts(
                {LAYER_NAMES[0]: counts()}, hot, fingerprint, []
            )
            path = tmp_path / f"map{hot}.json"
            path.write_text(made.to_json())
            flags = {"expert_provider": "pinned_hot", "expert_map": str(path)}
            config = engine_config(model, **options, **flags)
            with set_current_vllm_config(config):
                layer = load(config, kind)
                residency = layer.expert_provider.residency()
                assert residency.hot_rows == hot
                assert residency.cold_rows == E - hot
                parameters = dict(layer.named_parameters())
                assert parameters.keys() == tensors.keys()
                for name, tensor in tensors.items():
                    found = parameters[name].data
                    assert found.stride() == tensor.stride() and found.is_cuda
                    same = found.view(torch.uint8) == tensor.view(torch.uint8)
                    assert found.shape == tensor.shape and bool(same.all())
                for number, (got, want) in enumerate(
                    zip(outputs(layer, holes), expected, strict=True)
                ):
                    assert torch.equal(got, want), (kind, hot, number)
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
        layer = load(config, "bf16")
        x, weights, ids = routes(layer, 16)
        eager = layer.forward_modular(x, weights, ids).clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer.forward_modular(x, weights, ids)
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, eager)


# ------------------------------------------------------------------ the ranges


@pytest.fixture
def backing():
    from vllm.model_executor.layers.fused_moe.pinned_hot.device_backing import (
        DeviceBacking,
    )

    return DeviceBacking(torch.cuda.current_device())


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


def device_bytes():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


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


def test_many_lives(backing):
    source = torch.arange(8 * PAGE, device="cuda", dtype=torch.uint8)
    hot = np.arange(8) % 2 == 0
    before = device_bytes()
    for _ in range(50):
        assert torch.equal(backing.build(source, hot, "x"), source)
    gc.collect()
    assert device_bytes() == before


def test_out_of_memory_names_tensor_and_numbers(backing):
    free = torch.cuda.mem_get_info()[0]
    pages = free // PAGE + 1000
    huge = torch.empty(1, device="cuda", dtype=torch.uint8).expand(pages * PAGE)
    with pytest.raises(
        RuntimeError, match="model.layers.3.w2: cannot re-home"
    ) as error:
        backing.build(huge, np.ones(pages, dtype=bool), "model.layers.3.w2")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(error.value) and "GiB" in str(error.value)
    assert abs(device_bytes() - free) < 64 << 20
