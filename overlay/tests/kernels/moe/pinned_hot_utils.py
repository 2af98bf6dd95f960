# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Expert maps of the tiny model, and what the kernel and the driver say of memory."""

import ctypes
import mmap
from pathlib import Path

import torch

from tests.kernels.moe.expert_provider_utils import (
    HIDDEN,
    INTERMEDIATE,
    LAYER_NAMES,
    NUM_EXPERTS,
    TOP_K,
    fill,
)
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import (
    ExpertMap,
    Fingerprint,
    expert_map_from_counts,
)
from vllm.model_executor.model_loader.expert_weights import attach_expert_weights
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

FINGERPRINT = Fingerprint(
    architecture="Qwen3MoeForCausalLM",
    num_experts=NUM_EXPERTS,
    top_k=TOP_K,
    hidden_size=HIDDEN,
    moe_intermediate_size=INTERMEDIATE,
    num_moe_layers=len(LAYER_NAMES),
    quantization=None,
)
# Distinct counts and a hot set that is no prefix of the expert ids.
COUNTS = [3, 90, 0, 41, 7, 120, 0, 55]


def make_map(hot: int = 3, **changes: object) -> ExpertMap:
    """Make a valid map of the tiny model, then change top-level fields."""
    counts = {name: COUNTS for name in LAYER_NAMES}
    made = expert_map_from_counts(counts, hot, FINGERPRINT, [])
    return made.model_copy(update=changes)


def write_map(path: Path, hot: int = 3, **changes: object) -> Path:
    path.write_text(make_map(hot, **changes).to_json())
    return path


def load_weights(layer: RoutedExperts, seed: int = 0) -> None:
    """Take a layer through the loader's steps with random weights."""
    info = get_layerwise_info(layer)
    if info.can_load():
        materialize_layer(layer, info)
        for tensor in get_layer_tensors(layer).values():
            tensor.weight_loader = _get_original_loader(tensor)
    fill(layer, seed)
    layer.quant_method.process_weights_after_loading(layer)
    attach_expert_weights(layer)
    info.reset()


def pages_in_memory(tensor: torch.Tensor) -> list[bool]:
    """Ask the kernel which pages of a tensor's range are in memory (mincore)."""
    page = mmap.PAGESIZE
    start = tensor.data_ptr() // page * page
    end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    count = -(-(end - start) // page)
    vector = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(end - start), vector)
    assert status == 0, ctypes.get_errno()
    return [bool(byte & 1) for byte in vector]


def free_device_bytes(device: int | None = None) -> int:
    """Ask the driver for a GPU's free memory, with what torch kept given back."""
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    return torch.accelerator.get_memory_info(device)[0]
