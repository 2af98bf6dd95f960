# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FlashInfer's trtllm-gen experts on split tensors: a call per part, one finalize.

A call stops after its second GEMM and leaves one row per selection of its part. The
rows of both calls are then summed once, in slot order, as the kernel's own finalize
does, or handed on together to a consumer that finalizes.

FlashInfer chooses tiles by the number of local experts, which a part has fewer of.
Whether a row's bits depend on the tile is not known here: it has to be shown on a GPU
that runs these kernels.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm.model_executor.layers.fused_moe.activation import MoEActivation
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
from vllm.model_executor.layers.fused_moe.pinned_hot.split.finalize import (
    finalize_parts,
    merge_parts,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.parts import (
    check_part_lengths,
    slice_experts,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.split.row_ids import row_ids

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.modular_kernel import (
        FusedMoEExpertsModular,
    )
    from vllm.model_executor.layers.fused_moe.pinned_hot.split.rows import RowOrder
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

_RANGE = "Use --expert-layout range"

# Block scales lie in tiles of as many rows, counted over all experts: an expert whose
# rows do not fill tiles shares one with the next.
_SCALE_TILE_ROWS = 128

# Kernels of the same family that are not run in two calls, and why.
_NOT_IN_TWO_CALLS = {
    "TrtLlmBf16ExpertsModular": (
        "its apply() cannot stop before the finalize, and stock runs it with expert "
        "parallelism only"
    ),
    "TrtLlmBf16LoRAExperts": "it adds LoRA rows between its GEMMs",
    "TrtLlmMxfp4ExpertsMonolithic": "it routes inside the kernel, by expert id",
    "TrtLlmNvFp4ExpertsMonolithic": "it routes inside the kernel, by expert id",
    "TrtLlmFp8ExpertsMonolithic": "it routes inside the kernel, by expert id",
    "TrtLlmBf16ExpertsMonolithic": "it routes inside the kernel, by expert id",
    "TrtLlmMxint4ExpertsMonolithic": "it routes inside the kernel, by expert id",
}


@dataclass(frozen=True)
class _Tokens:
    """What a launch works on besides a part; see `FusedMoEExpertsModular.apply`.

    Attributes:
        hidden_states: `(M, …)`, quantized or not.
        scale: Scales of quantized hidden states, rows per token, or None.
        weights: Routing weights `(M, top_k)`.
        activation: The layer's activation.
        num_experts: E.

    """

    hidden_states: torch.Tensor
    scale: torch.Tensor | None
    weights: torch.Tensor
    activation: MoEActivation
    num_experts: int

    def slice(self, start: int, stop: int) -> "_Tokens":
        return _Tokens(
            self.hidden_states[start:stop],
            None if self.scale is None else self.scale[start:stop],
            self.weights[start:stop],
            self.activation,
            self.num_experts,
        )


@dataclass(frozen=True)
class _Part:
    """Some rows of a layer and how a launch selects them.

    Attributes:
        experts: Experts object of these rows alone.
        w1: `(H, …)` rows of the gate and up projection.
        w2: `(H, …)` rows of the down projection.
        row_map: Expert to the id that the launch is given, int32 `(E,)`.
        offset: First id that is a row of this part; the rows are the ids from there on.

    """

    experts: Any
    w1: torch.Tensor
    w2: torch.Tensor
    row_map: torch.Tensor
    offset: int

    @property
    def num_rows(self) -> int:
        return self.w1.shape[0]


def _launch_mxfp4(
    part: _Part, tokens: _Tokens, ids: torch.Tensor
) -> UnfinalizedMoEOutput | None:
    if tokens.scale is None and tokens.hidden_states.dtype != torch.bfloat16:
        raise ValueError(
            f"{type(part.experts).__name__} takes bfloat16 hidden states without "
            f"scales, not {tokens.hidden_states.dtype}"
        )
    return part.experts._invoke_kernel(
        None,
        tokens.hidden_states,
        None if tokens.scale is None else tokens.scale.view(torch.float8_e4m3fn),
        ids,
        tokens.weights,
        part.w1,
        part.w2,
        tokens.activation,
        tokens.num_experts,
        part.num_rows,
        part.offset,
        ids.shape[1],
    )


def _launch_nvfp4(
    part: _Part, tokens: _Tokens, ids: torch.Tensor
) -> UnfinalizedMoEOutput | None:
    return part.experts._invoke_kernel(
        None,
        tokens.hidden_states,
        part.w1,
        part.w2,
        tokens.weights,
        ids,
        tokens.activation,
        tokens.num_experts,
        tokens.scale,
    )


def _launch_fp8(
    part: _Part, tokens: _Tokens, ids: torch.Tensor
) -> UnfinalizedMoEOutput | None:
    nothing = tokens.hidden_states.new_empty(0)
    return part.experts.apply(
        output=nothing,
        hidden_states=tokens.hidden_states,
        w1=part.w1,
        w2=part.w2,
        topk_weights=tokens.weights,
        topk_ids=ids,
        activation=tokens.activation,
        global_num_experts=tokens.num_experts,
        expert_map=None,
        a1q_scale=tokens.scale,
        a2_scale=None,
        workspace13=nothing,
        workspace2=nothing,
        expert_tokens_meta=None,
        apply_router_weight_on_input=False,
    )


def _always_defer(experts: Any) -> None:
    """Let `apply` leave every finalize to its caller."""
    config = copy.copy(experts.moe_config)
    config.should_defer_moe_finalize = lambda num_tokens: True
    experts.moe_config = config


@dataclass(frozen=True)
class _Family:
    """How an experts class is called.

    Attributes:
        launch: Calls a part's kernel up to its second GEMM.
        max_tokens: Tokens of one launch of the unsplit layer, from the experts object,
            top_k and E.
        takes_offset: Whether a launch can be told its window of ids. Otherwise the
            window begins at 0 and the ids are rotated so that a part's rows lie there.
        per_expert: What the kernel indexes by expert, by name.
        tiled_scales: Whether block scales lie in tiles of rows.
        leave_open: Makes a part's experts object stop after its second GEMM, where a
            launch cannot be asked to.

    """

    launch: Callable[[_Part, _Tokens, torch.Tensor], UnfinalizedMoEOutput | None]
    max_tokens: Callable[[Any, int, int], int]
    takes_offset: bool
    per_expert: Callable[[Any], dict[str, torch.Tensor | None]]
    tiled_scales: Callable[[Any], bool] = lambda experts: True
    leave_open: Callable[[Any], None] = lambda experts: None


def _limits(experts: Any) -> dict[str, torch.Tensor | None]:
    names = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
    return {name: getattr(experts, name) for name in names}


_FAMILIES: dict[type, _Family] = {
    TrtLlmMxfp4ExpertsModular: _Family(
        launch=_launch_mxfp4,
        max_tokens=lambda experts, top_k, num_experts: experts._max_supported_tokens(
            top_k, num_experts
        ),
        takes_offset=True,
        per_expert=lambda experts: {
            "w1_scale": experts.w1_scale,
            "w2_scale": experts.w2_scale,
            "w1_bias": experts.w1_bias,
            "w2_bias": experts.w2_bias,
            **_limits(experts),
        },
    ),
    TrtLlmNvFp4ExpertsModular: _Family(
        launch=_launch_nvfp4,
        max_tokens=lambda experts, top_k, num_experts: experts._get_chunk_size(),
        takes_offset=False,
        per_expert=lambda experts: {
            "w1_scale": experts.w1_scale,
            "w2_scale": experts.w2_scale,
            "g1_scale_c": experts.g1_scale_c,
            "g1_alphas": experts.quant_config.g1_alphas,
            "g2_alphas": experts.quant_config.g2_alphas,
            **_limits(experts),
        },
    ),
    TrtLlmFp8ExpertsModular: _Family(
        launch=_launch_fp8,
        max_tokens=lambda experts, top_k, num_experts: sys.maxsize,
        takes_offset=False,
        per_expert=lambda experts: {
            "w1_scale": experts.w1_scale,
            "w2_scale": experts.w2_scale,
            **_limits(experts),
        },
        # MXFP8's do; blocks of 128 x 128 have a plain scale each.
        tiled_scales=lambda experts: experts.quant_config.block_shape == [1, 32],
        leave_open=_always_defer,
    ),
}

TRTLLM_KERNELS = tuple(cls.__name__ for cls in _FAMILIES)
"""Experts classes that `TrtLlmSplit` runs."""


def why_not_two_calls(kernel: str) -> str | None:
    """Why an experts class of the family is not run in two calls, or None.

    Args:
        kernel: Name of the class.

    """
    if kernel in TRTLLM_KERNELS:
        return None
    reason = _NOT_IN_TWO_CALLS.get(kernel, "it was not looked at")
    return (
        f"{kernel} is not run in two calls: {reason} (run: "
        f"{', '.join(TRTLLM_KERNELS)}). {_RANGE}"
    )


def why_not_trtllm(layer: "RoutedExperts") -> str | None:
    """Why a layer on one of `TRTLLM_KERNELS` cannot be served, or None.

    Args:
        layer: The layer; its weights need not be loaded.

    """
    parallel = layer.moe_config.moe_parallel_config
    if parallel.ep_size > 1 or parallel.enable_eplb:
        return (
            "expert parallelism and its load balancing give a rank some experts only, "
            "and the windows of ids are taken by the two parts. Drop "
            "--enable-expert-parallel and --enable-eplb"
        )
    if layer.local_num_experts != layer.global_num_experts:
        return (
            f"it has {layer.local_num_experts} of {layer.global_num_experts} experts "
            "and the kernel's windows of ids are taken by the two parts. "
            f"{_RANGE}"
        )
    return None


class TrtLlmSplit:
    """Runs trtllm-gen experts whose rows lie in two parts.

    Args:
        experts: The layer's experts object, its small tensors in row order.
        order: The layer's rows.
        w1: Hot rows `(H, …)` and cold rows `(E-H, …)` of the gate and up projection.
        w2: The same of the down projection.

    Raises:
        ValueError: The class is not served, or a tensor has not one row per expert.

    """

    def __init__(
        self,
        experts: "FusedMoEExpertsModular",
        order: "RowOrder",
        w1: tuple[torch.Tensor, torch.Tensor],
        w2: tuple[torch.Tensor, torch.Tensor],
    ):
        if reason := why_not_two_calls(type(experts).__name__):
            raise ValueError(reason)
        self.experts: Any = experts
        self.family = _FAMILIES[type(experts)]
        for name in ("w1_scale", "w2_scale"):
            shape = tuple(getattr(self.experts, name).shape)
            where = f"{type(experts).__name__}.{name} {shape}"
            if len(shape) != 3:
                raise ValueError(
                    f"{where}: block scales are expected to be a matrix per expert, to "
                    f"follow its row. {_RANGE}"
                )
            if self.family.tiled_scales(experts) and shape[1] % _SCALE_TILE_ROWS:
                raise ValueError(
                    f"{where}: block scales lie in tiles of {_SCALE_TILE_ROWS} rows, "
                    "and those of an expert must fill whole tiles to follow its row. "
                    f"{_RANGE}"
                )
        rows = order.row_map(w1[0].device)
        num_hot = order.num_hot
        self.parts: list[_Part] = []
        for start, stop, part_w1, part_w2 in (
            (0, num_hot, w1[0], w2[0]),
            (num_hot, order.num_rows, w1[1], w2[1]),
        ):
            if start == stop:
                continue
            sliced = slice_experts(experts, start, stop)
            self.family.leave_open(sliced)
            check_part_lengths(
                sliced,
                {"w1": part_w1, "w2": part_w2} | self.family.per_expert(sliced),
                stop - start,
            )
            if self.family.takes_offset or start == 0:
                part = _Part(sliced, part_w1, part_w2, rows, start)
            else:
                rotated = (rows - start) % order.num_rows
                part = _Part(sliced, part_w1, part_w2, rotated, 0)
            self.parts.append(part)

    def __call__(
        self,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        a1q_scale: torch.Tensor | None,
        **arguments: Any,
    ) -> UnfinalizedMoEOutput | None:
        """Compute the layer; see `FusedMoEExpertsModular.apply`.

        Returns:
            The rows of both parts where the layer leaves the finalize to its consumer;
            otherwise None, and `output` is written.

        """
        tokens = _Tokens(
            hidden_states, a1q_scale, topk_weights, activation, global_num_experts
        )
        num_tokens, top_k = topk_ids.shape
        # One map for both parts, or one for each.
        maps = {id(part.row_map): part.row_map for part in self.parts}
        ids = {key: row_ids(topk_ids, row_map) for key, row_map in maps.items()}
        step = self.family.max_tokens(self.experts, top_k, global_num_experts)
        if step >= num_tokens and self.experts.moe_config.should_defer_moe_finalize(
            num_tokens
        ):
            return merge_parts(self._launch(tokens, ids, 0, num_tokens), topk_weights)
        for start in range(0, num_tokens, step):
            stop = min(start + step, num_tokens)
            self._finalize(
                self._launch(tokens, ids, start, stop),
                topk_weights[start:stop],
                output[start:stop],
            )
        return None

    def _launch(
        self, tokens: _Tokens, ids: dict[int, torch.Tensor], start: int, stop: int
    ) -> list[UnfinalizedMoEOutput]:
        """Call every part's kernel on some tokens."""
        some = tokens.slice(start, stop)
        outputs = []
        for part in self.parts:
            output = self.family.launch(part, some, ids[id(part.row_map)][start:stop])
            assert output is not None
            outputs.append(output)
        return outputs

    @staticmethod
    def _finalize(
        outputs: list[UnfinalizedMoEOutput], weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        first, *second = outputs
        other = second[0] if second else None
        finalize_parts(
            first.gemm2_permuted,
            None if other is None else other.gemm2_permuted,
            first.expanded_idx_to_permuted_idx,
            None if other is None else other.expanded_idx_to_permuted_idx,
            weights,
            out,
        )


class TrtLlmRows:
    """Runs trtllm-gen experts in one call on weights in row order.

    The call has as many local experts as that of the unsplit layer, and so the same
    tiles. Nothing is summed apart, so any modular class of the family is served.

    Args:
        experts: The layer's experts object, its small tensors in row order.
        row_map: Expert to row, int32 `(E,)`.

    """

    def __init__(self, experts: "FusedMoEExpertsModular", row_map: torch.Tensor):
        self.experts = experts
        self.row_map = row_map

    def __call__(
        self, *, topk_ids: torch.Tensor, **arguments: Any
    ) -> UnfinalizedMoEOutput | None:
        """Compute the layer; see `FusedMoEExpertsModular.apply`."""
        ids = row_ids(topk_ids, self.row_map)
        return self.experts.apply(topk_ids=ids, **arguments)
