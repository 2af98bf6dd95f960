# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How much memory this process may still take, and whether a plan fits.

The host's free memory is not the answer inside a container: the limit of every
control group above the process counts too. Page cache counts against a control
group but can be reclaimed, so it is headroom.

Sources: Linux Documentation/admin-guide/cgroup-v2.rst (memory.max,
memory.current, memory.stat), cgroup-v1/memory.rst, proc(5), capabilities(7).
"""

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm.model_executor.layers.fused_moe.expert_weight_provider import format_bytes

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
_CAP_IPC_LOCK = 14


@dataclass(frozen=True)
class Headroom:
    """Memory that can still be taken.

    Attributes:
        num_bytes: Bytes.
        source: Which limit said so.

    """

    num_bytes: int
    source: str


def memory_headroom(proc: Path = PROC, cgroup: Path = CGROUP) -> Headroom:
    """Find the tightest of MemAvailable and all control-group limits.

    Args:
        proc: Mount point of procfs.
        cgroup: Mount point of the control-group hierarchy (v2, or the folder
            that holds the v1 `memory` controller).

    """
    meminfo = _key_values(proc / "meminfo")
    limits = [Headroom(meminfo["MemAvailable:"] * 1024, "MemAvailable")]
    limits += _cgroup_v2(proc, cgroup)
    limits += _cgroup_v1(proc, cgroup)
    return min(limits, key=lambda limit: limit.num_bytes)


def lockable_bytes(proc: Path = PROC) -> int | None:
    """Bytes this process may lock; None if unlimited (RLIMIT_MEMLOCK, privileges)."""
    # mlock(2) asks for the capability in the initial user namespace, where every id
    # maps to itself.
    initial = (proc / "self/uid_map").read_text().split() == ["0", "0", "4294967295"]
    status = _key_words(proc / "self/status")
    if initial and int(status["CapEff:"], 16) >> _CAP_IPC_LOCK & 1:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def why_memory_too_small(need: int, what: str, headroom: Headroom) -> str | None:
    """Say why `need` bytes do not fit, with both numbers, or None if they do."""
    if need <= headroom.num_bytes:
        return None
    return (
        f"{what} need {format_bytes(need)} of memory and {headroom.source} leaves "
        f"{format_bytes(headroom.num_bytes)}. Lower `hot` in the expert map, or "
        "raise the limit."
    )


def _key_words(path: Path) -> dict[str, str]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: words[1] for words in lines if len(words) >= 2}


def _key_values(path: Path) -> dict[str, int]:
    return {key: int(word) for key, word in _key_words(path).items()}


def _self_cgroup(proc: Path, controller: str) -> Path | None:
    """Path of the process within a hierarchy; `controller` is "" for v2."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return Path(path.lstrip("/"))
    return None


def _levels(root: Path, leaf: Path) -> Iterator[Path]:
    """The leaf's folder and every folder above it, up to the mount point."""
    yield root / leaf
    for parent in leaf.parents:
        yield root / parent


def _cgroup_v2(proc: Path, root: Path) -> list[Headroom]:
    leaf = _self_cgroup(proc, "")
    if leaf is None:
        return []
    found = []
    for level in _levels(root, leaf):
        try:
            limit = (level / "memory.max").read_text().strip()
            current = int((level / "memory.current").read_text())
            stat = _key_values(level / "memory.stat")
        except OSError:
            continue  # the root group has no limit; a namespace may hide the leaf
        if limit != "max":
            reclaimable = stat.get("active_file", 0) + stat.get("inactive_file", 0)
            free = int(limit) - current + reclaimable
            found.append(Headroom(max(free, 0), f"{level / 'memory.max'}"))
    return found


def _cgroup_v1(proc: Path, root: Path) -> list[Headroom]:
    leaf = _self_cgroup(proc, "memory")
    if leaf is None:
        return []
    found = []
    for level in _levels(root / "memory", leaf):
        try:
            limit = int((level / "memory.limit_in_bytes").read_text())
            usage = int((level / "memory.usage_in_bytes").read_text())
            stat = _key_values(level / "memory.stat")
        except OSError:
            continue
        files = stat.get("total_active_file", 0) + stat.get("total_inactive_file", 0)
        free = limit - usage + files
        found.append(Headroom(max(free, 0), f"{level / 'memory.limit_in_bytes'}"))
    return found
