# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Where the two parts of an expert tensor lie: HBM and pinned memory, or, on the CPU
backend, locked memory and files."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from vllm.model_executor.layers.fused_moe.expert_weight_provider import format_bytes
from vllm.model_executor.layers.fused_moe.pinned_hot import device_range as vmm
from vllm.model_executor.layers.fused_moe.pinned_hot.backing import PlannedBytes
from vllm.model_executor.layers.fused_moe.pinned_hot.device_backing import DeviceBacking
from vllm.model_executor.layers.fused_moe.pinned_hot.file_backing import FileBacking
from vllm.model_executor.layers.fused_moe.pinned_hot.split.pinned import pinned_empty
from vllm.model_executor.layers.fused_moe.pinned_hot.split.rows import RowOrder
from vllm.utils.math_utils import cdiv, round_up
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor


class SplitMemory(ABC):
    """Holds the hot and the cold part of expert tensors."""

    memories: tuple[str, str]
    """What the hot and the cold memory are, for people."""
    page_bytes: int
    """What the size of a tensor's hot part is rounded up to, bytes."""

    @property
    def cold_bytes_per_s(self) -> float | None:
        """How fast cold rows are read, once measured."""
        return None

    @abstractmethod
    def why_not_staged(self) -> str | None:
        """Why cold rows cannot be staged behind hot ones, or None."""

    @abstractmethod
    def check(self, planned: PlannedBytes, ranks_on_node: int) -> None:
        """Refuse a plan that does not fit, before any weight is loaded.

        Raises:
            ValueError: A memory, lock or disk limit is too small; has numbers.

        """

    @abstractmethod
    def hot(
        self, source: torch.Tensor, experts: Sequence[int], label: str
    ) -> torch.Tensor:
        """Copy some experts' rows of a tensor into fast memory.

        Args:
            source: `(E, …)` contiguous tensor.
            experts: The experts, in the order their rows shall have.
            label: Layer and parameter, for messages.

        Returns:
            `(len(experts), …)` contiguous, of the platform's device.

        Raises:
            RuntimeError: The memory cannot be had; names the tensor, the bytes
                wanted and the bytes held already.

        """

    @abstractmethod
    def cold(
        self, source: torch.Tensor, experts: Sequence[int], label: str
    ) -> torch.Tensor:
        """Copy some experts' rows into the other memory; otherwise like `hot`."""


