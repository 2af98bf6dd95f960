# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Counting routes on a CUDA GPU: the kernel, graphs, and steps that run ahead."""

import numpy as np
import pytest
import torch

from tests.kernels.moe.expert_provider_utils import (
    HIDDEN,
    LAYER_NAMES,
    NUM_EXPERTS,
    TOP_K,
    engine_config,
    single_rank,
    write_model,
)
from vllm.distributed.eplb.eplb_state import EplbLayerState
from vllm.forward_context import set_forward_context
from vllm.model_executor.expert_routes import (
    begin_routes,
    bind_route_recorder,
    end_routes,
    route_recorder,
)
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.expert_profile.count_routes import (
    count_routes,
    count_routes_reference,
)
from vllm.platforms import current_platform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not current_platform.is_cuda(), reason="needs a CUDA GPU"),
]

STALL_CYCLES = 200_000_000  # about a tenth of a second


def draw(num_rows, top_k, num_experts, dtype, seed=0):
    """Ids from -1 to beyond the last expert, and phases of all kinds, on the host."""
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (num_rows, top_k)
    ids = torch.randint(-1, num_experts + 2, shape, generator=generator, device="cpu")
    ids[0] = num_experts - 1
    if dtype == torch.uint32:
        ids[ids < 0] = 2**32 - 1
    phases = torch.randint(0, 3, (num_rows,), generator=generator, device="cpu")
    phases[0] = 2
    return ids.to(dtype), phases.to(torch.int8)


def zeros(num_experts, device):
    return torch.zeros((2, num_experts), dtype=torch.int64, device=device)


