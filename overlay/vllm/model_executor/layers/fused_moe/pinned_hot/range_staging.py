# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Large batches on ranges: cold pages are copied to HBM once, and read there.

A kernel reads an expert's row again for every block of its tokens, and no cache of the
GPU keeps host memory. So a batch with many tokens would cross the link several times
for one row. For such batches every range has a twin: another range that shares its hot
pages and has HBM where those are cold. The pages that a batch needs are copied there,
and the same kernel runs on the twin: the same shapes, strides and bytes, so the same
results.

The HBM behind the twins' cold pages is shared by all layers: a copy for one layer runs
after the kernels of the layer before, since both are on the same stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.model_executor.layers.fused_moe.pinned_hot.device_backing import DeviceBacking
from vllm.model_executor.layers.fused_moe.pinned_hot.device_range import DeviceMemory
from vllm.model_executor.layers.fused_moe.pinned_hot.needed_rows import flag_rows
from vllm.model_executor.layers.fused_moe.pinned_hot.placement import (
    PageMask,
    RowTensor,
)
from vllm.triton_utils import tl, triton

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.modular_kernel import (
        FusedMoEExpertsModular,
    )
    from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput

_BLOCK = 1024
_PROGRAMS_PER_PAGE = 4


@triton.jit
def _stage_pages_kernel(
    needed_ptr,  # (num_experts,) int32
    pages_ptr,  # (num_cold_pages,) int32, pages of the range
    home_ptr,  # the range, host memory where it is cold
    twin_ptr,  # its twin, written
    num_experts,
    row_bytes,
    PAGE_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    page = tl.load(pages_ptr + tl.program_id(0)).to(tl.int64)
    first = page * PAGE_BYTES // row_bytes
    last = tl.minimum(((page + 1) * PAGE_BYTES - 1) // row_bytes, num_experts - 1)
    wanted = 0
    for expert in range(first, last + 1):
        wanted += tl.load(needed_ptr + expert)
    if wanted != 0:
        words: tl.constexpr = PAGE_BYTES // 8
        home = home_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + page * words
        twin = twin_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + page * words
        for start in range(tl.program_id(1) * BLOCK, words, tl.num_programs(1) * BLOCK):
            word = start + tl.arange(0, BLOCK)
            tl.store(twin + word, tl.load(home + word))


def stage_pages(
    needed: torch.Tensor,
    pages: torch.Tensor,
    home: torch.Tensor,
    twin: torch.Tensor,
    row_bytes: int,
    page_bytes: int,
) -> None:
    """Copy the pages of a range that carry a byte of a row that is needed.

    Args:
        needed: `(E,)` int32, 0 for rows that are not.
        pages: `(num_pages,)` int32, which of the range's pages to look at.
        home: `(E, …)` tensor at the beginning of the range.
        twin: The same of its twin, written.
        row_bytes: Bytes of an expert's row.
        page_bytes: Bytes of a page, whole blocks of 8 KiB.

    """
    if len(pages):
        _stage_pages_kernel[(len(pages), _PROGRAMS_PER_PAGE)](
            needed,
            pages,
            home,
            twin,
            len(needed),
            row_bytes,
            PAGE_BYTES=page_bytes,
            BLOCK=_BLOCK,
        )


class PagePool:
    """Pages of HBM for the cold pages of whatever layer runs."""

    def __init__(self, backing: DeviceBacking, num_pages: int):
        self.pages = [
            DeviceMemory(backing.device, backing.page_bytes) for _ in range(num_pages)
        ]


@dataclass(frozen=True)
class StagedTensor:
    """A range that has a twin.

    Attributes:
        home: `(E, …)`, cold rows in host memory.
        twin: The same in HBM, for rows that were staged.
        pages: `(num_cold_pages,)` int32 on the device: the cold ones of the range.
        row_bytes: Bytes of an expert's row.

    """

    home: torch.Tensor
    twin: torch.Tensor
    pages: torch.Tensor
    row_bytes: int


class RangeStaging:
    """Runs a layer in place, or for large batches on twins of its ranges.

    Args:
        experts: The layer's kernel.
        tensors: Geometry of its two weight tensors.
        homes: Their ranges.
        masks: Hot pages of the ranges.
        backing: Made the ranges.
        pool: As many pages as are cold, or more.
        tokens: Tokens of a batch from which on rows are staged.

    Raises:
        DriverError: The twins cannot be mapped.

    """

    def __init__(
        self,
        experts: "FusedMoEExpertsModular",
        tensors: Sequence[RowTensor],
        homes: Sequence[torch.Tensor],
        masks: Sequence[PageMask],
        backing: DeviceBacking,
        pool: PagePool,
        tokens: int,
    ):
        self.experts = experts
        self.pool = pool  # for layers that come later
        self.tokens = tokens
        self.page_bytes = backing.page_bytes
        device = homes[0].device
        num_experts = tensors[0].num_rows
        self.row_map = torch.arange(num_experts, dtype=torch.int32, device=device)
        self.needed = torch.zeros_like(self.row_map)
        # One iterator: the layer's tensors are staged at the same time.
        pages = iter(pool.pages)
        self.staged = [
            StagedTensor(
                home,
                backing.twin(home, mask, pages),
                torch.tensor(np.flatnonzero(~mask), dtype=torch.int32, device=device),
                tensor.row_bytes,
            )
            for tensor, home, mask in zip(tensors, homes, masks, strict=True)
        ]

    def __call__(
        self,
        *,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
        **arguments: Any,
    ) -> "UnfinalizedMoEOutput | None":
        if len(topk_ids) >= self.tokens:
            flag_rows(topk_ids, self.row_map, 0, self.needed)
            for staged in self.staged:
                stage_pages(
                    self.needed,
                    staged.pages,
                    staged.home,
                    staged.twin,
                    staged.row_bytes,
                    self.page_bytes,
                )
            w1, w2 = (staged.twin for staged in self.staged)
        return self.experts.apply(w1=w1, w2=w2, topk_ids=topk_ids, **arguments)
