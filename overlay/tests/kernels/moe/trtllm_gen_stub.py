# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A stand-in for FlashInfer's routed FP4 and FP8 MoE on the CPU, and layers for it.

It has the kernel's contract, not its arithmetic: windows of expert ids, the launcher's
checks, rows grouped by expert and padded to a tile that depends on the number of local
experts, memory that nobody wrote, and a finalize in slot order. A row's bits depend on
its token and its expert alone.
"""

import ctypes
import enum
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch

from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
    fp8_w8a8_moe_quant_config,
    mxfp4_mxfp8_moe_quant_config,
    mxfp4_w4a16_moe_quant_config,
    nvfp4_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.experts.trtllm_fp8_moe import (
    TrtLlmFp8ExpertsModular,
)
from vllm.model_executor.layers.fused_moe.experts.trtllm_mxfp4_moe import (
    TrtLlmMxfp4ExpertsModular,
)
from vllm.model_executor.layers.fused_moe.experts.trtllm_nvfp4_moe import (
    TrtLlmNvFp4ExpertsModular,
)
from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 12, 3, 128, 128
FP4_KINDS = ("mxfp4", "mxfp4_mxfp8", "nvfp4")
FP8_KINDS = ("fp8_block", "mxfp8")
KINDS = FP4_KINDS + FP8_KINDS
# Whose launches are told where their window of ids begins.
OFFSET_KINDS = ("mxfp4", "mxfp4_mxfp8")

_FP4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
_FP4 = torch.cat((_FP4, -_FP4))

_fmaf = ctypes.CDLL("libm.so.6").fmaf
_fmaf.argtypes = [ctypes.c_float] * 3
_fmaf.restype = ctypes.c_float


class ActivationType(enum.IntEnum):
    """FlashInfer's enumeration, as far as vLLM names it."""

    Gelu = 0
    Silu = 2
    Swiglu = 3
    Geglu = 4
    Relu2 = 6


class Fp8QuantizationType(enum.Enum):
    """FlashInfer's enumeration, as far as vLLM names it."""

    DeepSeekFp8 = enum.auto()
    MxFp8 = enum.auto()


class WeightLayout(enum.Enum):
    """FlashInfer's enumeration, as far as vLLM names it."""

    MajorK = enum.auto()
    BlockMajorK = enum.auto()


def unpack_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Read FP8 rows of one expert, `(N, K)` float32.

    Either `(N, K)` with block scales of 32 elements, or `(K/128, N, 128)` with a scale
    for each block of 128 x 128.
    """
    if weight.dim() == 2:
        scale = block_scales(scale, 32).repeat_interleave(32, dim=1)
        return weight.float() * scale
    rows = weight.float().permute(1, 0, 2).flatten(1)
    return rows * scale.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)


def unpack_fp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Read FP4 rows `(N, K/2)` uint8 with block scales `(N, K/32)` or `(N, K/16)`."""
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    values = _FP4[nibbles.long()]
    block = values.shape[1] // scale.shape[1]
    return values * block_scales(scale, block).repeat_interleave(block, dim=1)


