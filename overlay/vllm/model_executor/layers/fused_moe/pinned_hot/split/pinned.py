# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pinned host memory of exactly the size that is asked for.

torch's own pinned allocator rounds up to powers of two. Here anonymous pages are
mapped, registered with the CUDA driver, and unregistered and unmapped when the last
tensor over them is gone.

Source: CUDA Runtime API, cudaHostRegister; mmap(2).
"""

import ctypes
import mmap
import weakref

import torch

from vllm.utils.math_utils import round_up

_HUGE_PAGE_BYTES = 2 << 20


class PinningError(RuntimeError):
    """Host memory cannot be mapped or registered."""


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make an uninitialised host tensor in pinned memory of its own.

    Args:
        shape: Its shape.
        dtype: Its dtype.

    Returns:
        A contiguous CPU tensor; `is_pinned()` is true.

    Raises:
        PinningError: The memory cannot be had.

    """
    like = torch.empty(shape, dtype=dtype, device="meta")
    num_bytes = like.numel() * like.element_size()
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    size = round_up(num_bytes, mmap.PAGESIZE)
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise PinningError(f"mmap of {size} bytes: {error.strerror}") from error
    if size >= _HUGE_PAGE_BYTES:
        # Fewer pages to pin; a hint only.
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = (ctypes.c_char * size).from_buffer(memory)
    address = ctypes.addressof(buffer)
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))
    except RuntimeError as error:
        raise PinningError(f"cudaHostRegister of {size} bytes: {error}") from error
    # Tensors over the pages hold `buffer`, and `buffer` holds the mapping. Not at
    # interpreter exit: the runtime may be gone by then, and frees all.
    weakref.finalize(buffer, _unregister, address).atexit = False
    flat = torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes)
    return flat.view(dtype).view(shape)


def _unregister(address: int) -> None:
    # A kernel may still read what nobody holds any more.
    torch.accelerator.synchronize()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
