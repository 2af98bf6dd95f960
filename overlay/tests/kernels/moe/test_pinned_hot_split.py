# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layout `split`: start-up checks, row arithmetic, and exactness on the CPU backend."""

import copy
import itertools
from fractions import Fraction

import pytest
import torch

from tests.kernels.moe.expert_provider_utils import (
    LAYER_NAMES,
    NUM_EXPERTS,
    TOP_K,
    build_layer,
    engine_config,
    routes,
    run,
    single_rank,
    write_model,
)
from tests.kernels.moe.pinned_hot_utils import COUNTS, load_weights, write_map
from vllm.model_executor.layers.fused_moe.experts.trtllm_mxfp4_moe import (
    TrtLlmMxfp4ExpertsMonolithic,
)
from vllm.model_executor.layers.fused_moe.pinned_hot import (
    choose_layout as choose_module,
)
from vllm.model_executor.layers.fused_moe.pinned_hot import provider as provider_module
from vllm.model_executor.layers.fused_moe.pinned_hot.choose_layout import layout_kind
from vllm.model_executor.layers.fused_moe.pinned_hot.device_backing import (
    ColdSpeeds,
    best_speeds,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import rank_experts
from vllm.model_executor.layers.fused_moe.pinned_hot.split.fma import (
    fused_multiply_add,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.rows import (
    RowOrder,
    hot_row_counts,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static
from vllm.model_executor.model_loader.expert_weights import (
    bind_expert_providers,
    require_reloadable_experts,
)
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="CUDA has tests of its own"
)

TOKENS = (1, 2, 17, 128)
HOT = (0, 1, 3, 4, NUM_EXPERTS - 1, NUM_EXPERTS)


@pytest.fixture(autouse=True)
def fresh_maps():
    provider_module._read_map.cache_clear()


def split_config(tmp_path, hot=3, **kwargs):
    model = write_model(tmp_path / "model")
    path = write_map(tmp_path / f"map{hot}.json", hot)
    options = {"expert_provider": "pinned_hot", "expert_map": str(path)}
    options |= {"expert_cold_dir": str(tmp_path), "expert_layout": "split"}
    return engine_config(model, **(options | kwargs))


def load(config, **kwargs):
    layers = torch.nn.ModuleList(build_layer(name, **kwargs) for name in LAYER_NAMES)
    bind_expert_providers(layers, config, config.model_config)
    for index, layer in enumerate(layers):
        load_weights(layer, seed=index)
    return layers


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("has_bias", (False, True))
def test_layer_is_bit_identical(tmp_path, has_bias):
    kind = {"has_bias": has_bias, "activation": "swigluoai" if has_bias else "silu"}
    stock = engine_config(write_model(tmp_path / "model"))
    with single_rank(stock, tmp_path):
        reference = load(stock, **kind)
        expected = [[run(layer, m) for m in TOKENS] for layer in reference]
    for hot in HOT:
        config = split_config(tmp_path, hot)
        with single_rank(config, tmp_path):
            layers = load(config, **kind)
            for layer, outputs in zip(layers, expected, strict=True):
                residency = layer.expert_provider.residency()
                assert (residency.hot_rows, residency.cold_rows) == (
                    hot,
                    NUM_EXPERTS - hot,
                )
                assert residency.layout == "layout split, two_calls"
                assert layer.w13_weight.shape[0] == hot
                for m, output in zip(TOKENS, outputs, strict=True):
                    assert torch.equal(run(layer, m), output), (hot, m)


# B6, B8: no expert, and ids that no expert has, in real rows and as whole rows.
@pytest.mark.parametrize("hot", [0, 3, NUM_EXPERTS])
@pytest.mark.parametrize("bad", [-1, NUM_EXPERTS, NUM_EXPERTS + 1, 2**31 - 1, -(2**31)])
def test_ids_that_name_no_expert_add_nothing(tmp_path, hot, bad):
    config = split_config(tmp_path, hot)
    with single_rank(config, tmp_path):
        layer = load(config)[0]
        x, weights, ids = routes(layer, 12)
        whole = layer.forward_modular(x, weights, ids)
        holes = ids.clone()
        holes[7:] = bad
        holes[3, 1] = bad
        found = layer.forward_modular(x, weights, holes)
        assert torch.equal(found[7:], torch.zeros_like(found[7:]))
        untouched = [0, 1, 2, 4, 5, 6]
        assert torch.equal(found[untouched], whole[untouched])
        one = layer.forward_modular(x[3:4], weights[3:4], ids[3:4, :1].repeat(1, TOP_K))
        assert found[3].isfinite().all() and not torch.equal(found[3], whole[3])
        assert one.isfinite().all()


# B9: a token may name an expert twice.
def test_duplicate_ids_count_twice(tmp_path):
    stock = engine_config(write_model(tmp_path / "model"))
    with single_rank(stock, tmp_path):
        layer = load(stock)[0]
        x, weights, ids = routes(layer, 9)
        ids[:] = ids[:, :1]
        expected = layer.forward_modular(x, weights, ids)
    config = split_config(tmp_path)
    with single_rank(config, tmp_path):
        layer = load(config)[0]
        assert torch.equal(layer.forward_modular(x, weights, ids), expected)


def test_adding_finalised_parts_gives_other_bits(tmp_path):
    """Why a token's selections are added in one pass, whichever part they come from."""
    config = split_config(tmp_path)
    with single_rank(config, tmp_path):
        layer = load(config)[0]
        x, weights, ids = routes(layer, 128)
        hot = torch.tensor(sorted(range(NUM_EXPERTS), key=lambda e: -COUNTS[e])[:3])
        is_hot = torch.isin(ids, hot.to(ids.dtype))
        assert is_hot.any() and not is_hot.all()
        whole = layer.forward_modular(x, weights, ids)
        parts = [
            layer.forward_modular(x, weights, ids.where(mask, -1))
            for mask in (is_hot, ~is_hot)
        ]
        bfloat16 = [part.bfloat16() for part in parts]
        assert not torch.equal(bfloat16[0] + bfloat16[1], whole.bfloat16())


def test_fused_multiply_add_rounds_once():
    generator = torch.Generator().manual_seed(0)
    shape = (2000,)
    mantissa = torch.rand(3, *shape, generator=generator) * 2 - 1
    exponent = torch.randint(-30, 30, (3, *shape), generator=generator)
    a, b, c = torch.ldexp(mantissa, exponent)
    # Products that lie just beside the middle of two float32 numbers.
    a[:3], b[:3] = 1 + 2**-12, 1 + 2**-12
    c[:3] = torch.tensor([2.0**24, -(2.0**-60), 2.0**-60])
    found = fused_multiply_add(a, b, c)
    for index in range(len(a)):
        exact = Fraction(a[index].item()) * Fraction(b[index].item()) + Fraction(
            c[index].item()
        )
        got = found[index]
        up, down = (torch.nextafter(got, torch.tensor(x)) for x in (9e37, -9e37))
        error = abs(Fraction(got.item()) - exact)
        assert error <= abs(Fraction(up.item()) - exact), index
        assert error <= abs(Fraction(down.item()) - exact), index


# ------------------------------------------------------------- start-up checks


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": "bfloat16"}, "--expert-layout range"),
        ({"expert_split_mode": "staged"}, "staged has not been shown .*two_calls"),
        (
            {"expert_layout": "range", "expert_split_mode": "staged"},
            "--expert-split-mode staged has no effect with --expert-layout range",
        ),
        (
            {"expert_layout": "auto", "expert_split_mode": "two_calls"},
            "no effect with --expert-layout auto",
        ),
    ],
)
def test_refusals_name_flag_and_cure(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config = split_config(tmp_path, **options)
        with single_rank(config, tmp_path):
            load(config, dtype=config.model_config.dtype)


# B17: a kernel that routes by itself leaves no ids to look rows up by.
@pytest.mark.parametrize("layout, refused", [("split", True), ("range", False)])
def test_kernels_that_route_by_themselves_are_not_chosen(tmp_path, layout, refused):
    class Monolithic(TrtLlmMxfp4ExpertsMonolithic):
        @staticmethod
        def _supports_current_device():
            return True

        @staticmethod
        def _supports_routing_method(*args):
            return True

    config = split_config(tmp_path, expert_layout=layout)
    with single_rank(config, tmp_path):
        layer = build_layer(LAYER_NAMES[0])
        assert layer.moe_config.needs_routed_ids == refused
        chosen, reason = Monolithic.is_supported_config(
            Monolithic,
            layer.moe_config,
            kMxfp4Static,
            None,
            Monolithic.activation_format(),
        )
    assert chosen != refused
    assert not refused or "a provider looks up by expert id" in reason


# B15: captured pointers and two storages; refused where the reload begins.
def test_reload_is_refused_before_anything_changes(tmp_path):
    config = split_config(tmp_path)
    with single_rank(config, tmp_path):
        layers = load(config)
        before = run(layers[0], 5)
        with pytest.raises(ValueError, match="cannot be reloaded.*--expert-layout"):
            require_reloadable_experts(layers)
        assert torch.equal(run(layers[0], 5), before)


def test_budget_decides_how_many_rows_are_hot(tmp_path):
    config = split_config(tmp_path, expert_hbm_gib=0.0003)
    with single_rank(config, tmp_path):
        layers = load(config)
        residencies = [layer.expert_provider.residency() for layer in layers]
    row_bytes = residencies[0].cold_bytes // residencies[0].cold_rows
    assert sum(r.hot_bytes for r in residencies) <= 0.0003 * 2**30
    assert sum(r.hot_bytes for r in residencies) + row_bytes > 0.0003 * 2**30
    assert all(r.hot_rows > 0 for r in residencies)


# ------------------------------------------------------------------ arithmetic


def test_rows_are_a_permutation_with_the_hot_ones_first():
    order = RowOrder((7, 0, 5, 1, 2, 3, 4, 6), 3)
    assert order.hot == (7, 0, 5) and order.cold == (1, 2, 3, 4, 6)
    row_map = order.row_map(torch.device("cpu"))
    assert row_map.dtype == torch.int32
    assert [order.experts[row] for row in row_map.tolist()] == list(range(8))


def test_budget_leaves_the_fewest_cold_bytes():
    layers = {
        "a": (rank_experts([9, 4, 1, 0], 0), 10),
        "b": (rank_experts([5, 5, 3, 3], 0), 10),
        "c": (rank_experts([0, 0, 0, 0], 0), 10),
    }
    for rows in range(13):
        budget = rows * 10 + 9
        found = hot_row_counts(layers, budget)
        cold = {
            choice: sum(
                sum(entry.share[hot:]) * row_bytes
                for hot, (entry, row_bytes) in zip(choice, layers.values(), strict=True)
            )
            for choice in itertools.product(range(5), repeat=3)
            if sum(choice) * 10 <= budget
        }
        assert cold[tuple(found.values())] == pytest.approx(min(cold.values()))
        assert sum(found.values()) == rows  # nothing is left unused


def test_without_a_budget_the_cut_decides():
    layers = {"a": (rank_experts([9, 4, 1, 0], 3), 10)}
    assert hot_row_counts(layers, None) == {"a": 3}


# ------------------------------------------------------------------ the choice


@pytest.mark.parametrize(
    "speeds, kind",
    [
        (ColdSpeeds(in_range=51e9, pinned=51e9), "range"),
        (ColdSpeeds(in_range=46e9, pinned=51e9), "range"),
        (ColdSpeeds(in_range=45e9, pinned=51e9), "split"),
        (ColdSpeeds(pinned=51e9, why_not_range="no host pages"), "split"),
        (ColdSpeeds(in_range=51e9), "range"),
    ],
)
def test_auto_takes_range_unless_it_is_slow_or_missing(
    tmp_path, monkeypatch, speeds, kind
):
    """The GPUs that differ are not at hand, so their speeds are given."""

    class Measured:
        def speeds(self):
            return speeds

    config = split_config(tmp_path, expert_layout="auto").offload_config.experts
    assert layout_kind(config) == "range"  # the CPU backend has one
    monkeypatch.setattr(choose_module, "_device_backing", lambda config: Measured())
    monkeypatch.setattr(choose_module.current_platform, "is_cpu", lambda: False)
    assert layout_kind(config) == kind
    peer = copy.copy(config)
    peer.expert_cold_tier = "peer:1"
    assert layout_kind(peer) == "range"


def readings(*gigabytes):
    """A reader that gives these, and then the last of them, with the list of calls."""
    calls = []

    def read():
        calls.append(gigabytes[min(len(calls), len(gigabytes) - 1)] * 1e9)
        return calls[-1]

    return read, calls


@pytest.mark.parametrize(
    "in_range, pinned, slow, reads",
    [
        ((51,), (51,), False, 3),
        ((12,), (51,), True, 40),
        # A neighbour takes the link while ranges are read, and later lets go.
        ((12,) * 9 + (50,), (51,), False, 10),
        # It takes both, and leaves pinned memory alone for one read.
        ((13, 13, 13, 13, 50), (13, 13, 51, 13), False, 5),
        # Its rival is disturbed, all but once.
        ((12,), (51, 11), True, 40),
    ],
)
def test_a_range_is_slow_only_if_it_stays_slow(in_range, pinned, slow, reads):
    read_range, range_calls = readings(*in_range)
    read_pinned, pinned_calls = readings(*pinned)
    speeds = best_speeds(read_range, read_pinned)
    assert speeds.range_is_slow == slow
    assert len(range_calls) == len(pinned_calls) == reads
    assert speeds.in_range == max(range_calls) and speeds.pinned == max(pinned_calls)


def test_memory_that_is_missing_is_not_read():
    read, calls = readings(51)
    assert best_speeds(read, None) == ColdSpeeds(in_range=51e9)
    assert best_speeds(None, read) == ColdSpeeds(pinned=51e9)
    assert best_speeds(None, None) == ColdSpeeds()
    assert len(calls) == 6
