# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ranges of locked and file-backed pages, on the real kernel interfaces."""

import ctypes
import gc
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import textwrap

import numpy as np
import pytest
import torch

from tests.kernels.moe.pinned_hot_utils import pages_in_memory
from vllm.model_executor.layers.fused_moe.pinned_hot.backing import PlannedBytes
from vllm.model_executor.layers.fused_moe.pinned_hot.file_backing import (
    FileBacking,
    memory_file_system,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.memory_budget import (
    lockable_bytes,
)
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="the file backing serves the CPU backend"
)

PAGE = mmap.PAGESIZE
ROWS = 16
SHAPES = ((ROWS, 64, 32), (ROWS, 3, 77), (ROWS, 1, 1), (ROWS, 640, 128))
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


@pytest.fixture
def backing(tmp_path):
    return FileBacking(str(tmp_path))


def random_bytes(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator)
    return raw.to(torch.uint8).view(dtype).squeeze(-1)


def num_pages(tensor):
    return -(-tensor.numel() * tensor.element_size() // PAGE)


def same_bytes(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", ("none", "all", "even", "first", "last"))
def test_range_equals_source(backing, shape, dtype, pattern):
    source = random_bytes(shape, dtype)
    hot = np.zeros(num_pages(source), dtype=bool)
    hot[
        {
            "none": slice(0),
            "all": slice(None),
            "even": slice(None, None, 2),
            "first": slice(1),
            "last": slice(-1, None),
        }[pattern]
    ] = True
    home = backing.build(source, hot, "layer.weight")
    assert home.shape == source.shape and home.stride() == source.stride()
    assert home.dtype == dtype and home.device == source.device
    assert home.data_ptr() != source.data_ptr() and home.data_ptr() % PAGE == 0
    assert same_bytes(home, source)


def test_cold_pages_are_not_in_memory_and_hot_pages_are(backing):
    source = random_bytes((ROWS, 64, 1024), torch.bfloat16)
    hot = np.zeros(num_pages(source), dtype=bool)
    hot[3:9] = True
    home = backing.build(source, hot, "layer.weight")
    assert pages_in_memory(home) == hot.tolist()
    # Reading brings them in, and the bytes are right.
    assert same_bytes(home, source)


def test_writes_reach_both_kinds_of_pages(backing):
    """A weight reload copies into the range."""
    source = random_bytes((ROWS, 64, 32), torch.bfloat16)
    hot = np.arange(num_pages(source)) % 2 == 0
    home = backing.build(source, hot, "layer.weight")
    pointer = home.data_ptr()
    new = random_bytes((ROWS, 64, 32), torch.bfloat16, seed=1)
    home.copy_(new)
    assert same_bytes(home, new) and home.data_ptr() == pointer


def test_range_lives_as_long_as_any_view(backing):
    source = random_bytes((ROWS, 64, 32), torch.float32)
    hot = np.arange(num_pages(source)) % 3 == 0
    view = backing.build(source, hot, "layer.weight")[5]
    gc.collect()
    others = [backing.build(torch.zeros_like(source), hot, "other") for _ in range(20)]
    assert same_bytes(view, source[5])
    assert backing.locked_bytes == 21 * int(hot.sum()) * PAGE
    address = view.data_ptr() // PAGE * PAGE
    del view, others
    gc.collect()
    assert backing.locked_bytes == 0
    status = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(address), ctypes.c_size_t(PAGE), ctypes.byref(ctypes.c_ubyte())
    )
    assert status == -1  # unmapped


def test_no_file_is_ever_visible(backing, tmp_path):
    source = random_bytes((ROWS, 64, 32), torch.float32)
    hot = np.zeros(num_pages(source), dtype=bool)
    home = backing.build(source, hot, "layer.weight")
    assert home.numel() and os.listdir(tmp_path) == []


def test_memory_file_system_is_refused():
    if memory_file_system("/dev/shm") is None:
        pytest.skip("/dev/shm is no tmpfs here")
    with pytest.raises(ValueError, match="--expert-cold-dir /dev/shm: lies on tmpfs"):
        FileBacking("/dev/shm").validate()


def test_directory_must_exist(tmp_path):
    with pytest.raises(ValueError, match="not a directory"):
        FileBacking(str(tmp_path / "absent")).validate()


def test_usable_directory_passes(backing):
    backing.validate()


def test_budget_refusals_have_numbers(backing):
    backing.check(PlannedBytes(hot=0, total=0, largest_layer=0), ranks_on_node=1)
    huge = 1 << 50
    with pytest.raises(ValueError, match="1048576.00 GiB of disk"):
        backing.check(PlannedBytes(0, huge, 0), ranks_on_node=1)
    with pytest.raises(ValueError, match="1048576.00 GiB of (locked )?memory"):
        backing.check(PlannedBytes(huge, huge, 0), ranks_on_node=1)
    # Every rank of the node takes its share of the same memory.
    available = 1 << 40
    with pytest.raises(ValueError, match="8192.00 GiB of (locked )?memory"):
        backing.check(PlannedBytes(available, available, 0), ranks_on_node=8)


def run_python(code, **kwargs):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        **kwargs,
    )


