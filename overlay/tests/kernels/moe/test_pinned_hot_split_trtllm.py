# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""trtllm-gen experts on split tensors, over a stand-in for FlashInfer.

What is compared is the real experts class on the whole layer with the same class on the
two parts. The stand-in proves which rows, scales and windows a launch gets and how its
rows are summed; it says nothing about the bits of FlashInfer's GEMMs.
"""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tests.kernels.moe import trtllm_gen_stub as stub
from tests.kernels.moe.trtllm_gen_stub import (
    HIDDEN,
    KINDS,
    NUM_EXPERTS,
    TOP_K,
    StubLayer,
    TrtLlmGenStub,
    arguments,
    make_routes,
)
from vllm.model_executor.layers.fused_moe.moe_output import (
    MoEOutput,
    UnfinalizedMoEOutput,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.parts import (
    permute_expert_tensors,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.rows import RowOrder
from vllm.model_executor.layers.fused_moe.pinned_hot.split.staged import Staged
from vllm.model_executor.layers.fused_moe.pinned_hot.split.trtllm_gen import (
    TRTLLM_KERNELS,
    TrtLlmRows,
    TrtLlmSplit,
    why_not_trtllm,
    why_not_two_calls,
)
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="the stand-in runs on the CPU"
)

# No prefix of the ids; the first three are 7, 0, 5.
RANKING = (7, 0, 5, 11, 2, 9, 4, 1, 10, 3, 8, 6)
HOT_COUNTS = (0, 1, 3, 4, NUM_EXPERTS - 1, NUM_EXPERTS)
TOKENS = 9


@pytest.fixture
def kernel(monkeypatch):
    made = TrtLlmGenStub()
    made.install(monkeypatch)
    return made


def split(layer: StubLayer, num_hot: int, ranking=RANKING) -> TrtLlmSplit:
    """Take a layer to two parts; what the parts do not hold is lost."""
    order = RowOrder(ranking, num_hot)
    permute_expert_tensors(layer, order.experts, layer.rows)
    parts = [
        (row.data[list(order.hot)].clone(), row.data[list(order.cold)].clone())
        for row in layer.rows.values()
    ]
    made = TrtLlmSplit(layer.experts, order, *parts)
    for row in layer.rows.values():
        row.data.fill_(0xFF)
    return made


def run_stock(ids, weights, num_tokens=TOKENS, **layer):
    made = StubLayer(**layer)
    given = arguments(made, num_tokens, ids, weights)
    unfinalized = made.experts.apply(**given)
    return given["output"] if unfinalized is None else unfinalized


def run_split(num_hot, ids, weights, num_tokens=TOKENS, ranking=RANKING, **layer):
    made = StubLayer(**layer)
    run = split(made, num_hot, ranking)
    given = arguments(made, num_tokens, ids, weights)
    unfinalized = run(**given)
    return given["output"] if unfinalized is None else unfinalized


# B2, B5, B6, B14, B17, D8, D9: every expert has its own scales, biases and limits,
# rows nobody wrote hold NaN.
@pytest.mark.parametrize("num_hot", HOT_COUNTS)
@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_unsplit_layer(kernel, kind, defer, num_hot):
    ids, weights = make_routes(TOKENS)
    expected = run_stock(ids, weights, kind=kind, defer=defer)
    found = run_split(num_hot, ids, weights, kind=kind, defer=defer)
    if defer:
        assert isinstance(expected, UnfinalizedMoEOutput)
        assert isinstance(found, UnfinalizedMoEOutput)
        expected, found = stub.finalized(expected), stub.finalized(found)
    assert torch.equal(found, expected)
    assert not found[1].any()
    assert found[0].any() and not found.isnan().any()
    # None of it finalized by the kernel.
    assert not any(launch.finalized for launch in kernel.launches[1:])


# D1, D2, D12, B24
@pytest.mark.parametrize("num_hot", HOT_COUNTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_selection_is_in_one_window(kernel, kind, num_hot):
    ids, weights = make_routes(TOKENS)
    run_split(num_hot, ids, weights, kind=kind)
    sizes = [size for size in (num_hot, NUM_EXPERTS - num_hot) if size]
    assert [launch.local for launch in kernel.launches] == sizes
    taken = torch.zeros(ids.shape, dtype=torch.int32)
    for launch in kernel.launches:
        assert launch.num_experts == NUM_EXPERTS
        assert torch.equal(launch.ids < 0, launch.ids == -1)
        assert torch.equal(launch.ids < 0, ids < 0)
        assert set(launch.lengths.values()) == {launch.local}
        assert launch.offset + launch.local <= NUM_EXPERTS
        inside = launch.ids >= launch.offset
        taken += inside & (launch.ids < launch.offset + launch.local)
    assert torch.equal(taken, (ids >= 0).to(torch.int32))
    if kind in stub.OFFSET_KINDS and len(sizes) == 2:
        assert [launch.offset for launch in kernel.launches] == [0, num_hot]
        assert torch.equal(kernel.launches[0].ids, kernel.launches[1].ids)


# B8: what is out of range selects nothing, and is not clamped to a row.
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_out_of_range_select_nothing(kernel, dtype):
    ids, weights = make_routes(TOKENS)
    stock = ids.clone()
    bounds = torch.iinfo(dtype)
    wrong = (NUM_EXPERTS, NUM_EXPERTS + 1, bounds.min, bounds.max, -2)
    ids = ids.to(dtype)
    for token, expert in enumerate(wrong, start=4):
        ids[token, token % TOP_K] = expert
        stock[token, token % TOP_K] = -1
    found = run_split(3, ids, weights)
    assert torch.equal(found, run_stock(stock, weights))
    for launch in kernel.launches[:2]:
        assert torch.equal(launch.ids == -1, stock == -1)


# D14
@pytest.mark.parametrize("kind", stub.FP4_KINDS)
def test_chunks_are_those_of_the_unsplit_layer(kernel, monkeypatch, kind):
    name = "_get_chunk_size" if kind == "nvfp4" else "_max_supported_tokens"
    cls = type(StubLayer(kind).experts)
    monkeypatch.setattr(cls, name, lambda *args: 4)
    ids, weights = make_routes(TOKENS)
    expected = run_stock(ids, weights, kind=kind, defer=True)
    assert [len(launch.ids) for launch in kernel.launches] == [4, 4, 1]
    found = run_split(3, ids, weights, kind=kind, defer=True)
    assert [len(launch.ids) for launch in kernel.launches[3:]] == [4, 4, 4, 4, 1, 1]
    assert isinstance(found, torch.Tensor), "a chunked call cannot be left open"
    assert torch.equal(found, expected)
    # One launch is enough for four tokens, and those are left open.
    left_open = run_split(3, ids[:4], weights[:4], 4, kind=kind, defer=True)
    assert isinstance(left_open, UnfinalizedMoEOutput)


def test_a_consumer_with_more_room_than_a_launch_gets_finalized_rows(
    kernel, monkeypatch
):
    layer = StubLayer(defer=True)
    run = split(layer, 3)
    monkeypatch.setattr(type(layer.experts), "_max_supported_tokens", lambda *args: 4)
    ids, weights = make_routes(TOKENS)
    given = arguments(layer, TOKENS, ids, weights)
    assert run(**given) is None
    assert torch.equal(given["output"], run_stock(ids, weights))


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_small_batches(kernel, num_tokens):
    ids, weights = make_routes(num_tokens)
    expected = run_stock(ids, weights, num_tokens)
    assert torch.equal(run_split(4, ids, weights, num_tokens), expected)
    assert len(kernel.launches) == 3 * num_tokens


class CopiedRows:
    """Stands for `Staging`: cold rows come from elsewhere, those that are asked for."""

    def __init__(self, layer: StubLayer, order: RowOrder):
        self.row_map = order.row_map(torch.device("cpu"))
        self.num_hot, self.staged = order.num_hot, 0
        self.pairs = []
        for row in layer.rows.values():
            row.data.copy_(row.data[list(order.experts)].clone())
            self.pairs.append((row.data[order.num_hot :].clone(), row.data))
            row.data[order.num_hot :] = 0xFF

    def stage(self, topk_ids: torch.Tensor) -> None:
        valid = topk_ids[(topk_ids >= 0) & (topk_ids < NUM_EXPERTS)].unique()
        for row in self.row_map[valid.long()].tolist():
            if row >= self.num_hot:
                self.staged += 1
                for cold, home in self.pairs:
                    home[row] = cold[row - self.num_hot]


@pytest.mark.parametrize("num_hot", HOT_COUNTS)
@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_with_staged_rows_equals_the_unsplit_layer(
    kernel, kind, defer, num_hot
):
    ids, weights = make_routes(TOKENS)
    ids[4, 0] = NUM_EXPERTS
    stock = torch.where(ids < NUM_EXPERTS, ids, -1)
    expected = run_stock(stock, weights, kind=kind, defer=defer)
    layer = StubLayer(kind, defer)
    order = RowOrder(RANKING, num_hot)
    permute_expert_tensors(layer, order.experts, layer.rows)
    staging = CopiedRows(layer, order)
    given = arguments(layer, TOKENS, ids, weights)
    run = Staged(staging, TrtLlmRows(layer.experts, staging.row_map))
    found = run(**given)
    if defer:
        found, expected = stub.finalized(found), stub.finalized(expected)
    else:
        found = given["output"]
    assert torch.equal(found, expected)
    assert (staging.staged > 0) == (num_hot < NUM_EXPERTS)
    (launch,) = kernel.launches[1:]
    assert (launch.offset, launch.local) == (0, NUM_EXPERTS)


# D4
@pytest.mark.parametrize("num_hot", [3, NUM_EXPERTS])
def test_weights_are_the_callers(kernel, num_hot):
    ids, weights = make_routes(TOKENS)
    expected = run_stock(ids, weights, defer=True)
    kernel.undefined_weights = True
    found = run_split(num_hot, ids, weights, defer=True)
    assert found.expert_weights.data_ptr() == weights.data_ptr()
    assert torch.equal(stub.finalized(found), stub.finalized(expected))


# D13: the sum has one order and one rounding, whichever part a row lies in.
def test_which_expert_is_hot_changes_nothing(kernel):
    ids, weights = make_routes(TOKENS)
    expected = run_stock(ids, weights)
    for shift in range(NUM_EXPERTS):
        ranking = RANKING[shift:] + RANKING[:shift]
        found = run_split(5, ids, weights, ranking=ranking)
        assert torch.equal(found, expected)


def test_sums_of_finalized_parts_would_differ(kernel):
    ids, weights = make_routes(64)
    expected = run_stock(ids, weights, 64)
    layer = StubLayer()
    run = split(layer, 5)
    given = arguments(layer, 64, ids, weights)
    run(**given)
    assert torch.equal(given["output"], expected)
    halves = []
    for part in run.parts:
        only = TrtLlmSplit.__new__(TrtLlmSplit)
        only.experts, only.family, only.parts = run.experts, run.family, [part]
        given = arguments(layer, 64, ids, weights)
        only(**given)
        halves.append(given["output"])
    added = halves[0] + halves[1]
    assert torch.allclose(added.float(), expected.float(), rtol=0.05, atol=1.0)
    assert not torch.equal(added, expected)


# B14: a limit that is dropped shows.
@pytest.mark.parametrize("kind", KINDS)
def test_the_clamp_is_applied(kernel, kind):
    ids, weights = make_routes(TOKENS)
    clamped = run_split(3, ids, weights, kind=kind)
    free = run_split(3, ids, weights, kind=kind, clamp=None)
    assert not torch.equal(clamped, free)
    assert torch.equal(free, run_stock(ids, weights, kind=kind, clamp=None))


def test_output_narrower_than_the_rows(kernel):
    ids, weights = make_routes(TOKENS)
    expected = run_stock(ids, weights, hidden_unpadded=HIDDEN - 4)
    assert expected.shape == (TOKENS, HIDDEN - 4)
    found = run_split(3, ids, weights, hidden_unpadded=HIDDEN - 4)
    assert torch.equal(found, expected)


# D12
@pytest.mark.parametrize("name", ["gemm1_alpha", "gemm1_clamp_limit", "w2_bias"])
def test_a_tensor_of_another_length_is_refused(kernel, name):
    layer = StubLayer()
    if name == "w2_bias":
        layer.quant_method.moe_quant_config._w2.bias = torch.ones(5, HIDDEN)
    else:
        setattr(layer.experts, name, torch.ones(5))
    with pytest.raises(ValueError, match=rf"{name} \(5.*each of the 3 experts"):
        split(layer, 3)


# D11
def test_scale_tiles_that_two_experts_share_are_refused(kernel, monkeypatch):
    monkeypatch.setattr(stub, "interleave", lambda scale: scale)
    layer = StubLayer(intermediate=96)
    with pytest.raises(ValueError, match=r"w1_scale \(12, 192, 4\).*tiles of 128 rows"):
        split(layer, 3)


@pytest.mark.parametrize("kind", ["mxfp8", "fp8_block"])
def test_scales_of_another_rank_are_refused(kernel, kind):
    layer = StubLayer(kind)
    flat = layer.w13_weight_scale.flatten(1)
    layer.quant_method.moe_quant_config._w1.scale = flat
    with pytest.raises(ValueError, match=r"w1_scale \(12, \d+\): .*a matrix per"):
        split(layer, 3)


def test_kernels_that_are_not_run_in_two_calls_say_why():
    for kernel in TRTLLM_KERNELS:
        assert why_not_two_calls(kernel) is None
    for kernel, reason in {
        "TrtLlmBf16ExpertsModular": "cannot stop before the finalize",
        "TrtLlmMxfp4ExpertsMonolithic": "routes inside the kernel",
        "Unheard": "was not looked at",
    }.items():
        text = why_not_two_calls(kernel)
        assert kernel in text and reason in text and "--expert-layout range" in text
    other = SimpleNamespace()
    with pytest.raises(ValueError, match="SimpleNamespace is not run in two calls"):
        TrtLlmSplit(other, RowOrder((0,), 1), (None, None), (None, None))


# B10
def test_parts_of_an_expert_parallel_layer_are_refused(kernel):
    layer = StubLayer()
    assert why_not_trtllm(layer) is None
    layer.global_num_experts = 2 * NUM_EXPERTS
    assert f"{NUM_EXPERTS} of {2 * NUM_EXPERTS} experts" in why_not_trtllm(layer)
    layer.moe_config.moe_parallel_config.ep_size = 2
    assert "--enable-expert-parallel" in why_not_trtllm(layer)


# Consumers of an unfinalized output. Their kernels need an sm_100 GPU; what they check
# in Python runs here, unchanged.
@pytest.fixture
def mhc(monkeypatch):
    """DeepSeek V4.1's all-reduce module, its compiler stubbed."""
    for name in (
        "cuda",
        "cuda.bindings",
        "cuda.bindings.driver",
        "cutlass",
        "cutlass.cute",
        "cutlass.cute.nvgpu",
        "cutlass.cute.runtime",
        "cutlass.cutlass_dsl",
        "cutlass._mlir",
        "cutlass._mlir.dialects",
        "cutlass.utils",
    ):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, MagicMock(name=name))
    package = "vllm.models.deepseek_v41.nvidia.ops.cute_dsl"
    before = set(sys.modules)
    module = pytest.importorskip(f"{package}.all_reduce_mhc")
    for name in ("to_cute", "to_cute_dynamic"):
        monkeypatch.setattr(module, name, lambda tensor, *args, **kwargs: tensor)
    for name in ("Int32", "Int64", "current_cu_stream"):
        monkeypatch.setattr(module, name, lambda *args: args)
    yield module
    for name in set(sys.modules) - before:
        if name.startswith(package):
            del sys.modules[name]


