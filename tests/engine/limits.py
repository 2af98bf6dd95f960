"""A memory limit for one process, as a container would set it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CGROUP = Path("/sys/fs/cgroup")


def _own_group() -> tuple[Path, str]:
    """Folder of this process's memory group, and the file that holds its limit."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    groups = {
        tuple(controllers.split(",")): path
        for _, controllers, path in (line.split(":", 2) for line in lines)
    }
    for controllers, path in groups.items():
        if "memory" in controllers:
            return CGROUP / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
    return CGROUP / groups[("",)].lstrip("/"), "memory.max"


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[Callable[[], None]]:
    """Make a control group with a limit; yields what a child calls to enter it.

    Skips the test where control groups cannot be made.
    """
    own, limit = _own_group()
    group = own / f"pinned-hot-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(num_bytes))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no memory control group can be made here: {error}")
    try:
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        group.rmdir()
