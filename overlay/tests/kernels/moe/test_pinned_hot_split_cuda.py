# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layout `split` on a CUDA GPU: exactness of every kernel and mode, memory, graphs."""

import gc
import threading

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
    KINDS,
    MODEL,
    E,
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
from vllm.model_executor.layers.fused_moe.pinned_hot import tensors
from vllm.model_executor.layers.fused_moe.pinned_hot.fingerprint import (
    model_fingerprint,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import (
    expert_map_from_counts,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split import kernels, pinned
from vllm.platforms import current_platform
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not current_platform.is_cuda(), reason="needs a CUDA GPU"),
]

# Three layers: an odd number over one staging place.
NAMES = tuple(f"model.layers.{index}.mlp.experts" for index in range(3))
HOT = (0, 1, 7, 20, E - 1, E)


@pytest.fixture(autouse=True)
def fresh_maps():
    provider_module._read_map.cache_clear()
    yield
    gc.collect()
    torch.accelerator.empty_cache()


def split_config(tmp_path, stock, options, hot, mode, names=LAYER_NAMES[:1]):
    fingerprint = model_fingerprint(stock.model_config, len(names))
    made = expert_map_from_counts({n: counts() for n in names}, hot, fingerprint, [])
    path = tmp_path / f"map{len(names)}-{hot}.json"
    path.write_text(made.to_json())
    flags = {"expert_provider": "pinned_hot", "expert_map": str(path)}
    flags |= {"expert_layout": "split", "expert_split_mode": mode}
    return engine_config(tmp_path / "model", **options, **flags)


# mode: which way the layer's kernel may have; a kernel without it is left out.
@pytest.mark.parametrize("mode", ["two_calls", "staged"])
@pytest.mark.parametrize("name", KINDS)
def test_layer_is_bit_identical(tmp_path, name, mode, monkeypatch):
    kind = KINDS[name]
    write_model(tmp_path / "model", **MODEL)
    stock = engine_config(tmp_path / "model", **options_of(kind))
    with single_rank(stock, tmp_path):
        reference = load(stock, kind)[0]
        kernel = tensors.kernel_name(reference)
        modes = kernels._BY_KERNEL.get(kernel)
        if modes is None or mode not in modes.modes:
            pytest.skip(f"{name} on {kernel} has no {mode}")
        print(type(reference.quant_method).__name__, kernel, mode)
        holes = kernel != "MarlinExperts"
        if kernel == "MarlinExperts":
            monkeypatch.setattr(marlin_moe, "moe_align_block_size", stable_alignment)
        expected = outputs(reference, holes)
        again = outputs(reference, holes)
        assert all(map(torch.equal, again, expected)), "stock differs from itself"
        assert all(output.isfinite().all() for output in expected), name
        assert all(output.count_nonzero() > 0 for output in expected), name
        del reference
        for hot in HOT:
            config = split_config(tmp_path, stock, options_of(kind), hot, mode)
            with set_current_vllm_config(config):
                layer = load(config, kind)[0]
                residency = layer.expert_provider.residency()
                assert residency.hot_rows == hot, residency
                assert residency.layout == f"layout split, {mode}"
                for number, (got, want) in enumerate(
                    zip(outputs(layer, holes), expected, strict=True)
                ):
                    assert torch.equal(got, want), (hot, number)
                del layer


CASES = [("bf16", "two_calls"), ("bf16", "staged"), ("mxfp4_checkpoint", "staged")]


def used_bytes():
    """Device memory that the driver gave away, less what torch holds for no tensor."""
    gc.collect()
    free = free_device_bytes()
    held = torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
    return torch.accelerator.get_memory_info()[1] - free - held


def load_measured(config, kind):
    """Layers, the device bytes used before and by them, and torch's peak of them."""
    # Once before, for what the first use of a kernel loads.
    load(config, kind, NAMES)
    config.compilation_config.static_forward_context.clear()
    before = used_bytes()
    torch.accelerator.reset_peak_memory_stats()
    start = torch.accelerator.memory_allocated()
    layers = load(config, kind, NAMES)
    peak = torch.accelerator.max_memory_allocated() - start
    return layers, before, used_bytes() - before, peak


# A1, A2: from the driver, since every tensor says it is on the GPU.
@pytest.mark.parametrize("name, mode", CASES)
def test_device_holds_hot_rows_only(tmp_path, name, mode):
    kind = KINDS[name]
    write_model(tmp_path / "model", **MODEL | {"num_hidden_layers": len(NAMES)})
    stock = engine_config(tmp_path / "model", **options_of(kind))
    with single_rank(stock, tmp_path):
        layers, _, resident, _ = load_measured(stock, kind)
        rows = sum(
            getattr(layer, row).numel() * getattr(layer, row).element_size()
            for layer in layers
            for row in tensors.expert_tensors(layer).rows
        )
        del layers
        stock.compilation_config.static_forward_context.clear()
        config = split_config(tmp_path, stock, options_of(kind), 8, mode, NAMES)
        with set_current_vllm_config(config):
            layers, before, taken, peak = load_measured(config, kind)
            cold = [layer.expert_provider.residency().cold_bytes for layer in layers]
            assert sum(cold) == rows * (E - 8) // E
            tail = cold[0] if mode == "staged" else 0
            # Ranges and the allocator take whole pages.
            slack = 2 * (2 << 20) * (2 * len(NAMES) + 2)
            assert abs(taken - (resident - sum(cold) + tail)) <= slack
            assert peak <= taken + 4 * rows // len(NAMES) + slack
        del layers
        config.compilation_config.static_forward_context.clear()
        assert abs(used_bytes() - before) <= 4 << 20


