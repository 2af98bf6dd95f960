# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Memory headroom from procfs and control groups laid out as files."""

import pytest

from vllm.model_executor.layers.fused_moe.pinned_hot.memory_budget import (
    memory_headroom,
    why_memory_too_small,
)

GIB = 1 << 30
AVAILABLE = 76 * GIB


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def proc(tmp_path):
    root = tmp_path / "proc"
    write(
        root / "meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {AVAILABLE >> 10} kB\n"
    )
    return root


def v2_group(folder, limit, current, active=0, inactive=0):
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{current}\n")
    write(folder / "memory.stat", f"active_file {active}\ninactive_file {inactive}\n")


def test_host_without_groups(proc, tmp_path):
    write(proc / "self/cgroup", "0::/\n")
    headroom = memory_headroom(proc, tmp_path / "cgroup")
    assert headroom.num_bytes == AVAILABLE and headroom.source == "MemAvailable"


def test_v2_limit_counts_page_cache_as_free(proc, tmp_path):
    write(proc / "self/cgroup", "0::/docker/abc\n")
    cgroup = tmp_path / "cgroup"
    v2_group(cgroup / "docker/abc", 8 * GIB, 6 * GIB, active=GIB, inactive=2 * GIB)
    headroom = memory_headroom(proc, cgroup)
    assert headroom.num_bytes == 5 * GIB
    assert headroom.source.endswith("docker/abc/memory.max")


def test_v2_limit_of_a_parent_counts(proc, tmp_path):
    write(proc / "self/cgroup", "0::/slice/unit\n")
    cgroup = tmp_path / "cgroup"
    v2_group(cgroup / "slice/unit", "max", GIB)
    v2_group(cgroup / "slice", 4 * GIB, 3 * GIB)
    assert memory_headroom(proc, cgroup).num_bytes == GIB


def test_v2_namespace_shows_the_limit_at_the_mount_point(proc, tmp_path):
    write(proc / "self/cgroup", "0::/\n")
    v2_group(tmp_path / "cgroup", 8 * GIB, GIB)
    assert memory_headroom(proc, tmp_path / "cgroup").num_bytes == 7 * GIB


def test_v1_limit(proc, tmp_path):
    write(proc / "self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    group = tmp_path / "cgroup/memory/docker/abc"
    write(group / "memory.limit_in_bytes", f"{8 * GIB}\n")
    write(group / "memory.usage_in_bytes", f"{7 * GIB}\n")
    write(group / "memory.stat", f"cache 1\ntotal_inactive_file {GIB}\n")
    headroom = memory_headroom(proc, tmp_path / "cgroup")
    assert headroom.num_bytes == 2 * GIB and "limit_in_bytes" in headroom.source


def test_v1_unlimited_is_no_limit(proc, tmp_path):
    write(proc / "self/cgroup", "4:memory:/\n")
    group = tmp_path / "cgroup/memory"
    write(group / "memory.limit_in_bytes", "9223372036854771712\n")
    write(group / "memory.usage_in_bytes", f"{GIB}\n")
    write(group / "memory.stat", "total_active_file 0\n")
    assert memory_headroom(proc, tmp_path / "cgroup").source == "MemAvailable"


def test_group_that_is_over_its_limit_has_no_headroom(proc, tmp_path):
    write(proc / "self/cgroup", "0::/\n")
    v2_group(tmp_path / "cgroup", GIB, 2 * GIB)
    assert memory_headroom(proc, tmp_path / "cgroup").num_bytes == 0


def test_refusal_has_both_numbers_and_the_source(proc, tmp_path):
    write(proc / "self/cgroup", "0::/\n")
    v2_group(tmp_path / "cgroup", 8 * GIB, GIB)
    headroom = memory_headroom(proc, tmp_path / "cgroup")
    reason = why_memory_too_small(9 * GIB, "hot rows", headroom)
    assert reason is not None
    for word in ("hot rows", "9.00 GiB", "7.00 GiB", "memory.max", "Lower `hot`"):
        assert word in reason
    assert why_memory_too_small(7 * GIB, "hot rows", headroom) is None


def test_this_machine_has_headroom():
    assert memory_headroom().num_bytes > 0
