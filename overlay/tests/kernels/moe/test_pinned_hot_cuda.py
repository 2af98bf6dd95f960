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
from tests.kernels.moe.pinned_hot_utils import free_device_bytes
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.experts import marlin_moe
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


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tier", TIERS)
def test_layer_is_bit_identical(tmp_path, tier, name, monkeypatch):
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


def test_driver_counts_hot_pages_only(backing):
    """From the driver, since every tensor of a range says it is on the GPU."""
    source = torch.zeros(64, PAGE, dtype=torch.uint8, device="cuda")
    hot = np.arange(64) < 20
    before = free_device_bytes()
    home = backing.build(source, hot, "layer.weight")
    assert before - free_device_bytes() == 20 * PAGE
    view = home[7]
    del home
    assert before - free_device_bytes() == 20 * PAGE  # the view keeps the range
    assert torch.equal(view, source[7])
    del view
    gc.collect()
    assert free_device_bytes() == before


def host_bytes():
    with open("/proc/meminfo") as file:
        line = next(line for line in file if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def test_cold_memory_is_made_ahead_and_given_back(backing):
    source = torch.randint(0, 255, (256 * PAGE,), device="cuda").to(torch.uint8)
    hot = np.arange(256) % 64 == 0
    before = host_bytes()
    backing.expect([hot] * 3)
    homes = [backing.build(source, hot, "layer.weight")]
    # Another range than the one that was announced.
    homes.append(backing.build(source, ~hot, "layer.weight"))
    taken = sum(int((~mask).sum()) for mask in (hot, ~hot)) * PAGE
    assert before - host_bytes() >= 0.9 * taken
    homes.append(backing.build(source, hot, "layer.weight"))
    assert all(torch.equal(home, source) for home in homes)
    taken += int((~hot).sum()) * PAGE
    # The third announced range was given back with the last build.
    assert abs(before - host_bytes() - taken) <= 0.25 * taken
    del homes
    gc.collect()
    assert before - host_bytes() <= 0.25 * taken


@needs_two_gpus
def test_peer_holds_the_cold_pages():
    from vllm.model_executor.layers.fused_moe.pinned_hot.device_backing import (
        DeviceBacking,
    )

    source = torch.arange(64 * PAGE, device="cuda:0", dtype=torch.uint8)
    hot = np.arange(64) % 3 == 0
    before = [free_device_bytes(device) for device in (0, 1)]
    home = DeviceBacking(0, peer=1).build(source, hot, "layer.weight")
    taken = [free - free_device_bytes(device) for device, free in enumerate(before)]
    assert taken == [hot.sum() * PAGE, (~hot).sum() * PAGE]
    assert torch.equal(home, source) and home.device == source.device
    del home
    gc.collect()
    assert [free_device_bytes(device) for device in (0, 1)] == before


def test_many_lives(backing):
    source = torch.arange(8 * PAGE, device="cuda", dtype=torch.uint8)
    hot = np.arange(8) % 2 == 0
    before = free_device_bytes()
    for _ in range(50):
        assert torch.equal(backing.build(source, hot, "x"), source)
    gc.collect()
    assert free_device_bytes() == before


def test_out_of_memory_names_tensor_and_numbers(backing):
    free = torch.accelerator.get_memory_info()[0]
    pages = free // PAGE + 1000
    huge = torch.empty(1, device="cuda", dtype=torch.uint8).expand(pages * PAGE)
    with pytest.raises(
        RuntimeError, match="model.layers.3.w2: cannot re-home"
    ) as error:
        backing.build(huge, np.ones(pages, dtype=bool), "model.layers.3.w2")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(error.value) and "GiB" in str(error.value)
    assert abs(free_device_bytes() - free) < 64 << 20
