# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ranges for CUDA: hot pages in HBM, cold pages in host memory the GPU reads."""

import functools
import importlib.util

import torch

from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.expert_weight_provider import format_bytes
from vllm.model_executor.layers.fused_moe.pinned_hot.backing import (
    PlannedBytes,
    RangeBacking,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.memory_budget import (
    memory_headroom,
    why_memory_too_small,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.placement import (
    PageMask,
    page_runs,
)
from vllm.utils.math_utils import cdiv

logger = init_logger(__name__)

# What CUDA offers everywhere; the driver's own answer is checked against it.
_PAGE_BYTES = 2 << 20
_PROBE_BYTES = 256 << 20
_PROBE_REPEATS = 3


class DeviceBacking(RangeBacking):
    """HBM and host pages of one GPU.

    Args:
        device: Index of the GPU in this process.

    """

    page_bytes = _PAGE_BYTES

    def __init__(self, device: int):
        self.device = device
        self.built_bytes = 0

    @staticmethod
    def why_not_here() -> str | None:
        """Why this process cannot use ranges, without touching the GPU."""
        if importlib.util.find_spec("cuda") is None or (
            importlib.util.find_spec("cuda.bindings") is None
        ):
            return (
                "the Python package cuda-bindings is missing. Install it "
                "(`pip install cuda-bindings`); torch's CUDA builds bring it."
            )
        return None

    def check(self, planned: PlannedBytes, ranks_on_node: int) -> None:
        from vllm.model_executor.layers.fused_moe.pinned_hot import device_range as vmm

        if not vmm.supports_ranges(self.device):
            raise ValueError(
                f"GPU {self.device}: the driver offers no virtual memory management "
                "here (WSL, vGPU and some containers lack it). Use --expert-provider "
                "resident."
            )
        hot, cold = vmm.device_location(self.device), vmm.host_location(self.device)
        for where, location in (("HBM", hot), ("host", cold)):
            if (found := vmm.granularity(location)) > self.page_bytes:
                raise ValueError(
                    f"GPU {self.device}: {where} pages of {format_bytes(found)} are "
                    f"not supported, {format_bytes(self.page_bytes)} are."
                )
        torch.accelerator.empty_cache()  # what building the model left behind is free
        free, total = torch.accelerator.get_memory_info(self.device)
        need = planned.hot + planned.largest_layer
        if need > free:
            raise ValueError(
                f"GPU {self.device}: the hot expert rows and one layer in work need "
                f"{format_bytes(need)} of HBM and {format_bytes(free)} of "
                f"{format_bytes(total)} are free. Lower `hot` in the expert map."
            )
        reason = why_memory_too_small(
            (planned.total - planned.hot) * ranks_on_node,
            "cold expert rows",
            memory_headroom(),
        )
        if reason:
            raise ValueError(reason.replace("Lower `hot`", "Raise `hot`"))
        self._probe()

    def _probe(self) -> None:
        """Map host pages once and log how fast the GPU reads them."""
        like = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="meta")
        try:
            pages = self._range(like, [False] * (_PROBE_BYTES // self.page_bytes))
        except RuntimeError as error:
            raise ValueError(
                f"GPU {self.device}: host pages cannot be mapped ({error}). In a "
                "container, allow the mbind and set_mempolicy system calls "
                "(`--cap-add SYS_NICE`), or use --expert-provider resident."
            ) from error
        sink = torch.empty_like(pages)
        seconds = []
        for _ in range(_PROBE_REPEATS):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            torch.bitwise_not(pages, out=sink)
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        logger.info_once(
            "GPU %d reads host pages at %.1f GB/s",
            self.device,
            _PROBE_BYTES / min(seconds) / 1e9,
        )

    def build(self, source: torch.Tensor, hot: PageMask, label: str) -> torch.Tensor:
        try:
            home = self._range(source, hot)
        except RuntimeError as error:
            num_bytes = len(hot) * self.page_bytes
            hot_bytes = int(hot.sum()) * self.page_bytes
            raise RuntimeError(
                f"{label}: cannot re-home {format_bytes(num_bytes)} "
                f"({format_bytes(hot_bytes)} of them in HBM, "
                f"{format_bytes(num_bytes - hot_bytes)} in host memory, after "
                f"{format_bytes(self.built_bytes)} of other tensors): {error}. Move "
                "the cut `hot` in the expert map towards the memory that is free."
            ) from error
        home.copy_(source)
        self.built_bytes += len(hot) * self.page_bytes
        return home

    def _range(self, like: torch.Tensor, hot: PageMask | list[bool]) -> torch.Tensor:
        from vllm.model_executor.layers.fused_moe.pinned_hot import device_range as vmm

        assert len(hot) == cdiv(like.numel() * like.element_size(), self.page_bytes)
        runs = list(page_runs(hot, self.page_bytes))
        locations = vmm.device_location(self.device), vmm.host_location(self.device)
        try:
            made = vmm.DeviceRange(self.device, runs, self.page_bytes, *locations)
        except vmm.DriverError as error:
            if not error.out_of_memory:
                raise
            # torch keeps what the last layer freed; the driver needs it now.
            torch.accelerator.empty_cache()
            made = vmm.DeviceRange(self.device, runs, self.page_bytes, *locations)
        return made.tensor(like)


@functools.cache
def device_backing(device: int) -> DeviceBacking:
    """The process's backing on a GPU."""
    return DeviceBacking(device)
