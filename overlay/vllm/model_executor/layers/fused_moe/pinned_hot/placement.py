# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which pages of which expert tensors are hot: pure arithmetic.

An expert tensor is a run of `E` equal rows in one address range; the range is
backed page by page. Rows and pages do not align, so a page may carry bytes of
several experts. Two rules say which pages are hot:

- A cut (`hot_pages`): every page that carries a byte of a hot row.
- A budget in bytes (`place_pages`): the pages of all layers that are read most. A
  page's heat is the sum over the experts in it of their share of the selections
  times their bytes in it, so that no other choice of pages has less expected cold
  traffic.

Everything is integer arithmetic, so a placement is the same on every machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from vllm.utils.math_utils import cdiv

PageMask = npt.NDArray[np.bool_]
"""`(num_pages,)`: which pages of one range are hot."""

# Shares become integers with this many steps, finer than a profile can tell. A sum
# over a tensor of 16 GiB rows still fits 63 bits.
_HEAT_STEPS = 1 << 28


@dataclass(frozen=True)
class RowTensor:
    """Geometry of one expert tensor.

    Attributes:
        num_rows: Experts, E.
        row_bytes: Bytes of one expert's row.

    """

    num_rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def num_pages(self, page_bytes: int) -> int:
        """Pages of a range that holds the tensor; the last may be partly unused."""
        return cdiv(self.num_bytes, page_bytes)


@dataclass(frozen=True)
class PageRun:
    """Neighbouring pages of one kind.

    Attributes:
        start: First byte within the range.
        num_bytes: Length in bytes, whole pages.
        hot: Whether the pages are hot.

    """

    start: int
    num_bytes: int
    hot: bool


def hot_pages(tensor: RowTensor, hot_rows: Sequence[int], page_bytes: int) -> PageMask:
    """Every page that carries a byte of a hot row.

    A hot row takes bytes of its neighbours along on its first and last page, or
    every use of it would read a part from cold memory.

    Args:
        tensor: Geometry of the tensor.
        hot_rows: Rows to keep hot.
        page_bytes: Page size in bytes.

    Returns:
        `(num_pages,)` mask.

    """
    rows = np.asarray(hot_rows, dtype=np.int64)
    touched = np.zeros(tensor.num_pages(page_bytes) + 1, dtype=np.int64)
    np.add.at(touched, rows * tensor.row_bytes // page_bytes, 1)
    np.add.at(touched, ((rows + 1) * tensor.row_bytes - 1) // page_bytes + 1, -1)
    return np.cumsum(touched)[:-1] > 0


def row_heat(ranking: Sequence[int], share: Sequence[float]) -> npt.NDArray[np.int64]:
    """Heat of each row of a layer, from the layer's map.

    Args:
        ranking: Experts, hottest first: a permutation of 0 … E-1.
        share: Their share of the selections, in the same order.

    Returns:
        `(E, 2)` int64, to be compared column by column: the share in integer steps,
        and the place in the ranking counted from its cold end, which decides where
        the profile saw no traffic.

    """
    num_rows = len(ranking)
    heat = np.empty((num_rows, 2), dtype=np.int64)
    for place, expert in enumerate(ranking):
        heat[expert] = round(share[place] * _HEAT_STEPS), num_rows - place
    return heat


def page_heat(
    tensor: RowTensor, heat: npt.NDArray[np.int64], page_bytes: int
) -> npt.NDArray[np.int64]:
    """Sum the heat of each page's bytes.

    Args:
        tensor: Geometry of the tensor.
        heat: `(E, 2)` from `row_heat`.
        page_bytes: Page size in bytes.

    Returns:
        `(num_pages, 2)` int64.

    """
    edge = np.arange(tensor.num_pages(page_bytes) + 1, dtype=np.int64) * page_bytes
    edge = np.minimum(edge, tensor.num_bytes)
    row = edge // tensor.row_bytes
    inside = (edge - row * tensor.row_bytes)[:, None]
    before = np.concatenate([np.zeros_like(heat[:1]), np.cumsum(heat, axis=0)])
    padded = np.concatenate([heat, np.zeros_like(heat[:1])])
    return np.diff(before[row] * tensor.row_bytes + padded[row] * inside, axis=0)


def place_pages(
    tensors: Sequence[RowTensor],
    heats: Sequence[npt.NDArray[np.int64]],
    budget_bytes: int,
    page_bytes: int,
) -> list[PageMask]:
    """Give the hottest pages of all tensors to the hot memory.

    Args:
        tensors: Geometry of each tensor; they may belong to several layers.
        heats: For each tensor the `(E, 2)` heat of its rows.
        budget_bytes: Hot memory to use, rounded down to whole pages.
        page_bytes: Page size in bytes.

    Returns:
        For each tensor its mask of hot pages. Equal heat goes to the earlier
        tensor, then to the lower page.

    """
    per_tensor = [
        page_heat(tensor, heat, page_bytes)
        for tensor, heat in zip(tensors, heats, strict=True)
    ]
    counts = [len(pages) for pages in per_tensor]
    budget_pages = min(budget_bytes // page_bytes, sum(counts))
    heat = np.concatenate(per_tensor) if per_tensor else np.empty((0, 2), np.int64)
    # lexsort is stable and takes its last key first
    hottest = np.lexsort(-heat[:, ::-1].T)[:budget_pages]
    hot = np.zeros(sum(counts), dtype=np.bool_)
    hot[hottest] = True
    return np.split(hot, np.cumsum(counts)[:-1]) if counts else []


def page_runs(hot: PageMask, page_bytes: int) -> Iterator[PageRun]:
    """Join neighbouring pages of one kind."""
    if len(hot) == 0:
        return
    edges = np.flatnonzero(np.diff(hot)) + 1
    bounds = [0, *edges.tolist(), len(hot)]
    for first, last in pairwise(bounds):
        yield PageRun(first * page_bytes, (last - first) * page_bytes, bool(hot[first]))


def hot_bytes_per_row(
    tensor: RowTensor, hot: PageMask, page_bytes: int
) -> npt.NDArray[np.int64]:
    """Count how many bytes of each row lie in hot pages.

    Args:
        tensor: Geometry of the tensor.
        hot: `(num_pages,)` mask from `place_pages`.
        page_bytes: Page size in bytes.

    Returns:
        `(E,)` int64.

    """
    below = np.concatenate([[0], np.cumsum(hot.astype(np.int64))]) * page_bytes
    bounds = np.arange(tensor.num_rows + 1, dtype=np.int64) * tensor.row_bytes
    page = bounds // page_bytes
    inside = bounds - page * page_bytes
    padded = np.append(hot, False)
    return np.diff(below[page] + np.where(padded[page], inside, 0))
