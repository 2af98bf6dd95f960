# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How many bytes an expert's rows take, from what a fingerprint says of a model.

An expert of a gated MLP has three matrices of hidden x intermediate weights. vLLM keeps
gate and up in one row of `w13_weight` and down in one row of `w2_weight`; scales and
biases stay where they were loaded and are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm.model_executor.layers.fused_moe.expert_profile.errors import (
    ExpertPlanError,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import (
    ExpertMap,
    Fingerprint,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.placement import (
    RowTensor,
    hot_bytes_per_row,
    hot_pages,
)
from vllm.utils.math_utils import cdiv

DEVICE_PAGE_BYTES = 2 << 20
"""Granularity of CUDA's virtual memory management."""

# Names of quantization methods that say how wide a weight is. A name that covers
# several widths, such as "compressed-tensors" or "gptq", is not here on purpose.
_BITS_BY_QUANTIZATION = {
    None: 16,
    "fp8": 8,
    "fp8_per_tensor": 8,
    "fp8_per_block": 8,
    "fp8_per_channel": 8,
    "int8_per_channel_weight_only": 8,
    "experts_int8": 8,
    "modelopt": 8,
    "modelopt_mxfp8": 8,
    "mxfp8": 8,
    "awq": 4,
    "auto_awq": 4,
    "awq_marlin": 4,
    "gpt_oss_mxfp4": 4,
    "modelopt_fp4": 4,
    "mxfp4": 4,
    "nvfp4_per_token": 4,
}


@dataclass(frozen=True)
class ExpertRow:
    """Size of one expert on one GPU.

    Attributes:
        w13: Bytes of its row of `w13_weight`.
        w2: Bytes of its row of `w2_weight`.
        source: How the sizes were found, for people.

    """

    w13: int
    w2: int
    source: str

    @property
    def num_bytes(self) -> int:
        """Bytes of both rows."""
        return self.w13 + self.w2

    def tensors(self, num_experts: int) -> tuple[RowTensor, RowTensor]:
        """Geometry of the two expert tensors of a layer."""
        return RowTensor(num_experts, self.w13), RowTensor(num_experts, self.w2)


def expert_row(
    fingerprint: Fingerprint,
    row_bytes: int | None = None,
    weight_bits: int | None = None,
    tensor_parallel_size: int = 1,
) -> ExpertRow:
    """Size of one expert of a gated MLP.

    Args:
        fingerprint: The model.
        row_bytes: Bytes of a whole expert, if they are known better than from the
            fingerprint; two thirds are taken for `w13_weight`.
        weight_bits: Bits of a weight, if the quantization's name does not say.
        tensor_parallel_size: GPUs that share every expert.

    Returns:
        The share of one GPU.

    Raises:
        ExpertPlanError: The fingerprint does not say how large an expert is.

    """
    if row_bytes is not None:
        w13 = cdiv(row_bytes * 2, 3 * tensor_parallel_size)
        whole = cdiv(row_bytes, tensor_parallel_size)
        return ExpertRow(w13, whole - w13, f"--row-bytes {row_bytes}")
    if fingerprint.moe_intermediate_size is None:
        raise ExpertPlanError(
            "fingerprint.moe_intermediate_size is null, so the size of an expert is "
            "not known. Give --row-bytes, the bytes of one expert's weights in one "
            "layer, or a budget in rows (--hot-rows, --cold-fraction)."
        )
    bits = weight_bits or _BITS_BY_QUANTIZATION.get(fingerprint.quantization)
    if bits is None:
        raise ExpertPlanError(
            f"fingerprint.quantization is {fingerprint.quantization!r}, which does not "
            "say how many bits a weight has. Give --weight-bits, or --row-bytes, or a "
            "budget in rows (--hot-rows, --cold-fraction)."
        )
    hidden, intermediate = fingerprint.hidden_size, fingerprint.moe_intermediate_size
    local = cdiv(intermediate, tensor_parallel_size)
    return ExpertRow(
        w13=cdiv(2 * hidden * local * bits, 8),
        w2=cdiv(hidden * local * bits, 8),
        source=f"3 x {hidden} x {local} weights of {bits} bits",
    )


def hot_page_bytes(
    row: ExpertRow, num_experts: int, hot_rows: Sequence[int], page_bytes: int
) -> int:
    """Bytes of the pages that some hot rows of a layer touch.

    Args:
        row: Size of an expert.
        num_experts: Experts of the layer, E.
        hot_rows: Expert ids to keep hot.
        page_bytes: Page size in bytes.

    Returns:
        Whole pages of both tensors, in bytes.

    """
    masks = (hot_pages(x, hot_rows, page_bytes) for x in row.tensors(num_experts))
    return sum(int(mask.sum()) for mask in masks) * page_bytes


def map_host_bytes(
    expert_map: ExpertMap, layer_names: Sequence[str], row: ExpertRow, page_bytes: int
) -> np.ndarray:
    """`host_bytes` of every layer of a map, `(num_layers, 2, E)` int64."""
    layers = (expert_map.layers[name] for name in layer_names)
    return np.stack(
        [
            host_bytes(row, len(layer.ranking), layer.hot_rows, page_bytes)
            for layer in layers
        ]
    )


def host_bytes(
    row: ExpertRow, num_experts: int, hot_rows: Sequence[int], page_bytes: int
) -> np.ndarray:
    """Bytes of each expert that some hot rows of a layer leave outside HBM.

    A cold expert whose neighbours are hot lies partly in their pages.

    Args:
        row: Size of an expert.
        num_experts: Experts of the layer, E.
        hot_rows: Expert ids to keep hot.
        page_bytes: Page size in bytes.

    Returns:
        `(2, E)` int64: bytes of `w13_weight` and of `w2_weight`.

    """
    outside = []
    for tensor in row.tensors(num_experts):
        mask = hot_pages(tensor, hot_rows, page_bytes)
        outside.append(tensor.row_bytes - hot_bytes_per_row(tensor, mask, page_bytes))
    return np.stack(outside)