# Block scales lie in tiles of 128 rows and 4 columns: element (row, column) of a tile
# is at row % 32, row // 32, column. The rows of all experts are taken together.
def interleave(scale: torch.Tensor) -> torch.Tensor:
    """Bring scales `(E, N, K)`, one byte each, into the kernel's layout."""
    columns = scale.shape[-1]
    tiles = scale.view(torch.uint8).reshape(-1, 4, 32, columns // 4, 4)
    mixed = tiles.permute(0, 3, 2, 1, 4).reshape(scale.shape)
    return mixed.contiguous().view(scale.dtype)


def straight(scale: torch.Tensor) -> torch.Tensor:
    """Undo `interleave`."""
    columns = scale.shape[-1]
    tiles = scale.view(torch.uint8).reshape(-1, columns // 4, 32, 4, 4)
    rows = tiles.permute(0, 3, 2, 1, 4).reshape(scale.shape)
    return rows.contiguous().view(scale.dtype)


def block_scales(scale: torch.Tensor, block: int) -> torch.Tensor:
    """Read block scales: ue8m0 of 32 elements, or e4m3 of 16."""
    if block == 32:
        return torch.exp2(scale.view(torch.uint8).float() - 127)
    return scale.view(torch.float8_e4m3fn).float()


def finalize(
    rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, hidden: int
) -> torch.Tensor:
    """Sum in slot order, one element at a time, with the C library's fmaf."""
    out = torch.zeros((index.shape[0], hidden), dtype=torch.float32)
    values = rows.float().tolist()
    for token, slots in enumerate(index.tolist()):
        for k, row in enumerate(slots):
            if row < 0:
                continue
            weight = weights[token, k].item()
            for column in range(hidden):
                out[token, column] = _fmaf(
                    weight, values[row][column], out[token, column].item()
                )
    return out.to(rows.dtype)


def finalized(output: UnfinalizedMoEOutput) -> torch.Tensor:
    """Finalize what a consumer would be handed."""
    return finalize(
        output.gemm2_permuted,
        output.expanded_idx_to_permuted_idx,
        output.expert_weights,
        output.gemm2_permuted.shape[1],
    )


@dataclass
class Launch:
    """What one call of the kernel was told.

    Attributes:
        ids: `(M, top_k)`.
        num_experts: E.
        offset: First id of its window.
        local: Ids in its window.
        finalized: Whether it wrote an output.
        lengths: First dimension of what is indexed by expert, by argument.

    """

    ids: torch.Tensor
    num_experts: int
    offset: int
    local: int
    finalized: bool
    lengths: dict[str, int]


Unpack = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class LauncherError(ValueError):
    """What FlashInfer's launcher refuses."""


class TrtLlmGenStub:
    """The kernel, with a record of its launches.

    Attributes:
        launches: One entry a call.
        undefined_weights: Whether an unfinalized call returns weights that nobody
            wrote, as some versions do when they were given.

    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.undefined_weights = False

    def install(self, monkeypatch) -> None:
        """Be the `flashinfer` that is imported."""
        fused_moe = ModuleType("flashinfer.fused_moe")
        core = ModuleType("flashinfer.fused_moe.core")
        flashinfer = ModuleType("flashinfer")
        core.ActivationType = ActivationType
        fused_moe.Fp8QuantizationType = Fp8QuantizationType
        fused_moe.WeightLayout = WeightLayout
        for module in (flashinfer, fused_moe):
            module.trtllm_fp4_block_scale_routed_moe = self.fp4
            module.trtllm_fp8_block_scale_routed_moe = self.fp8
        flashinfer.fused_moe, fused_moe.core = fused_moe, core
        for module in (flashinfer, fused_moe, core):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: "cpu")

    def fp4(
        self,
        *,
        hidden_states,
        hidden_states_scale,
        gemm1_bias,
        gemm2_bias,
        output1_scale_scalar,
        output1_scale_gate_scalar,
        output2_scale_scalar,
        activation_type,
        enable_pdl=None,
        per_token_scale=None,
        **common,
    ):
        x = hidden_states.float() if hidden_states_scale is None else None
        if hidden_states.dtype == torch.uint8:
            x = unpack_fp4(hidden_states, hidden_states_scale)
        elif x is None:
            scale = block_scales(hidden_states_scale, 32)
            x = hidden_states.float() * scale.repeat_interleave(32, dim=1)
        more = {
            "gemm1_bias": gemm1_bias,
            "gemm2_bias": gemm2_bias,
            "output1_scale_scalar": output1_scale_scalar,
            "output1_scale_gate_scalar": output1_scale_gate_scalar,
            "output2_scale_scalar": output2_scale_scalar,
        }
        return self._launch(x, more, unpack_fp4, True, **common)

    def fp8(
        self,
        *,
        hidden_states,
        hidden_states_scale,
        use_shuffled_weight,
        weight_layout,
        fp8_quantization_type,
        **common,
    ):
        blocks = fp8_quantization_type is Fp8QuantizationType.DeepSeekFp8
        layout = WeightLayout.BlockMajorK if blocks else WeightLayout.MajorK
        if weight_layout is not layout or not use_shuffled_weight:
            raise LauncherError(f"{fp8_quantization_type} does not take this layout")
        if blocks:
            if hidden_states_scale.shape != (HIDDEN // 128, len(hidden_states)):
                raise LauncherError("scales of hidden states must be (K/128, M)")
            scale = hidden_states_scale.t().repeat_interleave(128, dim=1)
        else:
            scale = block_scales(hidden_states_scale, 32).repeat_interleave(32, dim=1)
        x = hidden_states.float() * scale
        return self._launch(x, {}, unpack_fp8, not blocks, **common)

    def _launch(
        self,
        x,
        more,
        unpack,
        tiled,
        *,
        topk_ids,
        routing_bias,
        gemm1_weights,
        gemm1_weights_scale,
        gemm1_alpha,
        gemm1_beta,
        gemm1_clamp_limit,
        gemm2_weights,
        gemm2_weights_scale,
        num_experts,
        top_k,
        n_group,
        topk_group,
        intermediate_size,
        local_expert_offset,
        local_num_experts,
        routed_scaling_factor,
        routing_method_type,
        do_finalize,
        output,
        tune_max_num_tokens,
    ):
        """Check a call, compute its rows, and sum them or leave them open.

        Args:
            x: `(M, hidden)` float32.
            more: What else is indexed by expert, by argument.
            unpack: Reads an expert's weights with their scales.
            tiled: Whether block scales lie in tiles.

        The others are FlashInfer's.

        """
        per_expert = more | {
            "gemm1_weights": gemm1_weights,
            "gemm1_weights_scale": gemm1_weights_scale,
            "gemm1_alpha": gemm1_alpha,
            "gemm1_beta": gemm1_beta,
            "gemm1_clamp_limit": gemm1_clamp_limit,
            "gemm2_weights": gemm2_weights,
            "gemm2_weights_scale": gemm2_weights_scale,
        }
        ids, weights = topk_ids
        per_expert = {k: v for k, v in per_expert.items() if v is not None}
        lengths = {name: tensor.shape[0] for name, tensor in per_expert.items()}
        self.launches.append(
            Launch(
                ids.clone(),
                num_experts,
                local_expert_offset,
                local_num_experts,
                do_finalize,
                lengths,
            )
        )
        # The launcher's checks.
        if ids.dtype != torch.int32 or not ids.is_contiguous():
            raise LauncherError("topk_ids must be contiguous int32")
        if ids.shape != weights.shape or ids.shape[1] != top_k:
            raise LauncherError("topk_ids and weights must be (M, top_k)")
        if num_experts % 4:
            raise LauncherError("num_experts must be divisible by 4")
        if not 0 < top_k < num_experts:
            raise LauncherError("num_experts must be greater than top_k")
        if not 0 < local_num_experts <= num_experts:
            raise LauncherError("local_num_experts must be between 1 and num_experts")
        if not 0 <= local_expert_offset <= num_experts - local_num_experts:
            raise LauncherError("expert offset and count must be within valid range")
        for name, length in lengths.items():
            if length != local_num_experts:
                raise LauncherError(f"{name} has {length} rows")
        if routing_bias is not None or routed_scaling_factor is not None:
            raise LauncherError("routes are given: nothing is left to scale or bias")
        if do_finalize == (output is None):
            raise LauncherError("an output goes with finalize, and only with it")

        # Selections of an expert follow one another and fill whole tiles.
        tile = 8 if local_num_experts > 5 else 16
        if tiled:
            for name in ("gemm1_weights_scale", "gemm2_weights_scale"):
                per_expert[name] = straight(per_expert[name])
        rows_of: list[tuple[int, int, int]] = []
        index = torch.full(ids.shape, -1, dtype=torch.int32)
        at = 0
        for expert in range(local_num_experts):
            slots = (ids == expert + local_expert_offset).nonzero().tolist()
            for number, (token, k) in enumerate(slots):
                index[token, k] = at + number
                rows_of.append((at + number, token, expert))
            at += -(-len(slots) // tile) * tile
        rows = torch.full((at + tile, HIDDEN), float("nan"), dtype=torch.bfloat16)
        for row, token, expert in rows_of:
            mine = {name: tensor[expert] for name, tensor in per_expert.items()}
            rows[row] = self._expert_row(x[token], mine, unpack)
        if do_finalize:
            output.copy_(finalize(rows, index, weights, output.shape[1]))
            return [output]
        if self.undefined_weights:
            weights = torch.full_like(weights, float("nan"))
        return [rows, weights.flatten(), index.flatten()]

    @staticmethod
    def _expert_row(
        x: torch.Tensor, mine: dict[str, torch.Tensor], unpack: Unpack
    ) -> torch.Tensor:
        """Both GEMMs of one expert on one token, `(hidden,)`."""
        both = torch.mv(unpack(mine["gemm1_weights"], mine["gemm1_weights_scale"]), x)
        if "gemm1_bias" in mine:
            both = both + mine["gemm1_bias"]
        linear, gate = both.chunk(2)
        if "gemm1_clamp_limit" in mine:
            limit = mine["gemm1_clamp_limit"].item()
            gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
        if "output1_scale_gate_scalar" in mine:
            gate = gate * mine["output1_scale_gate_scalar"]
            linear = linear * mine["output1_scale_scalar"]
        alpha = mine.get("gemm1_alpha", torch.tensor(1.0))
        beta = mine.get("gemm1_beta", torch.tensor(0.0))
        h = (gate * torch.sigmoid(alpha * gate) * (linear + beta)).bfloat16().float()
        out = torch.mv(unpack(mine["gemm2_weights"], mine["gemm2_weights_scale"]), h)
        if "gemm2_bias" in mine:
            out = out + mine["gemm2_bias"]
        if "output2_scale_scalar" in mine:
            out = out * mine["output2_scale_scalar"]
        return out


class StubLayer(torch.nn.Module):
    """What a loaded `RoutedExperts` has, as far as the split layout looks.

    Every expert has other weights, scales, biases and limits.

    Args:
        kind: One of `KINDS`.
        defer: Whether the finalize is left to a consumer.
        clamp: Clamp of expert 0; expert e has `clamp + e / 8`. None for no clamp.
        hidden_unpadded: Width of the output if it is less than `HIDDEN`.
        intermediate: Width between the GEMMs.

    """

    def __init__(
        self,
        kind: str = "mxfp4",
        defer: bool = False,
        clamp: float | None = 0.25,
        hidden_unpadded: int | None = None,
        intermediate: int = INTERMEDIATE,
    ):
        super().__init__()
        self.kind, self.layer_name = kind, "model.layers.0.mlp.experts"
        self.local_num_experts = self.global_num_experts = NUM_EXPERTS
        generator = torch.Generator().manual_seed(3)

        def draw(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(
                low, high, (NUM_EXPERTS, *shape), generator=generator, dtype=torch.uint8
            )

        def floats(*shape: int) -> torch.Tensor:
            return torch.randn((NUM_EXPERTS, *shape), generator=generator)

        def parameter(name: str, value: torch.Tensor) -> torch.Tensor:
            made = torch.nn.Parameter(value, requires_grad=False)
            self.register_parameter(name, made)
            return made

        shapes = {"w13": (2 * intermediate, HIDDEN), "w2": (HIDDEN, intermediate)}
        scales = []
        of_expert = torch.arange(NUM_EXPERTS).view(-1, 1, 1)
        for name, (rows, columns) in shapes.items():
            if kind == "fp8_block":
                weight = floats(columns // 128, rows, 128).to(torch.float8_e4m3fn)
            elif kind == "mxfp8":
                weight = floats(rows, columns).to(torch.float8_e4m3fn)
            else:
                weight = draw(0, 256, rows, columns // 2)
            parameter(f"{name}_weight", weight)
            # An expert's scales are a power of two apart from those of the others.
            if kind == "fp8_block":
                scale = floats(rows // 128, columns // 128).abs() + 0.5
                scale = scale * torch.exp2(of_expert - 10.0)
            elif kind == "nvfp4":
                scale = floats(rows, columns // 16).abs() + 0.5
                scale = (scale * torch.exp2(of_expert - 6.0)).to(torch.float8_e4m3fn)
            else:
                scale = (draw(0, 3, rows, columns // 32) + of_expert + 112).byte()
            scale = scale if kind == "fp8_block" else interleave(scale)
            scales.append(parameter(f"{name}_weight_scale", scale))
        self.register_buffer("_expert_map", None)
        self.e_score_correction_bias = torch.nn.Parameter(floats(), False)

        moe_config = FusedMoEConfig(
            num_experts=NUM_EXPERTS,
            experts_per_token=TOP_K,
            hidden_dim=HIDDEN,
            intermediate_size=2 * intermediate,
            num_local_experts=NUM_EXPERTS,
            num_logical_experts=NUM_EXPERTS,
            activation=MoEActivation.SILU,
            device="cpu",
            routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=FusedMoEParallelConfig(
                **vars(FusedMoEParallelConfig.make_no_parallel()) | {"tp_size": 2}
            ),
            in_dtype=torch.bfloat16,
            hidden_dim_unpadded=hidden_unpadded,
        )
        self.moe_config = moe_config
        if defer:
            moe_config.defer_moe_finalize()
        limits = dict(gemm1_alpha=1.5, gemm1_beta=0.5, gemm1_clamp_limit=clamp)
        if kind == "nvfp4":
            names = ("w13_weight_scale_2", "w2_weight_scale_2", "a2_gscale")
            alphas = [parameter(name, floats().abs() / 4 + 0.125) for name in names]
            # One value for all experts, as stock expands it.
            for name in ("w13_input_scale", "w2_input_scale"):
                parameter(name, torch.tensor(1.5).expand(NUM_EXPERTS))
            config = nvfp4_moe_quant_config(
                alphas[0], alphas[1], torch.ones(1), alphas[2], *scales, **limits
            )
            experts = TrtLlmNvFp4ExpertsModular(moe_config, config)
        elif kind in FP8_KINDS:
            block = [128, 128] if kind == "fp8_block" else [1, 32]
            config = fp8_w8a8_moe_quant_config(*scales, block_shape=block, **limits)
            experts = TrtLlmFp8ExpertsModular(moe_config, config)
        else:
            biases = [
                parameter("w13_bias", floats(2 * intermediate)),
                parameter("w2_bias", floats(HIDDEN)),
            ]
            make = (
                mxfp4_w4a16_moe_quant_config
                if kind == "mxfp4"
                else mxfp4_mxfp8_moe_quant_config
            )
            config = make(
                w1_scale=scales[0],
                w2_scale=scales[1],
                w1_bias=biases[0],
                w2_bias=biases[1],
                **limits,
            )
            experts = TrtLlmMxfp4ExpertsModular(moe_config, config)
        of_expert = torch.arange(NUM_EXPERTS) / 8
        experts.gemm1_alpha += of_expert
        experts.gemm1_beta -= of_expert
        if clamp is not None:
            experts.gemm1_clamp_limit += of_expert
        experts.process_weights_after_loading(self)
        self.quant_method = SimpleNamespace(
            moe_quant_config=config, moe_kernel=SimpleNamespace(fused_experts=experts)
        )

    @property
    def experts(self):
        return self.quant_method.moe_kernel.fused_experts

    @property
    def rows(self) -> dict[str, torch.nn.Parameter]:
        return {name: getattr(self, name) for name in ("w13_weight", "w2_weight")}


def make_routes(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ids and weights `(M, top_k)`: padding, a hole, an expert chosen twice."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand((num_tokens, NUM_EXPERTS), generator=generator)
    weights, ids = scores.topk(TOP_K)
    ids = ids.to(torch.int32)
    if num_tokens > 3:
        ids[1] = -1
        ids[2, 1] = -1
        ids[3, 2] = ids[3, 0]
    return ids, weights


def arguments(
    layer: StubLayer, num_tokens: int, ids: torch.Tensor, weights: torch.Tensor
) -> dict:
    """Arguments of `FusedMoEExpertsModular.apply`, the output full of NaN."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn((num_tokens, HIDDEN), generator=generator)
    scale: torch.Tensor | None = None
    if layer.kind == "mxfp4":
        x = x.bfloat16()
    elif layer.kind in ("mxfp4_mxfp8", "mxfp8"):
        x = x.to(torch.float8_e4m3fn)
        shape = (num_tokens, HIDDEN // 32)
        scale = torch.randint(124, 130, shape, generator=generator, dtype=torch.uint8)
    elif layer.kind == "fp8_block":
        x = x.to(torch.float8_e4m3fn)
        scale = torch.rand((num_tokens, HIDDEN // 128), generator=generator) + 0.25
    else:
        shape = (num_tokens, HIDDEN // 2)
        x = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scale = torch.rand((num_tokens, HIDDEN // 16), generator=generator) + 0.25
        scale = scale.to(torch.float8_e4m3fn)
    width = layer.moe_config.hidden_dim_unpadded or HIDDEN
    return {
        "output": torch.full((num_tokens, width), float("nan"), dtype=torch.bfloat16),
        "hidden_states": x,
        "w1": layer.w13_weight,
        "w2": layer.w2_weight,
        "topk_weights": weights,
        "topk_ids": ids,
        "activation": MoEActivation.SILU,
        "global_num_experts": NUM_EXPERTS,
        "expert_map": None,
        "a1q_scale": scale,
        "a2_scale": None,
        "workspace13": torch.empty(0),
        "workspace2": torch.empty(0),
        "expert_tokens_meta": None,
        "apply_router_weight_on_input": False,
    }
