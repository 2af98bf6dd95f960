# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Staging: which cold rows a batch has copied, and where to."""

import pytest
import torch

from tests.kernels.moe.triton_interpreter import HAS_INTERPRETER, interpret
from vllm.model_executor.layers.fused_moe.pinned_hot.split.staged import as_words

pytestmark = pytest.mark.skipif(
    not HAS_INTERPRETER, reason="Triton is not installed, so nothing can interpret it"
)

LAYER = """
from vllm.model_executor.layers.fused_moe.pinned_hot.split.rows import RowOrder
from vllm.model_executor.layers.fused_moe.pinned_hot.split.staged import Staging
torch.manual_seed(0)
order = RowOrder((7, 0, 5, 1, 2, 3, 4, 6), HOT)
cold = [torch.randn(8 - HOT, 5, 70), torch.randint(0, 255, (8 - HOT, 24)).byte()]
staged = [torch.full_like(rows, 77) for rows in cold]
staging = Staging(
    order.row_map(torch.device("cpu")), HOT, list(zip(cold, staged, strict=True))
)

def stage(*ids, dtype=torch.int32):
    for rows in staged:
        rows.fill_(77)
    staging.stage(torch.tensor(ids).to(dtype))
    copied = []
    for row in range(8 - HOT):
        same = [torch.equal(s[row], c[row]) for s, c in zip(staged, cold, strict=True)]
        untouched = [bool((s[row] == 77).all()) for s in staged]
        assert all(same) or all(untouched), row
        copied += [order.experts[HOT + row]] if all(same) else []
    return sorted(copied)
"""


# B6, B8: padding and ids out of range copy nothing and read no row.
def test_copies_the_cold_rows_that_are_selected():
    interpret(
        LAYER.replace("HOT", "3")
        + """
assert stage([7, 0], [5, 7]) == []  # all hot
assert stage([7, 6], [1, 6]) == [1, 6]
assert stage([3, 4]) == [3, 4]  # and no longer those of the batch before
assert stage([1, 2], [3, 4], [6, 0], dtype=torch.int64) == [1, 2, 3, 4, 6]
# More ids than a block holds; the last one counts.
assert stage(*[[7, 0]] * 900, [5, 2]) == [2]
for bad in (-1, 8, 9, 2**31 - 1, -(2**31)):
    assert stage([bad, bad]) == [], bad
    assert stage([bad, 4], [bad, 7]) == [4], bad
"""
    )


@pytest.mark.parametrize("hot, copied", [(0, [0, 4]), (8, [])])
def test_no_row_or_every_row_is_cold(hot, copied):
    interpret(LAYER.replace("HOT", str(hot)) + f"assert stage([0, 4]) == {copied}")


def test_rows_of_no_whole_words_are_refused():
    with pytest.raises(ValueError, match="3 bytes"):
        as_words(torch.zeros(4, 3, dtype=torch.uint8))
