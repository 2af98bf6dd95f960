# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""trtllm-gen experts on split tensors on a GPU that has these kernels.

The two claims are apart, since FlashInfer chooses tiles by the number of local experts:
the rows of the second GEMM, and their sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.moe.expert_provider_utils import (
    LAYER_NAMES,
    build_layer,
    engine_config,
    fill,
    routes,
    single_rank,
    write_model,
)
from tests.kernels.moe.pinned_hot_kinds import fp8, modelopt, mxfp4
from vllm.model_executor.layers.fused_moe.experts.trtllm_fp8_moe import (
    TrtLlmFp8ExpertsModular,
)
from vllm.model_executor.layers.fused_moe.experts.trtllm_mxfp4_moe import (
    TrtLlmMxfp4ExpertsModular,
)
from vllm.model_executor.layers.fused_moe.experts.trtllm_nvfp4_moe import (
    TrtLlmNvFp4ExpertsModular,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.finalize import (
    finalize_parts,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.parts import (
    permute_expert_tensors,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.rows import RowOrder
from vllm.model_executor.layers.fused_moe.pinned_hot.split.trtllm_gen import (
    TrtLlmRows,
    TrtLlmSplit,
)
from vllm.platforms import current_platform
from vllm.utils.flashinfer import has_flashinfer
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor


def why_not_here() -> str | None:
    if (
        not current_platform.is_cuda()
        or not current_platform.is_device_capability_family(100)
    ):
        return "needs an sm_100 GPU"
    return None if has_flashinfer() else "needs FlashInfer"


pytestmark = [
    pytest.mark.sm100,
    pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here())),
]

TOKENS = (1, 2, 8, 16, 64, 300, 1024)
# The last is the shape of the model the layout was first used for, 6.3 GiB a layer.
SHAPES = {
    "small": {"experts": 32, "top_k": 4, "hidden": 1024, "intermediate": 768},
    "reference": {"experts": 384, "top_k": 6, "hidden": 5120, "intermediate": 2304},
}


@dataclass(frozen=True)
class Kind:
    """A checkpoint's quantization, `--moe-backend`, and the class that it runs on."""

    quant_config: Callable[[], Any]
    backend: str
    experts: type


KINDS = {
    "mxfp4": Kind(
        partial(mxfp4, "Mxfp4Config"), "flashinfer_trtllm", TrtLlmMxfp4ExpertsModular
    ),
    "mxfp4_mxfp8": Kind(
        partial(mxfp4, "Mxfp4Config"),
        "flashinfer_trtllm_afp8",
        TrtLlmMxfp4ExpertsModular,
    ),
    "nvfp4": Kind(
        partial(modelopt, "NVFP4"), "flashinfer_trtllm", TrtLlmNvFp4ExpertsModular
    ),
    "fp8_block": Kind(
        partial(fp8, block=[128, 128]), "flashinfer_trtllm", TrtLlmFp8ExpertsModular
    ),
    "mxfp8": Kind(
        partial(modelopt, "MXFP8"), "flashinfer_trtllm", TrtLlmFp8ExpertsModular
    ),
}


def always_defer(experts, patch) -> None:
    """Leave the finalize of every call to its consumer."""
    patch.setattr(
        experts.moe_config, "should_defer_moe_finalize", lambda num_tokens: True
    )


class Sm100Layer:
    """A loaded layer on its modular kernel, and the arguments of its calls."""

    def __init__(self, shape: dict[str, int], config):
        kind = KINDS[config.kind]
        quant_config = kind.quant_config()
        quant_config.packed_modules_mapping = {}
        self.layer = layer = build_layer(
            LAYER_NAMES[0],
            torch.bfloat16,
            shape["experts"],
            shape["top_k"],
            shape["hidden"],
            shape["intermediate"],
            quant_config=quant_config,
        )
        fill(layer)
        # Whatever stock prefers: rows are chosen by ids.
        layer.quant_method.experts_cls = kind.experts
        layer.quant_method.process_weights_after_loading(layer)
        experts = layer.quant_method.moe_kernel.fused_experts
        assert type(experts) is kind.experts
        # Every expert has its own values.
        offsets = torch.arange(shape["experts"]) / shape["experts"]
        for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"):
            if getattr(experts, name) is not None:
                getattr(experts, name).add_(offsets.to(getattr(experts, name).device))
        self.experts = experts
        self.rows = {n: getattr(layer, n) for n in ("w13_weight", "w2_weight")}

    def calls(self, monkeypatch) -> list[dict]:
        """Arguments that the kernel gives its experts, for each batch size."""
        seen: list[dict] = []

        def apply(**arguments):
            seen.append(
                {
                    name: value.clone()
                    if isinstance(value, torch.Tensor) and name not in ("w1", "w2")
                    else value
                    for name, value in arguments.items()
                }
            )
            return stock(**arguments)

        stock = self.experts.apply
        monkeypatch.setattr(self.experts, "apply", apply)
        for number, num_tokens in enumerate(TOKENS):
            x, weights, ids = routes(self.layer, num_tokens, seed=number)
            if num_tokens > 3:
                # Padding, a hole, and an expert that is selected twice.
                ids[1], ids[2, 1], ids[3, 2] = -1, -1, ids[3, 0]
            self.layer.forward_modular(x, weights, ids)
        monkeypatch.undo()
        return seen

    def unfinalized(self, call: dict, monkeypatch):
        """The unsplit layer's rows, before they are summed."""
        with monkeypatch.context() as patch:
            always_defer(self.experts, patch)
            return self.experts.apply(**call)

    def split(self, num_hot: int) -> TrtLlmSplit:
        """Take the layer apart: cold rows in pinned host memory."""
        num_experts = self.layer.local_num_experts
        ranking = tuple((7 * e + 5) % num_experts for e in range(num_experts))
        order = RowOrder(ranking, num_hot)
        permute_expert_tensors(self.layer, order.experts, self.rows)
        self.pinned, parts = [], []
        for row in self.rows.values():
            cold = row.data[list(order.cold)].cpu().pin_memory()
            assert cold.is_pinned()
            self.pinned.append(cold)
            view = (
                get_accelerator_view_from_cpu_tensor(cold)
                if len(cold)
                else row.data[:0].clone()
            )
            parts.append((row.data[list(order.hot)].clone(), view))
        return TrtLlmSplit(self.experts, order, *parts)


@pytest.fixture(params=KINDS)
def config(request, tmp_path):
    model = write_model(tmp_path / "model", num_hidden_layers=1)
    backend = KINDS[request.param].backend
    made = engine_config(model, dtype="bfloat16", moe_backend=backend)
    with single_rank(made, tmp_path):
        yield SimpleNamespace(kind=request.param)


def hot_counts(shape: dict[str, int]) -> tuple[int, ...]:
    if shape is SHAPES["reference"]:
        return (295,)
    return (0, 1, 7, shape["experts"] - 1, shape["experts"])


CASES = [
    pytest.param(shape, num_hot, id=f"{name}-{num_hot}")
    for name, shape in SHAPES.items()
    for num_hot in hot_counts(shape)
]


def prepared(config, shape, num_hot, monkeypatch):
    """Stock's outputs and rows for every batch, then the same layer split."""
    layer = Sm100Layer(shape, config)
    calls = layer.calls(monkeypatch)
    outputs, rows = [], []
    for call in calls:
        output = torch.full_like(call["output"], float("nan"))
        layer.experts.apply(**call | {"output": output})
        outputs.append(output)
        rows.append(layer.unfinalized(call, monkeypatch))
    run = layer.split(num_hot)
    return SimpleNamespace(
        layer=layer, calls=calls, outputs=outputs, rows=rows, run=run
    )


# D7: the tile depends on the number of local experts.
@pytest.mark.parametrize("shape, num_hot", CASES)
def test_rows_of_the_second_gemm_equal(config, shape, num_hot, monkeypatch):
    made = prepared(config, shape, num_hot, monkeypatch)
    always_defer(made.layer.experts, monkeypatch)
    for call, stock in zip(made.calls, made.rows, strict=True):
        merged = made.run(**call)
        ours, theirs = (found.expanded_idx_to_permuted_idx for found in (merged, stock))
        # D2: every selection was computed, once.
        assert torch.equal(ours >= 0, call["topk_ids"] >= 0)
        assert torch.equal(theirs >= 0, ours >= 0)
        some = ours >= 0
        assert torch.equal(
            merged.gemm2_permuted[ours[some].long()],
            stock.gemm2_permuted[theirs[some].long()],
        ), f"{len(call['topk_ids'])} tokens"
        assert torch.equal(merged.expert_weights, call["topk_weights"])


@pytest.mark.parametrize("shape, num_hot", CASES)
def test_outputs_equal(config, shape, num_hot, monkeypatch):
    made = prepared(config, shape, num_hot, monkeypatch)
    for call, expected in zip(made.calls, made.outputs, strict=True):
        output = torch.full_like(expected, float("nan"))
        assert made.run(**call | {"output": output}) is None
        assert torch.equal(output, expected), f"{len(output)} tokens"


def test_finalize_equals_the_kernels_own(config, monkeypatch):
    """The same rows summed by FlashInfer and by the one kernel for two parts."""
    made = prepared(config, SHAPES["small"], 7, monkeypatch)
    for call, expected, rows in zip(made.calls, made.outputs, made.rows, strict=True):
        output = torch.full_like(expected, float("nan"))
        finalize_parts(
            rows.gemm2_permuted,
            None,
            rows.expanded_idx_to_permuted_idx,
            None,
            call["topk_weights"],
            output,
        )
        assert torch.equal(output, expected), f"{len(output)} tokens"


# D3: the sum waits for both calls, in a graph too.
def test_graph_replays_equal(config, monkeypatch):
    made = prepared(config, SHAPES["small"], 7, monkeypatch)
    for call, expected in zip(made.calls[:5], made.outputs[:5], strict=True):
        output = torch.empty_like(expected)
        given = call | {"output": output}
        made.run(**given)
        torch.accelerator.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made.run(**given)
        for _ in range(200):
            output.fill_(float("nan"))
            graph.replay()
            assert torch.equal(output, expected)


def test_one_call_in_row_order_equals(config, monkeypatch):
    """What the staged mode runs: as many local experts as the unsplit layer."""
    layer = Sm100Layer(SHAPES["small"], config)
    calls = layer.calls(monkeypatch)
    outputs = []
    for call in calls:
        outputs.append(torch.full_like(call["output"], float("nan")))
        layer.experts.apply(**call | {"output": outputs[-1]})
    num_experts = layer.layer.local_num_experts
    order = RowOrder(tuple((7 * e + 5) % num_experts for e in range(num_experts)), 7)
    permute_expert_tensors(layer.layer, order.experts, layer.rows)
    for row in layer.rows.values():
        row.data.copy_(row.data[list(order.experts)].clone())
    row_map = order.row_map(layer.rows["w13_weight"].device)
    run = TrtLlmRows(layer.experts, row_map)
    for call, expected in zip(calls, outputs, strict=True):
        output = torch.full_like(expected, float("nan"))
        run(**call | {"output": output})
        assert torch.equal(output, expected), f"{len(output)} tokens"