class PinnedMemory(SplitMemory):
    """HBM, and pinned host memory that the GPU reads in place.

    Args:
        backing: Knows the GPU and how fast it reads.

    """

    memories = ("HBM", "pinned host memory")

    def __init__(self, backing: DeviceBacking):
        self.backing = backing
        self.page_bytes = backing.page_bytes
        self.pinned_bytes = 0

    @property
    def cold_bytes_per_s(self) -> float | None:
        return self.backing.speeds().pinned

    def check(self, planned: PlannedBytes, ranks_on_node: int) -> None:
        self.backing.check_memory(planned, ranks_on_node)

    def hot(
        self, source: torch.Tensor, experts: Sequence[int], label: str
    ) -> torch.Tensor:
        shape = (len(experts), *source.shape[1:])
        like = torch.empty(shape, dtype=source.dtype, device="meta")
        if not experts or not self.backing.has_ranges:
            rows = torch.empty_like(like, device=source.device)
        else:
            # Pages of their own: torch would carve them out of larger memory that
            # post-processing left, which could then never be given back.
            rows = self._range(like, len(experts) * like.stride(0), None, label)
        _copy_rows(source, experts, rows)
        return rows

    def cold(
        self, source: torch.Tensor, experts: Sequence[int], label: str
    ) -> torch.Tensor:
        shape = (len(experts), *source.shape[1:])
        num_bytes = len(experts) * source[:1].numel() * source.element_size()
        if num_bytes == 0:
            return torch.empty(shape, dtype=source.dtype, device=source.device)
        try:
            rows = pinned_empty(shape, source.dtype)
        except RuntimeError as error:
            raise RuntimeError(
                f"{label}: cannot pin {format_bytes(num_bytes)} of host memory for "
                f"{len(experts)} cold rows, {format_bytes(self.pinned_bytes)} are "
                f"pinned already: {error}. Raise `hot` in the expert map or "
                "--expert-hbm-gib, or the container's memory limit."
            ) from error
        _copy_rows(source, experts, rows)
        self.pinned_bytes += num_bytes
        # The view holds the host tensor, or its memory would be reused under it.
        return get_accelerator_view_from_cpu_tensor(rows)

    def staged(
        self,
        source: torch.Tensor,
        order: RowOrder,
        tail: vmm.DeviceMemory | None,
        label: str,
    ) -> torch.Tensor:
        """Make a tensor of hot rows with room for the cold ones behind them.

        The room is the same physical memory in every layer: what lies there is the
        cold rows of the layer that runs.

        Args:
            source: `(E, …)` contiguous tensor.
            order: The layer's rows.
            tail: Memory for at least the layer's cold rows; None if it has none.
            label: Layer and parameter, for messages.

        Returns:
            Like `source` in shape, dtype and device; only its hot rows are filled.

        Raises:
            RuntimeError: The memory cannot be had.

        """
        hot_items = order.num_hot * source.stride(0)
        home = self._range(source, hot_items, tail, label)
        _copy_rows(source, order.hot, home[: order.num_hot])
        return home

    def _range(
        self,
        like: torch.Tensor,
        hot_items: int,
        tail: vmm.DeviceMemory | None,
        label: str,
    ) -> torch.Tensor:
        """Make a tensor of HBM pages, its end on those of `tail`."""
        hot_bytes = hot_items * like.element_size()
        page_bytes = self.backing.page_bytes
        # The first cold row begins on a page, so that hot rows share no page with it.
        start = round_up(hot_bytes, page_bytes) - hot_bytes
        location = vmm.device_location(self.backing.device)
        create = partial(vmm.create_memory, location)
        pieces: list[vmm.Piece] = []
        if hot_bytes:
            pieces.append(vmm.NewMemory(start + hot_bytes, create))
        if tail:
            pieces.append(tail)
        try:
            return self.backing.map(pieces).tensor(like, start)
        except vmm.DriverError as error:
            raise RuntimeError(
                f"{label}: cannot place {format_bytes(hot_bytes)} of hot rows: "
                f"{error}. Lower `hot` in the expert map or --expert-hbm-gib."
            ) from error

    def why_not_staged(self) -> str | None:
        if self.backing.has_ranges:
            return None
        return (
            "--expert-split-mode staged needs the driver's virtual memory management, "
            "which is missing here (WSL, vGPU and some containers lack it). Use "
            "two_calls."
        )

    def staging(self, num_bytes: int) -> vmm.DeviceMemory:
        """Take memory for the cold rows of one tensor of whatever layer runs.

        Raises:
            RuntimeError: The memory cannot be had.

        """
        size = round_up(num_bytes, self.backing.page_bytes)
        torch.accelerator.empty_cache()
        try:
            return vmm.DeviceMemory(self.backing.device, size)
        except vmm.DriverError as error:
            raise RuntimeError(
                f"cannot take {format_bytes(size)} of HBM to stage cold rows: {error}. "
                "Lower `hot` in the expert map or --expert-hbm-gib, or use "
                "--expert-split-mode two_calls."
            ) from error


class FileMemory(SplitMemory):
    """Locked memory, and files that are mapped.

    Args:
        backing: Makes both.

    """

    def __init__(self, backing: FileBacking):
        self.backing = backing
        self.memories = backing.memories
        self.page_bytes = backing.page_bytes

    def why_not_staged(self) -> str | None:
        return "--expert-split-mode staged is for CUDA. Use two_calls."

    def check(self, planned: PlannedBytes, ranks_on_node: int) -> None:
        self.backing.check(planned, ranks_on_node)

    def hot(
        self, source: torch.Tensor, experts: Sequence[int], label: str
    ) -> torch.Tensor:
        return self._build(source, experts, label, hot=True)

    def cold(
        self, source: torch.Tensor, experts: Sequence[int], label: str
    ) -> torch.Tensor:
        return self._build(source, experts, label, hot=False)

    def _build(
        self, source: torch.Tensor, experts: Sequence[int], label: str, hot: bool
    ) -> torch.Tensor:
        rows = source[list(experts)]
        if not experts:
            return rows
        num_bytes = rows.numel() * rows.element_size()
        pages = np.full(cdiv(num_bytes, self.backing.page_bytes), hot)
        return self.backing.build(rows, pages, label)


def _copy_rows(
    source: torch.Tensor, experts: Sequence[int], rows: torch.Tensor
) -> None:
    # Row by row: a gather would make a copy of all of them on the device first.
    for row, expert in enumerate(experts):
        rows[row].copy_(source[expert])
