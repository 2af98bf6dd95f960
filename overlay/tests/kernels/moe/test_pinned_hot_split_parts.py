# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which tensors of a layer follow its experts' rows, and cuts of an experts object."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.moe.trtllm_gen_stub import (
    KINDS,
    NUM_EXPERTS,
    StubLayer,
    TrtLlmGenStub,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.parts import (
    expert_indexed,
    permute_expert_tensors,
    slice_experts,
)
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="the layers are made on the CPU"
)

ORDER = (7, 0, 5, 11, 2, 9, 4, 1, 10, 3, 8, 6)
E = NUM_EXPERTS


@pytest.fixture
def layer(monkeypatch):
    TrtLlmGenStub().install(monkeypatch)
    return StubLayer()


def marks(*shape: int) -> torch.Tensor:
    """A tensor `(E, *shape)` whose rows hold their expert's id."""
    row = torch.arange(E, dtype=torch.float32).view(E, *(1,) * len(shape))
    return row.expand(E, *shape).contiguous()


def row_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(E, -1).view(torch.uint8)


def add(layer: StubLayer, value: torch.Tensor) -> torch.Tensor:
    """Give a layer's experts object one more tensor."""
    layer.experts.extra = value
    return value


def permute(layer: StubLayer) -> None:
    permute_expert_tensors(layer, ORDER, layer.rows)


@pytest.mark.parametrize("kind", KINDS)
def test_every_small_tensor_is_found_once(monkeypatch, kind):
    TrtLlmGenStub().install(monkeypatch)
    layer = StubLayer(kind)
    found = expert_indexed(layer, layer.rows)
    pointers = [entry.tensor.data_ptr() for entry in found]
    assert len(set(pointers)) == len(pointers)
    expected = {"w13_weight_scale", "w2_weight_scale"}
    if kind == "nvfp4":
        names = ("w13_weight_scale_2", "w2_weight_scale_2", "a2_gscale", "g1_scale_c")
        expected |= {*names, "gemm1_beta", "gemm1_clamp_limit"}
    elif kind.startswith("mxfp4"):
        expected |= {"w13_bias", "w2_bias"}
    assert {getattr(layer, name).data_ptr() for name in expected} <= set(pointers)
    experts = layer.experts
    for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"):
        assert getattr(experts, name).data_ptr() in pointers


# Trap: the quantization config holds the layer's Parameter objects.
@pytest.mark.parametrize("kind", KINDS)
def test_every_small_tensor_is_moved_once(monkeypatch, kind):
    TrtLlmGenStub().install(monkeypatch)
    layer = StubLayer(kind)
    before = {
        name: row_bytes(tensor).clone()
        for name, tensor in layer.named_parameters()
        if "input_scale" not in name
    }
    alpha = layer.experts.gemm1_alpha.clone()
    pointers = {name: tensor.data_ptr() for name, tensor in layer.named_parameters()}
    permute(layer)
    order = list(ORDER)
    still = {"w13_weight", "w2_weight", "e_score_correction_bias"}
    for name, tensor in layer.named_parameters():
        assert tensor.data_ptr() == pointers[name]
        if name in before:
            now = row_bytes(tensor)
            expected = before[name] if name in still else before[name][order]
            assert torch.equal(now, expected), name
            assert name in still or not torch.equal(now, before[name]), name
    assert torch.equal(layer.experts.gemm1_alpha, alpha[order])
    config = layer.quant_method.moe_quant_config
    assert config.w1_scale is layer.w13_weight_scale


def test_aliases_of_another_dtype_and_shape_are_moved_once(layer):
    value = add(layer, marks(4))
    layer.experts.same_bytes = value.view(torch.int32).view(E, 2, 2)
    permute(layer)
    assert value[:, 0].tolist() == list(ORDER)


# B3: what has no row per expert is shared.
def test_tensors_without_a_row_per_expert_are_left_alone(layer):
    shared = {
        "scalar": torch.tensor(3.0),
        "one": torch.ones(1),
        "workspace": torch.arange(7.0),
        "empty": torch.empty(E, 0),
    }
    vars(layer.experts).update(shared)
    before = {name: tensor.clone() for name, tensor in shared.items()}
    permute(layer)
    part = slice_experts(layer.experts, 3, E)
    for name in ("scalar", "one", "workspace"):
        assert torch.equal(getattr(layer.experts, name), before[name])
        assert getattr(part, name) is shared[name]


