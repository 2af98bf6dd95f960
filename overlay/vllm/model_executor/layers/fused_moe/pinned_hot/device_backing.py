# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ranges for CUDA: hot pages in HBM, cold pages in host memory the GPU reads."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.expert_weight_provider import format_bytes
from vllm.model_executor.layers.fused_moe.pinned_hot import device_range as vmm
from vllm.model_executor.layers.fused_moe.pinned_hot.backing import (
    PlannedBytes,
    RangeBacking,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.made_ahead import MadeAhead
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
# Reads of each kind, and how many while a range seems to be slow.
_PROBE_READS = (3, 40)
# Below this fraction of the bandwidth of ordinary pinned memory, two tensors per
# expert tensor would serve better than one range.
_RANGE_WORTH = 0.9


@dataclass(frozen=True)
class ColdSpeeds:
    """How fast a GPU reads cold memory, bytes per second.

    Attributes:
        in_range: As pages of a range; None if they cannot be had.
        pinned: As ordinary pinned host memory; None if that was not tried.
        why_not_range: Why there are no ranges.

    """

    in_range: float | None = None
    pinned: float | None = None
    why_not_range: str | None = None

    @property
    def range_is_slow(self) -> bool:
        """Whether two tensors per expert tensor would read faster."""
        if self.in_range is None or self.pinned is None:
            return False
        return self.in_range < _RANGE_WORTH * self.pinned


def best_speeds(
    in_range: Callable[[], float] | None, pinned: Callable[[], float] | None
) -> ColdSpeeds:
    """Read each kind of memory in turn and keep the best of each.

    Another user of the link, or of the GPU, slows some reads of either kind down; the
    longer a range seems to be slow, the more pairs are read before it is believed.

    Args:
        in_range: Reads a range and tells its bytes per second; None if there is none.
        pinned: The same of ordinary pinned memory.

    """
    best = ColdSpeeds()
    enough, most = _PROBE_READS
    for number in range(1, most + 1):
        if in_range is not None:
            best = replace(best, in_range=max(best.in_range or 0, in_range()))
        if pinned is not None:
            best = replace(best, pinned=max(best.pinned or 0, pinned()))
        if number >= enough and not best.range_is_slow:
            break
    return best


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
        self._cold_ahead: MadeAhead | None = None
        self._expected = 0  # tensors that it makes memory for
        self._speeds: ColdSpeeds | None = None
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
    def why_not_here(layout: str) -> str | None:
        """Why this process cannot hold cold rows, without touching the GPU."""
        if vmm.driver is None and layout == "range":
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
        speeds = self.speeds()
        if reason := speeds.why_not_range:
            cure = (
                "In a container, allow the mbind and set_mempolicy system calls "
                "(`--cap-add SYS_NICE`), or use --expert-layout split."
                if self.peer is None
                else "Use --expert-cold-tier host."
            )
            raise ValueError(f"GPU {self.device}: {reason}. {cure}")
        if speeds.range_is_slow:
            logger.warning_once(
                "GPU %d reads pinned host memory outside a range at %.1f GB/s: cold "
                "experts cost more here than the link asks for. --expert-layout split "
                "avoids that.",
                self.device,
                (speeds.pinned or 0) / 1e9,
            )
        hot, cold = self._locations()
        for where, location in (("hot", hot), ("cold", cold)):
            if (found := vmm.granularity(location)) > self.page_bytes:
                raise ValueError(
                    f"GPU {self.device}: {where} pages of {format_bytes(found)} are "
                    f"not supported, {format_bytes(self.page_bytes)} are."
                )
        self.check_memory(planned, ranks_on_node)

    def check_memory(self, planned: PlannedBytes, ranks_on_node: int) -> None:
        """Refuse a plan that exceeds what HBM or the cold memory has free.

        Raises:
            ValueError: Has numbers and the cure.

        """
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

    @property
    def has_ranges(self) -> bool:
        """Whether the driver maps pages of any memory into address ranges."""
        return vmm.driver is not None and vmm.supports_ranges(self.device)

    def speeds(self) -> ColdSpeeds:
        """Read cold memory once, each way there is, and remember how fast it was."""
        if self._speeds is None:
            self._speeds = self._probe()
            self.cold_bytes_per_s = self._speeds.in_range
            # Or torch would carve a layer's tensors out of what was read into.
            torch.accelerator.empty_cache()
        return self._speeds

    def _probe(self) -> ColdSpeeds:
        pinned = None
        if self.peer is None and is_uva_available():
            rows = torch.empty(
                _PROBE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True
            )
            pinned = get_accelerator_view_from_cpu_tensor(rows)
        pages, why_not = None, None
        if self.has_ranges:
            like = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="meta")
            try:
                pages = self._range(like, [False] * (_PROBE_BYTES // self.page_bytes))
            except RuntimeError as error:
                why_not = f"cold pages cannot be mapped ({error})"
        elif vmm.driver is None:
            why_not = "the Python package cuda-bindings is missing"
        else:
            why_not = (
                "the driver offers no virtual memory management here (WSL, vGPU and "
                "some containers lack it)"
            )
        sink = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cuda")
        readers = [
            None if source is None else partial(_read_bytes_per_s, source, sink)
            for source in (pages, pinned)
        ]
        speeds = replace(best_speeds(*readers), why_not_range=why_not)
        if speeds.in_range is not None:
            logger.info_once(
                "GPU %d reads %s in a range at %.1f GB/s",
                self.device,
                self.memories[1],
                speeds.in_range / 1e9,
            )
        return speeds

    def expect(self, masks: Sequence[PageMask]) -> None:
        self._stop_ahead()
        if self.peer is not None:
            return  # another GPU's memory is made at once
        _, cold = self._locations()
        sizes = [
            run.num_bytes
            for mask in masks
            for run in page_runs(mask, self.page_bytes)
            if not run.hot
        ]
        self._expected = len(masks)
        create = partial(vmm.create_memory, cold)
        self._cold_ahead = MadeAhead(sizes, create, vmm.release_memory)

    def _stop_ahead(self) -> None:
        if self._cold_ahead is not None:
            self._cold_ahead.close()
            self._cold_ahead = None

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
        self._expected -= 1
        if self._expected == 0:
            self._stop_ahead()
        return home

    def _range(self, like: torch.Tensor, hot: PageMask | list[bool]) -> torch.Tensor:
        assert len(hot) == cdiv(like.numel() * like.element_size(), self.page_bytes)
        make_hot, make_cold = (
            partial(vmm.create_memory, location) for location in self._locations()
        )
        if self._cold_ahead is not None:
            make_cold = self._cold_ahead.take
        pieces = [
            vmm.NewMemory(run.num_bytes, make_hot if run.hot else make_cold)
            for run in page_runs(hot, self.page_bytes)
        ]
        return self.map(pieces).tensor(like)

    def map(self, pieces: Sequence[vmm.Piece]) -> vmm.DeviceRange:
        """Map memory into a range of this GPU.

        Raises:
            DriverError: It cannot be had.

        """
        try:
            return vmm.DeviceRange(self.device, pieces, self.page_bytes)
        except vmm.DriverError as error:
            if not error.out_of_memory:
                raise
            # torch keeps what the last layer freed; the driver needs it now.
            torch.accelerator.empty_cache()
            return vmm.DeviceRange(self.device, pieces, self.page_bytes)


def _read_bytes_per_s(source: torch.Tensor, sink: torch.Tensor) -> float:
    """How fast a kernel reads a tensor once, bytes per second."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.bitwise_not(source, out=sink)
    end.record()
    end.synchronize()
    return source.numel() * source.element_size() / (begin.elapsed_time(end) / 1e3)


@functools.cache
def device_backing(device: int, peer: int | None = None) -> DeviceBacking:
    """The process's backing on a GPU, with cold pages on another one or the host."""
    return DeviceBacking(device, peer)
