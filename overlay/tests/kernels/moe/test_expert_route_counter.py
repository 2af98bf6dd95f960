# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Counting routes: the operation, whose rows they are, and which layers can be read."""

from types import SimpleNamespace

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
from vllm.forward_context import (
    DPMetadata,
    get_forward_context,
    set_forward_context,
)
from vllm.model_executor.expert_routes import (
    begin_routes,
    bind_route_recorder,
    end_routes,
    route_recorder,
)
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.expert_profile.count_routes import (
    count_routes,
)
from vllm.model_executor.layers.fused_moe.expert_profile.recorder import RouteCounter
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    FusedMoEExpertsMonolithic,
)
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="CUDA has tests of its own"
)


def count_by_hand(ids, phases, num_experts):
    counts = [[0] * num_experts for _ in range(2)]
    for row, phase in zip(ids.tolist(), phases.tolist(), strict=False):
        for expert in row:
            if phase and 0 <= expert < num_experts:
                counts[phase - 1][expert] += 1
    return counts


# C9: any id type and number of experts. C4: -1 and padding rows. Ids from
# num_experts on are fused shared experts.
@pytest.mark.parametrize("num_experts", [8, 128, 255, 256, 257, 384, 512])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint32])
def test_counts_equal_a_count_by_hand(num_experts, dtype):
    generator = torch.Generator().manual_seed(num_experts)
    low, high = (0 if dtype == torch.uint32 else -1), num_experts + 2
    ids = torch.randint(low, high, (300, 6), generator=generator)
    ids[0] = num_experts - 1
    phases = torch.randint(0, 3, (200,), generator=generator).to(torch.int8)
    phases[0] = 2
    counts = torch.zeros((2, num_experts), dtype=torch.int64)
    if dtype == torch.uint32:
        ids[5] = 2**32 - 1  # what -1 becomes
    count_routes(ids.to(dtype), phases, counts)
    assert counts.tolist() == count_by_hand(ids, phases, num_experts)
    assert counts[1, num_experts - 1] >= 6
    count_routes(ids.to(dtype), phases, counts)
    assert counts.sum() == 2 * np.sum(count_by_hand(ids, phases, num_experts))


@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_batch_shorter_than_the_buffer(num_rows):
    ids = torch.zeros((num_rows, 2), dtype=torch.int32)
    counts = torch.zeros((2, 4), dtype=torch.int64)
    count_routes(ids, torch.ones(16, dtype=torch.int8), counts)
    assert counts.tolist() == [[2 * num_rows, 0, 0, 0], [0] * 4]


def test_counters_hold_more_than_32_bits():
    counts = torch.full((2, 4), 1 << 40)
    count_routes(torch.tensor([[3]]), torch.tensor([1], dtype=torch.int8), counts)
    assert counts[0, 3] == (1 << 40) + 1


@pytest.fixture
def model(tmp_path):
    """A model of two MoE layers whose routes are recorded, and its configuration."""
    config = engine_config(
        write_model(tmp_path / "model"), expert_profile_out=str(tmp_path / "a")
    )
    with single_rank(config, tmp_path):
        layers = torch.nn.ModuleList(
            FusedMoEFactory(
                num_experts=NUM_EXPERTS,
                top_k=TOP_K,
                hidden_size=HIDDEN,
                intermediate_size=96,
                params_dtype=torch.float32,
                prefix=name,
            )
            for name in LAYER_NAMES
        )
        layers.get_model = lambda: layers  # as a model runner has it
        bind_route_recorder(layers, config, config.model_config)
        yield layers, config


