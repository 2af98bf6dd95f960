# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A fused multiply-add of float32 tensors, for devices whose torch has none."""

import torch


def fused_multiply_add(
    factor: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor
) -> torch.Tensor:
    """Compute `factor * weight + addend` in float32 with one rounding.

    The product is exact in float64. The sum is rounded to odd there, so that rounding
    it again to float32 gives what rounding once would (Boldo and Melquiond, "Emulation
    of a FMA and correctly rounded sums", IEEE Transactions on Computers 57(4), 2008).

    Args:
        factor: Float32 of any shape.
        weight: Float32, broadcast to it.
        addend: Float32, broadcast to it.

    Returns:
        Float32 of the shape of `factor`.

    """
    product = factor.double() * weight.double()
    addend = addend.double().expand_as(product)
    total = product + addend
    # The rounding error of the sum, exactly (Knuth's TwoSum).
    part = total - product
    error = (product - (total - part)) + (addend - part)
    # Towards zero where the exact sum is nearer to it, and then an odd last bit.
    toward_zero = (error * total < 0).to(torch.int64)
    odd = ((total.view(torch.int64) - toward_zero) | 1).view(torch.float64)
    inexact = (error != 0) & total.isfinite()
    return torch.where(inexact, odd, total).float()
