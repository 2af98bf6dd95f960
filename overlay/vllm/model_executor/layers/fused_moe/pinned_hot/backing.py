# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a platform must offer to hold expert tensors in two memories."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm.model_executor.layers.fused_moe.pinned_hot.placement import PageMask


@dataclass(frozen=True)
class PlannedBytes:
    """What a model is going to ask of a backing, in bytes per rank.

    Attributes:
        hot: Bytes of all hot pages.
        total: Bytes of all expert rows.
        largest_layer: Bytes of the largest layer's expert rows as loaded and as
            post-processed together.

    """

    hot: int
    total: int
    largest_layer: int


class RangeBacking(ABC):
    """Backs address ranges page by page with hot or cold memory.

    A range looks like an ordinary tensor of the platform's device. It is freed
    when the last tensor over it is.
    """

    page_bytes: int
    """Granularity of placement, bytes."""
    memories: tuple[str, str]
    """What the hot and the cold memory are, for people."""
    cold_bytes_per_s: float | None = None
    """How fast cold pages are read, once measured."""

    @abstractmethod
    def check(self, planned: PlannedBytes, ranks_on_node: int) -> None:
        """Refuse a plan that does not fit, before any weight is loaded.

        Raises:
            ValueError: A memory, lock or disk limit is too small; has numbers.

        """

    def expect(self, masks: Sequence[PageMask]) -> None:
        """Learn what is going to be built, to make memory ahead of time.

        Args:
            masks: Hot pages of every tensor, in the order in which they are built.

        """
        return None

    @abstractmethod
    def build(self, source: torch.Tensor, hot: PageMask, label: str) -> torch.Tensor:
        """Make a range with the bytes of a tensor.

        Args:
            source: `(E, …)` contiguous tensor with the final bytes.
            hot: `(num_pages,)` mask of the pages that go to the hot memory.
            label: Layer and parameter, for messages.

        Returns:
            A tensor equal to `source` in shape, dtype, device and bytes.

        Raises:
            RuntimeError: The memory cannot be had; names the tensor, the bytes
                wanted and the bytes held already. Nothing stays half-built.

        """
