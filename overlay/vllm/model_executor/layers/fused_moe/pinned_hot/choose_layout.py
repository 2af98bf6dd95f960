# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which layout this process uses, chosen once for its device."""

import functools
from typing import Literal

import torch

from vllm.config.expert_provider import ExpertProviderConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.pinned_hot.backing import RangeBacking
from vllm.model_executor.layers.fused_moe.pinned_hot.device_backing import (
    DeviceBacking,
    device_backing,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.file_backing import (
    FileBacking,
    file_backing,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.layout import Layout
from vllm.model_executor.layers.fused_moe.pinned_hot.range_layout import RangeLayout
from vllm.platforms import current_platform

logger = init_logger(__name__)

LayoutKind = Literal["range", "split"]


def _device_backing(config: ExpertProviderConfig) -> DeviceBacking:
    device = torch.accelerator.current_device_index()
    return device_backing(device, config.peer_device)


def layout_kind(config: ExpertProviderConfig) -> LayoutKind:
    """Tell which layout a configuration means on this process's device.

    `auto` is `range`, unless the GPU cannot map host pages into a range or reads them
    there slower than ordinary pinned memory.
    """
    if config.expert_layout != "auto":
        return config.expert_layout
    if current_platform.is_cpu() or config.peer_device is not None:
        return "range"
    speeds = _device_backing(config).speeds()
    reason = speeds.why_not_range or (
        f"host memory is read at {_gigabytes(speeds.in_range)} GB/s in a range and at "
        f"{_gigabytes(speeds.pinned)} GB/s outside"
    )
    slow = speeds.why_not_range is not None or speeds.range_is_slow
    kind: LayoutKind = "split" if slow else "range"
    logger.info_once("--expert-layout auto takes %s: %s", kind, reason)
    return kind


def _gigabytes(bytes_per_s: float | None) -> str:
    return "unknown" if bytes_per_s is None else f"{bytes_per_s / 1e9:.1f}"


def process_layout(config: ExpertProviderConfig) -> Layout:
    """The layout of this process, the same object for all its layers."""
    backing: RangeBacking = (
        file_backing(config.expert_cold_dir)
        if current_platform.is_cpu()
        else _device_backing(config)
    )
    return _layout(layout_kind(config), config.expert_split_mode, backing)


@functools.cache
def _layout(kind: LayoutKind, split_mode: str, backing: RangeBacking) -> Layout:
    if kind == "range":
        return RangeLayout(backing)
    # Brings kernels along, which `range` leaves alone.
    from vllm.model_executor.layers.fused_moe.pinned_hot.split.layout import SplitLayout
    from vllm.model_executor.layers.fused_moe.pinned_hot.split.memory import (
        FileMemory,
        PinnedMemory,
    )

    if isinstance(backing, DeviceBacking):
        return SplitLayout(PinnedMemory(backing), split_mode)
    assert isinstance(backing, FileBacking)
    return SplitLayout(FileMemory(backing), split_mode)
