# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Address ranges of one GPU whose pages lie in device or in host memory.

CUDA's virtual memory management reserves addresses, creates physical memory at a
location, and maps one to the other. Kernels see one ordinary pointer.

Source: CUDA Driver API, section "Virtual Memory Management".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeAlias

import torch

try:
    from cuda.bindings import driver
except ImportError:
    # CPU builds of torch do not bring the bindings; `DeviceBacking.why_not_here`
    # says so before anything here is called.
    driver = None


Location: TypeAlias = "driver.CUmemLocation"
"""A kind of memory: a GPU's, or the host's at a NUMA node."""


class DriverError(RuntimeError):
    """A driver call failed.

    Attributes:
        result: The driver's result code.

    """

    def __init__(self, call: str, result: driver.CUresult):
        super().__init__(f"{call} failed with {result.name}")
        self.result = result

    @property
    def out_of_memory(self) -> bool:
        return self.result == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY


def _call(function: Callable[..., tuple[Any, ...]], *args: object) -> Any:
    result, *values = function(*args)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(function.__name__, result)
    return values[0] if values else None


def _properties(location: Location) -> driver.CUmemAllocationProp:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = location
    return properties


def device_location(device: int) -> Location:
    """Memory of a GPU, by its index in this process."""
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return location


def host_location(device: int) -> Location:
    """Host memory, of the NUMA node nearest to a GPU where the driver names one."""
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
    node = _call(driver.cuDeviceGetAttribute, attribute, device)
    location = driver.CUmemLocation()
    if node >= 0:
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
        location.id = node
    else:
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
        location.id = 0
    return location


def granularity(location: Location) -> int:
    """Smallest size of physical memory at a location, bytes."""
    flags = driver.CUmemAllocationGranularity_flags
    return _call(
        driver.cuMemGetAllocationGranularity,
        _properties(location),
        flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
    )


def supports_ranges(device: int) -> bool:
    """Whether the driver offers virtual memory management on a GPU."""
    attribute = driver.CUdevice_attribute
    return bool(
        _call(
            driver.cuDeviceGetAttribute,
            attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            device,
        )
    )


class Piece(Protocol):
    """Physical memory that a range maps as a whole.

    Attributes:
        num_bytes: Whole multiples of the granularity.

    """

    num_bytes: int

    def handle(self) -> AbstractContextManager[Any]:
        """Give the driver's handle, to be mapped before the context ends."""
        ...


def create_memory(location: Location, num_bytes: int) -> Any:
    """Make physical memory at a location; the caller releases the handle.

    Raises:
        DriverError: The memory cannot be had.

    """
    return _call(driver.cuMemCreate, num_bytes, _properties(location), 0)


def release_memory(handle: Any) -> None:
    """Give a handle back; its memory goes with the last mapping."""
    _call(driver.cuMemRelease, handle)


class NewMemory:
    """Memory that goes with its mapping.

    Args:
        num_bytes: Whole multiples of the granularity.
        create: Makes that many bytes when they are mapped.

    """

    def __init__(self, num_bytes: int, create: Callable[[int], Any]):
        self.num_bytes = num_bytes
        self.create = create

    @contextmanager
    def handle(self) -> Iterator[Any]:
        handle = self.create(self.num_bytes)
        try:
            yield handle
        finally:
            release_memory(handle)


class DeviceMemory:
    """Memory of a GPU that several ranges may map.

    Freed when it is collected and no range maps it.

    Args:
        device: Index of the GPU.
        num_bytes: Whole multiples of the granularity.

    Raises:
        DriverError: The memory cannot be had.

    """

    def __init__(self, device: int, num_bytes: int):
        self.num_bytes = num_bytes
        self._handle = create_memory(device_location(device), num_bytes)
        weakref.finalize(self, release_memory, self._handle).atexit = False

    @contextmanager
    def handle(self) -> Iterator[Any]:
        yield self._handle


class DeviceRange:
    """A mapped address range.

    Freed when it is collected: after all work of the device is done, unmapped,
    then its addresses given back. The physical memory goes with its last mapping.

    Args:
        device: Index of the GPU that accesses the range.
        pieces: The memory behind it, in address order.
        page_bytes: Alignment of the range.

    Raises:
        DriverError: Some memory cannot be had; nothing stays allocated.

    """

    def __init__(self, device: int, pieces: Sequence[Piece], page_bytes: int):
        self.device = device
        self.pieces = pieces  # what others share is theirs as long as this one lives
        self.num_bytes = sum(piece.num_bytes for piece in pieces)
        self.address = int(
            _call(driver.cuMemAddressReserve, self.num_bytes, page_bytes, 0, 0)
        )
        mapped = 0
        try:
            for piece in pieces:
                with piece.handle() as handle:
                    start = self.address + mapped
                    _call(driver.cuMemMap, start, piece.num_bytes, 0, handle, 0)
                mapped += piece.num_bytes
            access = driver.CUmemAccessDesc()
            access.location = device_location(device)
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _call(driver.cuMemSetAccess, self.address, self.num_bytes, [access], 1)
        except BaseException:
            _free(self.address, mapped, self.num_bytes, None)
            raise
        # Not at interpreter exit: the driver may be gone by then, and frees all.
        weakref.finalize(
            self, _free, self.address, self.num_bytes, self.num_bytes, device
        ).atexit = False

    def tensor(self, like: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Make a tensor over the range, which lives as long as the tensor.

        Args:
            like: Contiguous tensor that gives shape and dtype.
            start: Bytes of the range before the tensor.

        """
        num_bytes = like.numel() * like.element_size()
        memory = _Memory(self, start, num_bytes)
        flat = torch.as_tensor(memory, device=f"cuda:{self.device}")
        return flat.view(like.dtype).view(like.shape)


class _Memory:
    """Bytes of a range for torch, which holds on to this object.

    Format: CUDA Array Interface, version 3 (Numba documentation).
    """

    def __init__(self, owner: DeviceRange, start: int, num_bytes: int):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (owner.address + start, False),
            "version": 3,
            "strides": None,
        }


def _free(address: int, mapped: int, reserved: int, device: int | None) -> None:
    if device is not None:
        # A kernel may still read what nobody holds any more.
        torch.accelerator.synchronize(device)
    if mapped:
        _call(driver.cuMemUnmap, address, mapped)
    _call(driver.cuMemAddressFree, address, reserved)