def reduce_of(module, published):
    """An `AllReduceMHC` that keeps what it would publish."""
    made = object.__new__(module.AllReduceMHC)
    made.hidden_size, made.top_k, made.hc_mult = HIDDEN, TOP_K, 4
    made.capacity, made._stage_state, made._multicast = 16, torch.zeros(1), 0

    def publish(rows, weights, index, shared, *rest):
        published.append(
            stub.finalize(
                rows.view(-1, HIDDEN),
                index.view(-1, TOP_K),
                weights.view(-1, TOP_K),
                HIDDEN,
            )
        )

    made._finalize_publish = publish
    made._collect = lambda residual, *rest: (residual, residual[:, 0])
    return made


@pytest.mark.parametrize("num_hot", HOT_COUNTS)
def test_merged_output_passes_deepseek_v41(kernel, mhc, monkeypatch, num_hot):
    from vllm.models.deepseek_v41.nvidia.ops import mhc as ops

    ids, weights = make_routes(TOKENS)
    published: list[torch.Tensor] = []
    monkeypatch.setattr(ops, "_all_reduce_mhc", reduce_of(mhc, published))
    monkeypatch.setattr(ops, "mhc_pre_delayed_overlap", lambda *a, **k: ())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    for routed in (
        run_stock(ids, weights, defer=True),
        run_split(num_hot, ids, weights, defer=True),
    ):
        shared = torch.zeros((TOKENS, HIDDEN), dtype=torch.bfloat16)
        residual = torch.zeros((TOKENS, 4, HIDDEN), dtype=torch.bfloat16)
        mix = torch.zeros((TOKENS, 4))
        ops.mhc_shifted_post_pre(
            MoEOutput(routed=routed, shared_output=shared),
            residual,
            mix,
            torch.zeros((TOKENS, 4, 4)),
            *(None,) * 8,
            pre_mix=mix,
            norm_weight=torch.ones(HIDDEN),
        )
    expected, found = published
    assert torch.equal(found, expected)