# B4
def test_expanded_tensor_is_left_alone_and_cut(layer):
    add(layer, torch.tensor([2.5]).expand(E))
    permute(layer)
    assert layer.experts.extra.stride() == (0,)
    assert slice_experts(layer.experts, 3, 5).extra.tolist() == [2.5, 2.5]


def test_rows_with_another_order_inside_are_moved(layer):
    # Columns first within a row, as column-major scales have it.
    value = add(layer, marks(3, 5).transpose(1, 2).contiguous().transpose(1, 2))
    assert not value.is_contiguous()
    permute(layer)
    assert torch.equal(value, marks(3, 5)[list(ORDER)])


def overlapping() -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.zeros(2 * E)
    return memory[:E], memory[E // 2 : E // 2 + E]


REFUSED = {
    "expert axis last": (lambda: torch.zeros(3, E), "other than the first"),
    "expert axis in the middle": (
        lambda: torch.zeros(2, E, 3),
        "other than the first",
    ),
    "strided over experts": (
        lambda: torch.zeros(5, E).t(),
        r"strides \(1, 12\).*not a run of its own",
    ),
    "gaps between rows": (
        lambda: torch.zeros(E, 8)[:, :5],
        r"strides \(8, 1\).*not a run of its own",
    ),
    "rows expanded inside": (
        lambda: torch.zeros(E, 1).expand(E, 4),
        "not a run of its own",
    ),
}


@pytest.mark.parametrize("make, reason", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_placed_is_refused(layer, make, reason):
    add(layer, make())
    scale = layer.w13_weight_scale.clone()
    with pytest.raises(
        ValueError, match=rf"Modular.extra \(.*{reason}.*--expert-layout"
    ):
        permute(layer)
    assert torch.equal(layer.w13_weight_scale, scale), "nothing is moved by halves"


def test_partly_shared_memory_is_refused(layer):
    layer.experts.one, layer.experts.two = overlapping()
    with pytest.raises(ValueError, match="two.*shares part of its memory with.*one"):
        permute(layer)


def test_memory_shared_with_the_rows_is_refused(layer):
    add(layer, layer.w2_weight.data[:, :1])
    with pytest.raises(
        ValueError, match="extra.*shares memory with the layer's expert"
    ):
        permute(layer)


def test_tensors_in_containers_are_refused(layer):
    layer.experts.extra = [torch.ones(E)]
    with pytest.raises(ValueError, match="extra is a list of tensors"):
        permute(layer)
    layer.experts.extra = {"name": torch.ones(3), "other": "text"}
    permute(layer)


def test_objects_that_hold_scales_are_refused(layer):
    layer.quant_method.moe_quant_config._w2.scale = SimpleNamespace(value=1)
    with pytest.raises(ValueError, match="_w2.scale is a SimpleNamespace"):
        permute(layer)


@pytest.mark.parametrize("order", [ORDER[:-1], ORDER[:-1] + (7,), range(E + 1)])
def test_an_order_that_is_no_permutation_is_refused(layer, order):
    with pytest.raises(ValueError, match="layers.0.*is no permutation of its 12"):
        permute_expert_tensors(layer, order, layer.rows)


# B14
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start, stop", [(0, 3), (3, E), (0, E), (5, 6)])
def test_a_cut_has_its_rows_and_the_original_keeps_all(monkeypatch, kind, start, stop):
    TrtLlmGenStub().install(monkeypatch)
    experts = StubLayer(kind).experts
    part = slice_experts(experts, start, stop)
    assert type(part) is type(experts) and part.moe_config is experts.moe_config
    assert (part.local_num_experts, experts.local_num_experts) == (stop - start, E)
    tensors = ["w1_scale", "w2_scale", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"]
    tensors += ["g1_scale_c", "g1_alphas", "g2_alphas"] if kind == "nvfp4" else []
    tensors += ["w1_bias", "w2_bias"] if kind.startswith("mxfp4") else []
    for name in tensors:
        owners = [
            owner if hasattr(owner, name) else owner.quant_config
            for owner in (part, experts)
        ]
        mine, whole = (getattr(owner, name) for owner in owners)
        assert mine.shape[0] == stop - start and whole.shape[0] == E, name
        assert mine.data_ptr() == whole[start].data_ptr(), name
    assert experts.quant_config is not part.quant_config
