# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The fused-MoE Triton kernel on rows that lie apart."""

import pytest

from tests.kernels.moe.triton_interpreter import HAS_INTERPRETER, interpret

pytestmark = pytest.mark.skipif(
    not HAS_INTERPRETER, reason="Triton is not installed, so nothing can interpret it"
)

KERNEL = """
from vllm.model_executor.layers.fused_moe.fused_moe import (
    invoke_fused_moe_triton_kernel,
)
torch.manual_seed(0)
E, M, TOP_K, N, K = 8, 3, 2, 24, 48
CONFIG = dict(BLOCK_SIZE_M=16, BLOCK_SIZE_N=16, BLOCK_SIZE_K=16, GROUP_SIZE_M=1)

TYPES = {torch.float16: triton.language.float16, torch.float32: triton.language.float32}

def run(weights, ids, x, bias, offsets=None):
    out = torch.full((M, TOP_K, N), float("nan"), dtype=x.dtype)
    invoke_fused_moe_triton_kernel(
        x, weights, out, None, None, None, None, ids.view(-1),
        torch.tensor([ids.numel() * 16], dtype=torch.int32), False, TOP_K, CONFIG,
        TYPES[x.dtype], *[False] * 5, B_bias=bias, B_row_offsets=offsets,
    )
    return out
"""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_apart_equal_rows_together(dtype):
    interpret(
        KERNEL
        + f"""
weights = torch.randn(E, N, K).to(torch.{dtype})
x = torch.randn(M, K).to(torch.{dtype})
bias = torch.randn(E, N).to(torch.{dtype})
ids = torch.tensor([[7, 0], [5, 2], [6, 5]], dtype=torch.int32)
together = run(weights, ids, x, bias)
assert together.isfinite().all()

# Every row in memory of its own, in no order.
rows = [weights[expert].clone() for expert in (3, 1, 0, 2, 7, 6, 5, 4)]
places = dict(zip((3, 1, 0, 2, 7, 6, 5, 4), rows))
base = rows[0]
distance = [places[expert].data_ptr() - base.data_ptr() for expert in range(E)]
assert all(d % 16 == 0 for d in distance)
offsets = torch.tensor([d // 16 for d in distance], dtype=torch.int64)
apart = run(base.expand(E, N, K), ids, x, bias, offsets)
assert torch.equal(apart, together)

# An id of no expert reads no offset.
ids[0, 1] = ids[1] = -1
holes = run(base.expand(E, N, K), ids, x, bias, offsets)
assert torch.equal(holes, run(weights, ids, x, bias))
assert torch.equal(holes[1], torch.zeros_like(holes[1]))

# The table is read: with another one the result is another.
offsets[7] = offsets[0]
assert not torch.equal(run(base.expand(E, N, K), ids, x, bias, offsets), together)
"""
    )