# What FlashInfer's call returns of an unfinalized output, in its order.
FIELDS = ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx")


def test_deepseek_v41_checks_have_teeth(kernel, mhc):
    ids, weights = make_routes(TOKENS)
    routed = run_split(3, ids, weights, defer=True)
    consumer = reduce_of(mhc, [])

    def finalize(**changes):
        given = {name: getattr(routed, name) for name in FIELDS} | changes
        shared = torch.zeros((TOKENS, HIDDEN), dtype=torch.bfloat16)
        residual = torch.zeros((TOKENS, 4, HIDDEN), dtype=torch.bfloat16)
        mix, comb = torch.zeros((TOKENS, 4)), torch.zeros((TOKENS, 16))
        return consumer.finalize(
            *given.values(), shared, residual, mix, comb, mix, torch.ones(HIDDEN), 1e-6
        )

    finalize()
    with pytest.raises(ValueError, match="expert_weights must be FP32"):
        finalize(expert_weights=weights.bfloat16())
    with pytest.raises(ValueError, match="must be int32"):
        finalize(
            expanded_idx_to_permuted_idx=routed.expanded_idx_to_permuted_idx.long()
        )
    with pytest.raises(ValueError, match=r"must be \[rows, hidden\]"):
        finalize(gemm2_permuted=routed.gemm2_permuted[:, 1:])