# A11, B21: layers share the staging place, and batches follow one another.
@pytest.mark.parametrize("name, mode", CASES)
@pytest.mark.parametrize("captured", [False, True])
def test_layers_in_turn(tmp_path, name, mode, captured):
    kind = KINDS[name]
    write_model(tmp_path / "model", **MODEL | {"num_hidden_layers": len(NAMES)})
    stock = engine_config(tmp_path / "model", **options_of(kind))
    # So few ids that stock's alignment uses no atomics and Marlin equals itself.
    batches = [(3, 1), (16, 2), (1, 3), (16, 4)]
    with single_rank(stock, tmp_path):
        layers = load(stock, kind, NAMES)
        expected = [
            [run(layer, m, seed).clone() for layer in layers] for m, seed in batches
        ]
        del layers
        config = split_config(tmp_path, stock, options_of(kind), 8, mode, NAMES)
        with set_current_vllm_config(config):
            layers = load(config, kind, NAMES)
            for _ in range(2):
                for (m, seed), wanted in zip(batches, expected, strict=True):
                    if captured:
                        found = replayed(layers, m, seed)
                    else:
                        found = [run(layer, m, seed).clone() for layer in layers]
                    for got, want in zip(found, wanted, strict=True):
                        assert torch.equal(got, want), (m, seed)


def replayed(layers, num_tokens, seed):
    """Outputs of a captured step over all layers, replayed on fresh inputs.

    A thread copies to the GPU on a stream of its own meanwhile (A12).
    """
    x, weights, ids = routes(layers[0], num_tokens, seed)
    inputs = [tensor.clone() for tensor in routes(layers[0], num_tokens, seed + 100)]
    for layer in layers:  # compiles
        layer.forward_modular(*inputs)
    torch.accelerator.synchronize()
    stop = threading.Event()

    def copy_on():
        side = torch.cuda.Stream()
        host = torch.ones(1 << 20).pin_memory()
        device = torch.empty(1 << 20, device="cuda")
        with torch.cuda.stream(side):
            while not stop.is_set():
                device.copy_(host, non_blocking=True)
                side.synchronize()

    graph = torch.cuda.CUDAGraph()
    thread = threading.Thread(target=copy_on)
    thread.start()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = [layer.forward_modular(*inputs).clone() for layer in layers]
        for target, source in zip(inputs, (x, weights, ids), strict=True):
            target.copy_(source)
        for output in outputs:
            output.fill_(float("nan"))
        graph.replay()
        torch.accelerator.synchronize()
    finally:
        stop.set()
        thread.join()
    return outputs


# ------------------------------------------------------------------ pinned rows


# A5: nothing but the view holds the host memory.
def test_view_keeps_its_host_memory():
    size = 8 << 20
    rows = pinned.pinned_empty((4, size // 4), torch.uint8)
    assert rows.is_pinned()
    rows.copy_(torch.arange(4, dtype=torch.uint8)[:, None])
    view = get_accelerator_view_from_cpu_tensor(rows)
    del rows
    gc.collect()
    for _ in range(8):
        pinned.pinned_empty((size,), torch.uint8).fill_(255)
        torch.full((size,), 255, dtype=torch.uint8, pin_memory=True)
    want = torch.arange(4, dtype=torch.uint8, device="cuda")
    assert torch.equal(view[:, 0], want) and torch.equal(view[:, -1], want)


def locked_bytes():
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["VmRSS"].split()[0]) * 1024


def test_pinned_memory_is_exact_and_given_back():
    size = (300 << 20) + 4096  # torch's allocator would take 512 MiB
    rows = pinned.pinned_empty((1, 1), torch.uint8)
    before = locked_bytes()
    rows = pinned.pinned_empty((size,), torch.uint8)
    taken = locked_bytes() - before
    assert size * 0.95 <= taken <= size + (16 << 20), taken
    view = get_accelerator_view_from_cpu_tensor(rows)
    del rows
    assert locked_bytes() - before >= size * 0.95
    del view
    gc.collect()
    assert locked_bytes() - before <= 32 << 20


# A14: names the layer, the bytes wanted and those that are pinned.
def test_pinning_that_fails_names_the_layer(tmp_path, monkeypatch):
    kind = KINDS["bf16"]
    write_model(tmp_path / "model", **MODEL | {"num_hidden_layers": len(NAMES)})
    stock = engine_config(tmp_path / "model", **options_of(kind))
    real, calls = torch.cuda.check_error, []

    def fails_fourth(status):
        calls.append(status)
        if len(calls) == 4:
            raise torch.cuda.CudaError(2)
        return real(status)

    with single_rank(stock, tmp_path):
        config = split_config(tmp_path, stock, options_of(kind), 8, "auto", NAMES)
        with set_current_vllm_config(config):
            monkeypatch.setattr(torch.cuda, "check_error", fails_fourth)
            with pytest.raises(RuntimeError) as error:
                load(config, kind, NAMES)
    message = str(error.value)
    assert message.startswith(f"{NAMES[1]}.w2_weight: cannot pin"), message
    assert "pinned already" in message and "Raise `hot`" in message
