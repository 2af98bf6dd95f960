# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One call of a kernel after the cold rows it needs were copied behind the hot ones.

Every cold row has its own place there, so the map from experts to rows never changes
and no row is sought. The places are shared by all layers: a copy for one layer runs
after the kernels of the layer before, since both are on the same stream.
"""

from collections.abc import Sequence
from typing import Any

import torch

from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput
from vllm.model_executor.layers.fused_moe.pinned_hot.layout import RunExperts
from vllm.triton_utils import tl, triton

_WORD = torch.int64
_BLOCK = 1024
# A few programs keep the link busy; more share the rows when one row is wanted.
_PROGRAMS_PER_ROW = 16


# Nothing of a batch is specialized on: no step after warm-up may compile.
@triton.jit(
    do_not_specialize=["num_ids"], do_not_specialize_on_alignment=["topk_ids_ptr"]
)
def _flag_cold_rows_kernel(
    topk_ids_ptr,  # (num_ids,) expert ids, -1 or out of range = none
    row_map_ptr,  # (num_experts,) int32 expert to row
    needed_ptr,  # (num_experts - num_hot,) int32, written
    num_ids,
    num_experts,
    num_hot,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    for start in range(0, num_experts - num_hot, BLOCK):
        cold = start + lane
        zeros = tl.zeros((BLOCK,), dtype=tl.int32)
        tl.store(needed_ptr + cold, zeros, mask=cold < num_experts - num_hot)
    # One program: the zeros are written before any flag is.
    tl.debug_barrier()
    for start in range(0, num_ids, BLOCK):
        slot = start + lane
        expert = tl.load(topk_ids_ptr + slot, mask=slot < num_ids, other=-1)
        valid = (expert >= 0) & (expert < num_experts)
        row = tl.load(row_map_ptr + tl.where(valid, expert, 0), mask=valid, other=0)
        ones = tl.full((BLOCK,), 1, dtype=tl.int32)
        tl.store(needed_ptr + row - num_hot, ones, mask=valid & (row >= num_hot))


@triton.jit
def _stage_rows_kernel(
    needed_ptr,  # (num_cold,) int32
    cold_ptr,  # (num_cold, row_words) int64, host memory
    staged_ptr,  # (num_cold, row_words) int64, written
    row_words,
    BLOCK: tl.constexpr,
):
    cold = tl.program_id(0)
    if tl.load(needed_ptr + cold) != 0:
        row = cold.to(tl.int64) * row_words
        step = tl.num_programs(1) * BLOCK
        for start in range(tl.program_id(1) * BLOCK, row_words, step):
            word = start + tl.arange(0, BLOCK)
            mask = word < row_words
            words = tl.load(cold_ptr + row + word, mask=mask)
            tl.store(staged_ptr + row + word, words, mask=mask)


def as_words(rows: torch.Tensor) -> torch.Tensor:
    """View contiguous rows `(C, …)` as `(C, row_words)` int64.

    Raises:
        ValueError: A row is not a whole number of words.

    """
    flat = rows.reshape(len(rows), -1).view(torch.uint8)
    if flat.shape[1] % _WORD.itemsize:
        raise ValueError(
            f"rows of {flat.shape[1]} bytes are no multiple of {_WORD.itemsize}"
        )
    return flat.view(_WORD)


class Staging:
    """Copies of a layer's cold rows, made when a batch needs them.

    Args:
        row_map: `(E,)` int32, expert to row.
        num_hot: Rows below are hot, H.
        pairs: For each expert tensor its cold rows and their places, both
            `(E-H, …)`.

    """

    def __init__(
        self,
        row_map: torch.Tensor,
        num_hot: int,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ):
        self.row_map = row_map
        self.num_hot = num_hot
        self.num_cold = len(row_map) - num_hot
        if self.num_cold:
            self.pairs = [(as_words(cold), as_words(staged)) for cold, staged in pairs]
            shape = (self.num_cold,)
            self.needed = torch.zeros(shape, dtype=torch.int32, device=row_map.device)

    def stage(self, topk_ids: torch.Tensor) -> None:
        """Copy the cold rows that some expert ids `(M, top_k)` select."""
        if self.num_cold == 0:
            return
        _flag_cold_rows_kernel[(1,)](
            topk_ids,
            self.row_map,
            self.needed,
            topk_ids.numel(),
            len(self.row_map),
            self.num_hot,
            BLOCK=_BLOCK,
        )
        for cold, staged in self.pairs:
            _stage_rows_kernel[(self.num_cold, _PROGRAMS_PER_ROW)](
                self.needed, cold, staged, cold.shape[1], BLOCK=_BLOCK
            )


class Staged:
    """Runs a layer after the cold rows that it needs were staged.

    Args:
        staging: The layer's cold rows.
        run: Runs it on hot and staged rows.

    """

    def __init__(self, staging: Staging, run: RunExperts):
        self.staging = staging
        self.run = run

    def __call__(
        self, *, topk_ids: torch.Tensor, **arguments: Any
    ) -> UnfinalizedMoEOutput | None:
        self.staging.stage(topk_ids)
        return self.run(topk_ids=topk_ids, **arguments)