def test_merged_output_passes_the_conversion_of_stock(kernel):
    """What stock checks on FlashInfer's own unfinalized output."""
    from vllm.model_executor.layers.fused_moe.moe_output import (
        convert_flashinfer_moe_output,
    )

    ids, weights = make_routes(TOKENS)
    routed = run_split(4, ids, weights, defer=True)
    again = convert_flashinfer_moe_output(
        [getattr(routed, name) for name in FIELDS],
        do_finalize=False,
        num_tokens=TOKENS,
        top_k=TOP_K,
    )
    assert torch.equal(stub.finalized(again), stub.finalized(routed))


def test_merged_output_passes_kimi_k3(kernel):
    """Its input checks; its collective wants bfloat16 weights of monolithic kernels."""
    from vllm.models.kimi_k3.nvidia.ops import latent_moe_tail as tail

    ids, weights = make_routes(TOKENS)
    routed = run_split(4, ids, weights, defer=True)
    contract = SimpleNamespace(
        latent_size=HIDDEN,
        hidden_size=2 * HIDDEN,
        max_num_tokens=TOKENS,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
    )
    check = tail.KimiK3LatentMoETailOp._validate_inputs
    shared = torch.zeros((TOKENS, 2 * HIDDEN), dtype=torch.bfloat16)
    norm = torch.zeros(HIDDEN, dtype=torch.bfloat16)
    up = torch.zeros((2 * HIDDEN, HIDDEN), dtype=torch.bfloat16)
    check(SimpleNamespace(contract=contract), routed, shared, norm, up)
    contract.max_num_tokens = TOKENS - 1
    with pytest.raises(ValueError, match="between 1 and"):
        check(SimpleNamespace(contract=contract), routed, shared, norm, up)
