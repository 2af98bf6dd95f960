"""System packages that a step needs: found, installed as root, or named."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping

from recipe.errors import RecipeError


def apt_install(command: str) -> None:
    """Run an ``apt-get install`` command after refreshing the package lists.

    Raises:
        RecipeError: It failed.
    """
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update", "-qq"], command.split()):
        print(f"running {' '.join(step)}", file=sys.stderr, flush=True)
        if subprocess.run(step, env=environment, stdout=sys.stderr).returncode:
            raise RecipeError(f"{' '.join(step)} failed; its own message is above")


def is_debian_root() -> bool:
    """Whether this process can install Debian packages."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def has_library(name: str) -> bool:
    """Whether the dynamic linker finds a shared library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


# Probe by Debian package. The extension modules of the CPU wheel are linked to it.
CPU_ENGINE: Mapping[str, Callable[[], bool]] = {
    "libnuma1": lambda: has_library("libnuma.so.1"),
}

# Draws the pages of `vllm expert-map show` in their tests.
BROWSER: Mapping[str, Callable[[], bool]] = {
    "chromium": lambda: shutil.which("chromium") is not None,
}


def require_packages(probes: Mapping[str, Callable[[], bool]]) -> None:
    """Make sure that packages are there, installing them where that is possible.

    Args:
        probes: For each Debian package a test whether what it brings is there.

    Raises:
        RecipeError: Some are missing and cannot be installed by this process.
    """
    missing = [package for package, present in probes.items() if not present()]
    if not missing:
        return
    command = f"apt-get install --yes {' '.join(missing)}"
    if not is_debian_root():
        raise RecipeError(
            f"{', '.join(missing)} is missing. On Debian, as root: {command}"
        )
    apt_install(command)
    if still := [package for package in missing if not probes[package]()]:
        raise RecipeError(f"{', '.join(still)} was installed and is still not found")