def route(layers, config, num_rows, seed=0):
    """Route random rows through every layer; return the ids it selected."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    with set_forward_context(None, config, num_tokens=num_rows):
        for layer in layers:
            x = torch.randn((num_rows, HIDDEN), generator=generator)
            logits = torch.randn((num_rows, NUM_EXPERTS), generator=generator)
            found.append(layer.router.select_experts(x, logits)[1])
    return found


def requests(*rows):
    """Scheduled, computed and prompt tokens of each request."""
    return [np.array(column, dtype=np.int32) for column in zip(*rows, strict=True)]


def test_only_rows_between_begin_and_end_are_counted(model):
    layers, config = model
    route(layers, config, 30)  # warm-up, capture, dummy batch
    # A chunk in mid-prompt, one that ends it with two tokens beyond, a decode step.
    begin_routes(layers, *requests((4, 8, 100), (6, 96, 100), (1, 120, 100)))
    ids = route(layers, config, 16)  # 11 rows and 5 of padding
    end_routes(layers)
    route(layers, config, 30)
    recorded = route_recorder(layers).read()
    assert recorded.layer_names == LAYER_NAMES
    assert recorded.tokens == (8, 3)
    phases = torch.tensor([1] * 4 + [1] * 4 + [2] * 2 + [2])
    for selected, counts in zip(ids, recorded.counts, strict=True):
        assert counts.tolist() == count_by_hand(selected[:11], phases, NUM_EXPERTS)
        assert counts.sum() == 11 * TOP_K


def test_the_next_step_is_not_counted_as_the_last(model):
    layers, config = model
    begin_routes(layers, *requests((9, 0, 9)))
    route(layers, config, 9)
    end_routes(layers)
    begin_routes(layers, *requests((1, 9, 9), (1, 20, 5)))
    route(layers, config, 9)
    end_routes(layers)
    recorded = route_recorder(layers).read()
    assert recorded.tokens == (9, 2)
    assert recorded.counts.sum(axis=2).tolist() == [[9 * TOP_K, 2 * TOP_K]] * 2


def test_requests_are_looked_up_by_index(model):
    layers, config = model
    prompts = np.array([3, 50, 7, 9], np.int32)
    scheduled, computed = np.array([2, 2]), np.array([48, 8, 99])
    begin_routes(layers, scheduled, computed, prompts, np.array([1, 3]))
    route(layers, config, 4)
    end_routes(layers)
    assert route_recorder(layers).read().tokens == (3, 1)


def test_more_rows_than_the_engine_schedules_are_an_error(model):
    layers, config = model
    limit = config.scheduler_config.max_num_batched_tokens
    with pytest.raises(RuntimeError):
        begin_routes(layers, *requests((limit + 1, 0, limit + 1)))


# C1: ids are taken before replicas are chosen among physical experts.
def test_logical_ids_are_counted_under_eplb(model, monkeypatch):
    layers, config = model
    for layer in layers:
        monkeypatch.setattr(
            layer.router, "_apply_eplb_mapping", lambda ids: NUM_EXPERTS + 1 - ids
        )
    begin_routes(layers, *requests((9, 0, 9)))
    ids = route(layers, config, 9)
    end_routes(layers)
    counts = route_recorder(layers).read().counts
    logical = NUM_EXPERTS + 1 - ids[0]
    phases = torch.ones(9, dtype=torch.int8)
    assert counts[0].tolist() == count_by_hand(logical, phases, NUM_EXPERTS)


def test_traced_layers_count_too(model):
    layers, config = model

    @torch.compile(fullgraph=True, backend="inductor")
    def select(x, logits):
        weights, ids = layers[0].router.select_experts(x, logits)
        return weights * 2, ids + 1

    x, logits = torch.randn(5, HIDDEN), torch.randn(5, NUM_EXPERTS)
    begin_routes(layers, *requests((5, 0, 5)))
    with set_forward_context(None, config, num_tokens=5):
        ids = select(x, logits)[1] - 1
    end_routes(layers)
    counts = route_recorder(layers).read().counts[0]
    phases = torch.ones(5, dtype=torch.int8)
    assert counts.tolist() == count_by_hand(ids, phases, NUM_EXPERTS)


# C11: each data-parallel rank counts its own rows, wherever the kernel put them.
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_data_parallel_rows(model, rank):
    sizes = [4, 1, 7]
    phases = torch.ones(16, dtype=torch.int8)
    counts = torch.zeros((2, 3), dtype=torch.int64)
    counter = RouteCounter("layer", phases, counts, rank)
    owner = torch.tensor([0] * 4 + [1] + [2] * 7)[:, None]
    config = model[1]
    with set_forward_context(None, config, num_tokens=sizes[rank]):
        get_forward_context().dp_metadata = DPMetadata(torch.tensor(sizes))
        counter.count(owner)
        counter.count(owner[owner[:, 0] == rank])
        with pytest.raises(RuntimeError, match="routes 9 rows"):
            counter.count(torch.zeros((9, 1), dtype=torch.int64))
    expected = [0, 0, 0]
    expected[rank] = 2 * sizes[rank]
    assert counts.tolist() == [expected, [0] * 3]


# C3: a pass outside the engine's context fails, it does not count zeros.
def test_no_context_is_an_error(model):
    layers, _ = model
    with pytest.raises(AssertionError, match="[Ff]orward context"):
        layers[0].router.select_experts(
            torch.randn(1, HIDDEN), torch.randn(1, NUM_EXPERTS)
        )


def test_draft_models_are_not_recorded(model):
    layers, config = model
    draft = torch.nn.ModuleList()
    bind_route_recorder(draft, config, SimpleNamespace(runner_type="draft"))
    bind_route_recorder(draft, config, SimpleNamespace(runner_type="generate"))
    assert route_recorder(draft) is None


def test_model_without_vllms_moe_layers_is_refused(model):
    config = model[1]
    with pytest.raises(ValueError, match="ModuleList has no MoE layer"):
        bind_route_recorder(torch.nn.ModuleList(), config, config.model_config)


class SilentKernel(FusedMoEExpertsMonolithic):
    """Selects experts by itself and does not tell them."""


class TellingKernel(FusedMoEExpertsMonolithic):
    def supports_routing_replay_capture(self):
        return True


def make_monolithic(monkeypatch, layers, kernel):
    monkeypatch.setattr(type(layers[0]), "is_monolithic", True)
    for layer in layers:
        monkeypatch.setattr(layer.routed_experts.quant_method, "experts_cls", kernel)


# C2: what a kernel keeps to itself would be counted as zeros.
def test_kernel_that_does_not_tell_is_refused(model, monkeypatch):
    layers, config = model
    make_monolithic(monkeypatch, layers, SilentKernel)
    named = f"{LAYER_NAMES[0]} selects experts inside SilentKernel"
    with pytest.raises(ValueError, match=named):
        bind_route_recorder(layers, config, config.model_config)


def test_kernel_that_tells_is_counted(model, monkeypatch):
    """The plumbing only; the kernels that tell need a Blackwell GPU."""
    layers, config = model
    make_monolithic(monkeypatch, layers, TellingKernel)
    bind_route_recorder(layers, config, config.model_config)
    begin_routes(layers, *requests((3, 0, 2)))
    with set_forward_context(None, config, num_tokens=5):
        for layer in layers:
            sink = layer.routed_experts.routing_sink
            told = sink.buffer[:5]
            told[:] = torch.tensor([[0, 1], [1, 2], [7, 0], [-1, -1], [3, 3]])
            sink.capture_fn(told)
    end_routes(layers)
    recorded = route_recorder(layers).read()
    assert recorded.tokens == (2, 1)
    expected = [[1, 2, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 1]]
    assert recorded.counts.tolist() == [expected, expected]


def test_layers_of_another_size_are_refused(model):
    layers, config = model
    layers[1].router.top_k = TOP_K + 1
    with pytest.raises(ValueError, match=f"{LAYER_NAMES[1]} has 8 experts and top_k 3"):
        bind_route_recorder(layers, config, config.model_config)
