# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ranges for CUDA: hot pages in HBM, cold pages in host memory the GPU reads."""

import functools

import torch

from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.expert_weight_provider import format_bytes
from vllm.model_executor.layers.fused_moe.pinned_hot import device_range as vmm
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
from vllm.utils.platform_utils import is_uva_available
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

logger = init_logger(__name__)

# What CUDA offers everywhere; the driver's own answer is checked against it.
_PAGE_BYTES = 2 << 20
_PROBE_BYTES = 256 << 20
_PROBE_REPEATS = 3
# Below this fraction of the bandwidth of ordinary pinned memory, two tensors per
# expert tensor would serve better than one range.
_RANGE_WORTH = 0.9


class DeviceBacking(RangeBacking):
    """HBM pages of one GPU, and cold pages that it reads.

    Args:
        device: Index of the GPU in this process.
        peer: Index of another GPU whose memory takes the cold pages; None for host
            memory.

    """

    page_bytes = _PAGE_BYTES

    def __init__(self, device: int, peer: int | None = None):
        self.device = device
        self.peer = peer
        self.built_bytes = 0
        self.memories = (
            "HBM",
            "host memory" if peer is None else f"memory of GPU {peer}",
        )

    def _locations(self) -> tuple[vmm.Location, vmm.Location]:
        """Where hot and cold pages lie."""
        cold = (
            vmm.host_location(self.device)
            if self.peer is None
            else vmm.device_location(self.peer)
        )
        return vmm.device_location(self.device), cold

    @staticmethod
    def why_not_here() -> str | None:
        """Why this process cannot use ranges, without touching the GPU."""
        if vmm.driver is None:
            return (
                "the Python package cuda-bindings is missing. Install it "
                "(`pip install cuda-bindings`); torch's CUDA builds bring it."
            )
        if envs.VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY:
            return (
                "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY is set and cold rows can "
                "only be read from pinned memory. Unset it."
            )
        return None

    def check(self, planned: PlannedBytes, ranks_on_node: int) -> None:
        if not vmm.supports_ranges(self.device):
            raise ValueError(
                f"GPU {self.device}: the driver offers no virtual memory management "
                "here (WSL, vGPU and some containers lack it). Use --expert-provider "
                "resident."
            )
        hot, cold = self._locations()
        for where, location in (("hot", hot), ("cold", cold)):
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
                f"{format_bytes(total)} are free. Lower `hot` in the expert map or "
                "--expert-hbm-gib."
            )
        cold_bytes = planned.total - planned.hot
        if self.peer is None:
            headroom = memory_headroom()
            need = cold_bytes * ranks_on_node
            if reason := why_memory_too_small(need, "cold expert rows", headroom):
                raise ValueError(reason.replace("Lower `hot`", "Raise `hot`"))
        else:
            self._check_peer(cold_bytes)
        self._probe()

    def _check_peer(self, cold_bytes: int) -> None:
        assert self.peer is not None
        flag = f"--expert-cold-tier peer:{self.peer}"
        if not torch.cuda.can_device_access_peer(self.device, self.peer):
            raise ValueError(
                f"{flag}: GPU {self.device} cannot read the memory of GPU {self.peer} "
                "directly. Use --expert-cold-tier host."
            )
        free, total = torch.accelerator.get_memory_info(self.peer)
        if cold_bytes > free:
            raise ValueError(
                f"{flag}: the cold expert rows need {format_bytes(cold_bytes)} and "
                f"{format_bytes(free)} of {format_bytes(total)} are free there. Raise "
                "`hot` in the expert map or --expert-hbm-gib."
            )

    def _probe(self) -> None:
        """Map cold pages once and log how fast the GPU reads them."""
        like = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="meta")
        try:
            pages = self._range(like, [False] * (_PROBE_BYTES // self.page_bytes))
        except RuntimeError as error:
            if self.peer is not None:
                raise ValueError(
                    f"--expert-cold-tier peer:{self.peer}: its pages cannot be mapped "
                    f"for GPU {self.device} ({error}). Use --expert-cold-tier host."
                ) from error
            raise ValueError(
                f"GPU {self.device}: host pages cannot be mapped ({error}). In a "
                "container, allow the mbind and set_mempolicy system calls "
                "(`--cap-add SYS_NICE`), or use --expert-provider resident."
            ) from error
        self.cold_bytes_per_s = _read_bytes_per_s(pages)
        logger.info_once(
            "GPU %d reads %s in a range at %.1f GB/s",
            self.device,
            self.memories[1],
            self.cold_bytes_per_s / 1e9,
        )
        if self.peer is None and is_uva_available():
            self._compare_with_pinned()

    def _compare_with_pinned(self) -> None:
        pinned = torch.empty(
            _PROBE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True
        )
        uva = _read_bytes_per_s(get_accelerator_view_from_cpu_tensor(pinned))
        if self.cold_bytes_per_s < _RANGE_WORTH * uva:
            logger.warning_once(
                "GPU %d reads pinned host memory outside a range at %.1f GB/s: cold "
                "experts cost more here than the link asks for.",
                self.device,
                uva / 1e9,
            )

    def build(self, source: torch.Tensor, hot: PageMask, label: str) -> torch.Tensor:
        try:
            home = self._range(source, hot)
        except RuntimeError as error:
            num_bytes = len(hot) * self.page_bytes
            hot_bytes = int(hot.sum()) * self.page_bytes
            raise RuntimeError(
                f"{label}: cannot re-home {format_bytes(num_bytes)} "
                f"({format_bytes(hot_bytes)} of them hot, "
                f"{format_bytes(num_bytes - hot_bytes)} cold, after "
                f"{format_bytes(self.built_bytes)} of other tensors): {error}. Move "
                "the cut `hot` in the expert map towards the memory that is free."
            ) from error
        home.copy_(source)
        self.built_bytes += len(hot) * self.page_bytes
        return home

    def _range(self, like: torch.Tensor, hot: PageMask | list[bool]) -> torch.Tensor:
        assert len(hot) == cdiv(like.numel() * like.element_size(), self.page_bytes)
        runs = list(page_runs(hot, self.page_bytes))
        locations = self._locations()
        try:
            made = vmm.DeviceRange(self.device, runs, self.page_bytes, *locations)
        except vmm.DriverError as error:
            if not error.out_of_memory:
                raise
            # torch keeps what the last layer freed; the driver needs it now.
            torch.accelerator.empty_cache()
            made = vmm.DeviceRange(self.device, runs, self.page_bytes, *locations)
        return made.tensor(like)


def _read_bytes_per_s(source: torch.Tensor) -> float:
    """How fast a kernel reads a tensor, bytes per second."""
    sink = torch.empty(source.shape, dtype=source.dtype, device="cuda")
    seconds = []
    for _ in range(_PROBE_REPEATS):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.bitwise_not(source, out=sink)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return source.numel() * source.element_size() / min(seconds)


@functools.cache
def device_backing(device: int, peer: int | None = None) -> DeviceBacking:
    """The process's backing on a GPU, with cold pages on another one or the host."""
    return DeviceBacking(device, peer)
