# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ranges for the CPU backend: hot pages in locked memory, cold pages on disk.

Cold pages are a shared mapping of a file without a name: the kernel reads them
when a token needs them and drops them when memory is short. Nothing is left
behind, however the process ends.
"""

import ctypes
import errno
import functools
import mmap
import os
import tempfile
import weakref

import torch

from vllm.model_executor.layers.fused_moe.expert_weight_provider import format_bytes
from vllm.model_executor.layers.fused_moe.pinned_hot.backing import (
    PlannedBytes,
    RangeBacking,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.memory_budget import (
    lockable_bytes,
    memory_headroom,
    why_memory_too_small,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.placement import (
    PageMask,
    page_runs,
)
from vllm.utils.math_utils import round_up

# Not in Python's mmap module; the value of every Linux architecture vLLM runs on.
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
# statfs(2): file systems whose pages cannot leave memory.
_MEMORY_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
_WRITE_CHUNK_BYTES = 64 << 20


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3
    libc.mmap.argtypes += [ctypes.c_int64]
    libc.munmap.argtypes = libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.statfs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    return libc


def _mmap(address: int | None, size: int, flags: int, fd: int = -1, at: int = 0) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    got = _libc().mmap(address, size, protection, flags, fd, at)
    if got == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return got


def _mlock(address: int, size: int) -> None:
    if _libc().mlock(address, size) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def memory_file_system(directory: str) -> str | None:
    """Name of the file system if its files live in memory, else None."""
    buffer = ctypes.create_string_buffer(512)
    if _libc().statfs(os.fsencode(directory), buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), directory)
    # f_type is the first word of struct statfs on every 64-bit Linux.
    magic = ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
    return _MEMORY_FILE_SYSTEMS.get(magic)


class FileBacking(RangeBacking):
    """Locked memory and unnamed files in one directory.

    Args:
        directory: Where the files lie; the default is the system's directory
            for temporary files.

    """

    memories = ("locked memory", "files")

    def __init__(self, directory: str | None):
        self.directory = directory or tempfile.gettempdir()
        self.page_bytes = mmap.PAGESIZE
        self.locked_bytes = 0

    def validate(self) -> None:
        """Refuse a directory that cannot hold cold files.

        Raises:
            ValueError: Says what is wrong with it, and the cure.

        """
        flag = "--expert-cold-dir"
        if not os.path.isdir(self.directory):
            raise ValueError(f"{flag} {self.directory}: not a directory. Create it.")
        if kind := memory_file_system(self.directory):
            raise ValueError(
                f"{flag} {self.directory}: lies on {kind}, whose files stay in "
                f"memory, so nothing would be saved. Point {flag} to a disk."
            )
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise ValueError(
                f"{flag} {self.directory}: not writable by this user. Point {flag} "
                "to a directory that is."
            )

    def check(self, planned: PlannedBytes, ranks_on_node: int) -> None:
        need = (planned.total - planned.hot) * ranks_on_node
        stats = os.statvfs(self.directory)
        free = stats.f_bavail * stats.f_frsize
        if need > free:
            raise ValueError(
                f"--expert-cold-dir {self.directory}: the cold expert rows need "
                f"{format_bytes(need)} of disk and {format_bytes(free)} are free. "
                "Free some, or choose another directory."
            )
        lockable = lockable_bytes()
        if lockable is not None and planned.hot > lockable:
            raise ValueError(
                f"the hot expert rows need {format_bytes(planned.hot)} of locked "
                f"memory and RLIMIT_MEMLOCK allows {format_bytes(lockable)}. Raise "
                "it (`ulimit -l unlimited`; in a container `--ulimit memlock=-1`)."
            )
        reason = why_memory_too_small(
            (planned.hot + planned.largest_layer) * ranks_on_node,
            "hot expert rows and one layer in work",
            memory_headroom(),
        )
        if reason:
            raise ValueError(reason)

    def build(self, source: torch.Tensor, hot: PageMask, label: str) -> torch.Tensor:
        num_bytes = source.numel() * source.element_size()
        size = round_up(num_bytes, self.page_bytes)
        hot_bytes = int(hot.sum()) * self.page_bytes
        try:
            address = self._map(source, size, hot)
        except OSError as error:
            cure = {
                errno.EPERM: " Raise RLIMIT_MEMLOCK (`ulimit -l unlimited`).",
                errno.EAGAIN: " Raise RLIMIT_MEMLOCK (`ulimit -l unlimited`).",
                errno.ENOSPC: " Free disk space or move --expert-cold-dir.",
                errno.ENOMEM: " Lower `hot` in the expert map, raise the memory "
                "limit, RLIMIT_MEMLOCK or vm.max_map_count.",
            }.get(error.errno or 0, "")
            raise RuntimeError(
                f"{label}: cannot re-home {format_bytes(num_bytes)} "
                f"({format_bytes(hot_bytes)} of them locked; "
                f"{format_bytes(self.locked_bytes)} are locked already): "
                f"{error.strerror}.{cure}"
            ) from error
        self.locked_bytes += hot_bytes
        memory = (ctypes.c_char * num_bytes).from_address(address)
        # Tensors over the range keep `memory` alive. Not at interpreter exit:
        # threads of the engine may still be reading, and the kernel unmaps anyway.
        weakref.finalize(memory, self._free, address, size, hot_bytes).atexit = False
        flat = torch.frombuffer(memory, dtype=source.dtype)
        return flat.view(source.shape)

    def _free(self, address: int, size: int, hot_bytes: int) -> None:
        _libc().munmap(address, size)
        self.locked_bytes -= hot_bytes

    def _map(self, source: torch.Tensor, size: int, hot: PageMask) -> int:
        """Reserve a range, fill it, and return its address."""
        contents = memoryview(source.detach().view(-1).view(torch.uint8).numpy())
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _mmap(None, size, private)
        try:
            with tempfile.TemporaryFile(dir=self.directory, buffering=0) as file:
                fd = file.fileno()
                cold_bytes = size - int(hot.sum()) * self.page_bytes
                if cold_bytes:
                    os.posix_fallocate(fd, 0, cold_bytes)
                at = 0
                for run in page_runs(hot, self.page_bytes):
                    start, length = run.start, run.num_bytes
                    part = contents[start : start + length]
                    if run.hot:
                        _mlock(address + start, length)
                        ctypes.memmove(
                            address + start,
                            source.data_ptr() + start,
                            len(part),
                        )
                    else:
                        _write(fd, part, at)
                        flags = mmap.MAP_SHARED | _MAP_FIXED
                        _mmap(address + start, length, flags, fd, at)
                        at += length
                # Clean pages can be dropped; what was just written is not clean
                # before it has reached the disk.
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except BaseException:
            _libc().munmap(address, size)
            raise
        return address


def _write(fd: int, part: memoryview, at: int) -> None:
    while part:
        written = os.pwrite(fd, part[:_WRITE_CHUNK_BYTES], at)
        part, at = part[written:], at + written


@functools.cache
def file_backing(directory: str | None) -> FileBacking:
    """The process's backing over a directory."""
    return FileBacking(directory)