BUILD = """
    import numpy as np, resource, torch
    from vllm.model_executor.layers.fused_moe.pinned_hot.file_backing import (
        FileBacking,
    )
    backing = FileBacking({directory!r})
    source = torch.ones(64, 16384)
    pages = source.numel() * 4 // backing.page_bytes
"""


@pytest.fixture
def open_directory():
    """A directory that a process without privileges can write to as well."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        yield directory


def test_lock_limit_is_an_error_that_names_the_tensor(open_directory):
    """No half-locked range, no fall-back to pages that can be swapped."""
    if lockable_bytes() is None and os.geteuid() != 0:
        pytest.skip("locking is unlimited and cannot be limited here")
    code = (
        BUILD.format(directory=open_directory)
        + """
    import ctypes
    # Drop CAP_IPC_LOCK (14) from the bounding set and all privileges with it.
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(24, 14, 0, 0, 0) == 0 or __import__("os").geteuid()
    if __import__("os").geteuid() == 0:
        __import__("os").setresuid(65534, 65534, 65534)
    small = torch.ones(4, 16384)
    kept = backing.build(
        small, np.arange(small.numel() * 4 // backing.page_bytes) < 32, "a.w13"
    )
    try:
        backing.build(source, np.ones(pages, dtype=bool), "model.layers.7.w2")
    except RuntimeError as error:
        print(error)
    """
    )
    result = run_python(code)
    message = result.stdout
    assert "model.layers.7.w2" in message, result.stderr[-2000:]
    assert "4.00 MiB of them locked; 0.12 MiB are locked already" in message
    assert "RLIMIT_MEMLOCK" in message


def test_full_disk_is_an_error_before_weights_load(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not permitted here")
    try:
        backing = FileBacking(str(tmp_path))
        big = torch.empty(64, 16384)
        cold = np.zeros(big.numel() * 4 // PAGE, dtype=bool)
        with pytest.raises(RuntimeError, match="a.w2: cannot re-home.*disk space"):
            backing.build(big, cold, "a.w2")
        assert backing.locked_bytes == 0
    finally:
        gc.collect()
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_cold_bytes_take_no_private_memory(tmp_path):
    """Ranges far larger than the limit on private memory (RLIMIT_DATA)."""
    code = (
        BUILD.format(directory=str(tmp_path))
        + """
    used = int(open("/proc/self/statm").read().split()[5]) * backing.page_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (used + (24 << 20),) * 2)
    try:
        torch.empty(64 << 20, dtype=torch.uint8).zero_()
        raise SystemExit("the limit does not bite")
    except RuntimeError:
        pass
    homes = [backing.build(source, np.arange(pages) < 8, "layer") for _ in range(32)]
    assert all(torch.equal(home, source) for home in homes)
    print("made", sum(h.numel() * 4 for h in homes) >> 20, "MiB")
    """
    )
    result = run_python(code)
    assert result.stdout.strip() == "made 128 MiB", result.stderr[-2000:]


def test_rlimit_is_read(monkeypatch, tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/uid_map").write_text("0 0 4294967295\n")
    (tmp_path / "self/status").write_text("CapEff:\t0000000000000000\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    assert lockable_bytes(tmp_path) == 65536
    (tmp_path / "self/status").write_text("CapEff:\t000001ffffffffff\n")
    assert lockable_bytes(tmp_path) is None
    # In a user namespace the capability does not reach as far as mlock.
    (tmp_path / "self/uid_map").write_text("0 1000 1\n")
    assert lockable_bytes(tmp_path) == 65536