# C4, C9
@pytest.mark.parametrize("num_experts", [128, 255, 256, 257, 384, 512])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint32])
@pytest.mark.parametrize("num_rows,top_k", [(1, 1), (2, 6), (43, 8), (4096, 8)])
def test_kernel_equals_reference(num_experts, dtype, num_rows, top_k):
    ids, phases = draw(num_rows, top_k, num_experts, dtype)
    expected, counts = zeros(num_experts, "cpu"), zeros(num_experts, "cuda")
    count_routes_reference(ids, phases, expected)
    count_routes(ids.cuda(), phases.cuda(), counts)
    assert torch.equal(counts.cpu(), expected)
    # Rows beyond the phases, columns that are not adjacent, and no rows at all.
    half = max(1, num_rows // 2)
    wide = torch.stack([ids.cuda().long(), ids.cuda().long()], dim=2)[..., 0]
    count_routes(wide, phases[:half].cuda(), counts)
    count_routes(wide[:0], phases.cuda(), counts)
    count_routes_reference(ids.long(), phases[:half], expected)
    assert torch.equal(counts.cpu(), expected)


def test_counters_hold_more_than_32_bits():
    counts = zeros(128, "cuda") + (1 << 40)
    ids = torch.full((5, 2), 127, dtype=torch.int32, device="cuda")
    count_routes(ids, torch.ones(5, dtype=torch.int8, device="cuda"), counts)
    assert int(counts[0, 127]) == (1 << 40) + 10 and int(counts[1, 127]) == 1 << 40


def test_graph_counts_the_phases_of_each_replay():
    ids, phases = draw(64, 8, 384, torch.int32)
    ids, live = ids.cuda(), torch.zeros(64, dtype=torch.int8, device="cuda")
    counts, expected = zeros(384, "cuda"), zeros(384, "cpu")
    count_routes(ids, live, counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count_routes(ids, live, counts)
    graph.replay()
    assert int(counts.sum()) == 0  # warm-up, capture, and a replay of padding
    for num_rows in (64, 7, 0, 33):
        live.zero_()
        live[:num_rows].copy_(phases[:num_rows])
        graph.replay()
        count_routes_reference(ids.cpu(), phases[:num_rows], expected)
    assert torch.equal(counts.cpu(), expected)


@pytest.fixture
def model(tmp_path):
    """Two MoE layers whose routes are recorded, as a model runner has them."""
    config = engine_config(
        write_model(tmp_path / "model"),
        expert_profile_out=str(tmp_path / "a"),
        dtype="bfloat16",
    )
    with single_rank(config, tmp_path):
        layers = torch.nn.ModuleList(
            FusedMoEFactory(
                num_experts=NUM_EXPERTS,
                top_k=TOP_K,
                hidden_size=HIDDEN,
                intermediate_size=96,
                params_dtype=torch.bfloat16,
                prefix=name,
            )
            for name in LAYER_NAMES
        )
        layers.get_model = lambda: layers
        bind_route_recorder(layers, config, config.model_config)
        yield layers, config


def route(layers, config, x, logits):
    with set_forward_context(None, config, num_tokens=len(x)):
        return [layer.router.select_experts(x, logits)[1] for layer in layers]


def by_expert(ids):
    return torch.bincount(ids.flatten().long().cpu(), minlength=NUM_EXPERTS)


def requests(*rows):
    return [np.array(column, dtype=np.int32) for column in zip(*rows, strict=True)]


# C10, C12: the host prepares steps while the device is still at earlier ones.
@pytest.mark.parametrize("as_graph", [False, True])
def test_steps_that_run_ahead_and_wait_for_nothing(model, as_graph):
    layers, config = model
    num_rows, steps = 48, 20
    x = torch.randn((num_rows, HIDDEN), dtype=torch.bfloat16)
    logits = torch.randn((num_rows, NUM_EXPERTS), dtype=torch.float32)
    selected = route(layers, config, x, logits)[0]  # and the kernels are compiled
    begin_routes(layers, *requests((num_rows, 0, num_rows)))
    end_routes(layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        route(layers, config, x, logits)
    before = route_recorder(layers).read()
    assert before.counts.sum() == 0
    torch.accelerator.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(STALL_CYCLES)
        for step in range(steps):
            # Row counts and phases differ from step to step, so that a staging
            # buffer that is reused too early shows.
            begin_routes(layers, *requests((1 + 2 * step, 0, step), (1, 50, 9)))
            if as_graph:
                graph.replay()
            else:
                route(layers, config, x, logits)
            end_routes(layers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = torch.zeros((2, NUM_EXPERTS), dtype=torch.int64, device="cpu")
    for step in range(steps):
        expected[0] += by_expert(selected[:step])
        expected[1] += by_expert(selected[step : 2 + 2 * step])
    recorded = route_recorder(layers).read()
    prefill = sum(range(steps))
    decode = sum(2 + step for step in range(steps))
    assert recorded.tokens == tuple(np.add(before.tokens, (prefill, decode)).tolist())
    for counts in recorded.counts:
        assert counts.tolist() == expected.tolist()


# C1
def test_logical_ids_are_counted_under_eplb(model):
    layers, config = model
    num_physical = NUM_EXPERTS + 2
    order = torch.arange(NUM_EXPERTS).flip(0) + 2  # logical e lies at E + 1 - e
    x = torch.randn((9, HIDDEN), dtype=torch.bfloat16)
    logits = torch.randn((9, NUM_EXPERTS), dtype=torch.float32)
    logical = route(layers, config, x, logits)[0]
    for layer in layers:
        layer.router.eplb_state = EplbLayerState(
            expert_load_view=torch.zeros(num_physical, dtype=torch.int32),
            logical_to_physical_map=order[:, None],
            logical_replica_count=torch.ones(NUM_EXPERTS, dtype=torch.int64),
            should_record_tensor=torch.ones((), dtype=torch.bool),
            num_unpadded_tokens_tensors=[torch.full((), 9, dtype=torch.int32)],
        )
    begin_routes(layers, *requests((9, 0, 9)))
    physical = route(layers, config, x, logits)[0]
    end_routes(layers)
    assert torch.equal(physical.long(), order[logical.long()])
    for counts in route_recorder(layers).read().counts:
        assert counts[0].tolist() == by_expert(logical).tolist()
