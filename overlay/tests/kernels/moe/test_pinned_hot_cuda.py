# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`pinned_hot` on a CUDA GPU: unmodified kernels on mixed ranges, and the ranges."""

import gc

import numpy as np
import pytest
import torch

from tests.kernels.moe.expert_provider_utils import (
    LAYER_NAMES,
    engine_config,
    routes,
    run,
    single_rank,
    write_model,
)
from tests.kernels.moe.pinned_hot_kinds import (
    HOT,
    KINDS,
    MIXED,
    MODEL,
    E,
    as_bytes,
    counts,
    load,
    options_of,
    outputs,
    stable_alignment,
)
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.experts import marlin_moe
from vllm.model_executor.layers.fused_moe.pinned_hot import device_range
from vllm.model_executor.layers.fused_moe.pinned_hot import provider as provider_module
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import (
    expert_map_from_counts,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.provider import (
    model_fingerprint,
)
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


@pytest.fixture(autouse=True)
def fresh_maps():
    provider_module._read_map.cache_clear()
    yield
    gc.collect()
    torch.accelerator.empty_cache()


# stage: tokens from which on cold rows are copied; half of the batches are below.
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("stage", (0, 64))
@pytest.mark.parametrize("tier", TIERS)
def test_layer_is_bit_identical(tmp_path, tier, stage, name, monkeypatch):
    kind = KINDS[name]
    options = options_of(kind)
    model = write_model(tmp_path / "model", **MODEL)
    stock = engine_config(model, **options)
    with single_rank(stock, tmp_path):
        reference = load(stock, kind)[0]
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
                "expert_layout": "range",
                "expert_stage_tokens": stage,
            }
            config = engine_config(model, **options, **flags)
            with set_current_vllm_config(config):
                layer = load(config, kind)[0]
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


@pytest.mark.parametrize("stage", (0, 16))
def test_graph_replay_is_bit_identical(tmp_path, stage):
    """A captured graph reads the range, or its twin, through what it captured."""
    model = write_model(tmp_path / "model", **MODEL)
    config = engine_config(model, dtype="bfloat16")
    made = expert_map_from_counts(
        {LAYER_NAMES[0]: counts()}, 20, model_fingerprint(config.model_config, 1), []
    )
    path = tmp_path / "map.json"
    path.write_text(made.to_json())
    config = engine_config(
        model,
        dtype="bfloat16",
        expert_provider="pinned_hot",
        expert_map=str(path),
        expert_layout="range",
        expert_stage_tokens=stage,
    )
    with single_rank(config, tmp_path):
        layer = load(config, KINDS["bf16"])[0]
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


# Layers share the memory that their cold rows are copied to.
def test_layers_in_turn(tmp_path):
    names = tuple(f"model.layers.{index}.mlp.experts" for index in range(3))
    model = write_model(tmp_path / "model", **MODEL | {"num_hidden_layers": 3})
    stock = engine_config(model, dtype="bfloat16")
    batches = [(3, 1), (64, 2), (1, 3), (300, 4)]
    with single_rank(stock, tmp_path):
        layers = load(stock, KINDS["bf16"], names)
        expected = [[run(x, m, seed).clone() for x in layers] for m, seed in batches]
        del layers
        fingerprint = model_fingerprint(stock.model_config, 3)
        made = expert_map_from_counts({n: counts() for n in names}, 8, fingerprint, [])
        path = tmp_path / "map.json"
        path.write_text(made.to_json())
        flags = {"expert_provider": "pinned_hot", "expert_map": str(path)}
        flags |= {"expert_layout": "range", "expert_stage_tokens": 16}
        before = device_bytes()
        config = engine_config(model, dtype="bfloat16", **flags)
        with set_current_vllm_config(config):
            layers = load(config, KINDS["bf16"], names)
            there = [layer.expert_provider.residency() for layer in layers]
            # What is hot, and one layer's cold pages once.
            taken = sum(x.hot_bytes for x in there) + there[0].cold_bytes
            assert abs(before - device_bytes() - taken) <= 8 << 20
            for _ in range(2):
                for (m, seed), wanted in zip(batches, expected, strict=True):
                    found = [run(layer, m, seed).clone() for layer in layers]
                    for got, want in zip(found, wanted, strict=True):
                        assert torch.equal(got, want), (m, seed)
        del layers
        assert abs(device_bytes() - before) <= 4 << 20


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


@pytest.mark.parametrize("pattern", PATTERNS)
def test_twin_shares_the_hot_pages(backing, pattern):
    hot = np.array([letter == "h" for letter in pattern])
    source = torch.randint(0, 255, (4, PAGE), device="cuda").to(torch.uint8)
    home = backing.build(source, hot, "layer.weight")
    before = device_bytes()
    pool = [device_range.DeviceMemory(backing.device, PAGE) for _ in range(4)]
    twin = backing.twin(home, hot, iter(pool))
    assert before - device_bytes() == 4 * PAGE  # the pool, and nothing else
    for page, is_hot in enumerate(hot):
        if is_hot:
            assert torch.equal(twin[page], source[page])
        twin[page].fill_(page)
        assert bool((home[page] == page).all()) == is_hot
        assert torch.equal(home[page], source[page]) != is_hot
    del home
    gc.collect()
    for page in range(4):
        assert bool((twin[page] == page).all())
    del twin, pool
    gc.collect()
    assert device_bytes() >= before


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
