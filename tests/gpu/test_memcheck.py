"""Layers and ranges under compute-sanitizer: no access outside of what is mapped."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, TIMEOUT_S

pytestmark = pytest.mark.gpu

FILE = "tests/kernels/moe/test_pinned_hot_cuda.py"
CASES = (
    "test_range_is_an_ordinary_tensor[hchc]",
    "test_graph_replay_is_bit_identical",
    "test_layer_is_bit_identical[host-bf16]",
)


def test_no_invalid_access(tmp_path: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    shutil.copytree(ROOT / "overlay" / "tests", tmp_path / "tests")
    command = [sanitizer, "--tool=memcheck", "--error-exitcode=99"]
    # What torch asks the driver for and does not get is no error of a kernel.
    command += ["--report-api-errors=no", sys.executable, "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", f"--config-file={ROOT / 'pyproject.toml'}"]
    command += [f"--rootdir={tmp_path}", "-m", "gpu"]
    command += [f"{FILE}::{case}" for case in CASES]
    ran = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output[-6000:]
    assert re.search(rf"\b{len(CASES)} passed", output), output[-6000:]
    assert "ERROR SUMMARY: 0 errors" in output
