"""The finalize of layout `split` against FlashInfer's kernels, from their sources."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

COMPARE = Path(__file__).parent / "finalize" / "compare.py"
SOURCES = os.environ.get("FLASHINFER_SOURCES")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        SOURCES is None or shutil.which("nvcc") is None,
        reason="needs nvcc, and FLASHINFER_SOURCES=FOLDER with an unpacked wheel of "
        "flashinfer-python",
    ),
]


def test_every_bit_equals_flashinfers(tmp_path: Path) -> None:
    out = tmp_path / "finalize.json"
    command = [sys.executable, str(COMPARE), "--flashinfer", str(SOURCES)]
    command += ["--library", str(tmp_path / "finalize.so"), "--out", str(out)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads(out.read_text())
    assert len(result["differing_by_top_k"]) == 16
    assert not any(result["differing_by_top_k"].values())


@pytest.mark.parametrize("arch", ("compute_90a", "compute_100a"))
def test_flashinfer_sums_with_one_instruction(arch: str, tmp_path: Path) -> None:
    """What is compared on one architecture is the arithmetic of the other."""
    spec = importlib.util.spec_from_file_location("compare_finalize", COMPARE)
    assert spec is not None and spec.loader is not None
    compare = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = compare
    spec.loader.exec_module(compare)
    ptx = tmp_path / "finalize.ptx"
    subprocess.run(compare.nvcc_command(Path(str(SOURCES)), arch, ptx), check=True)
    kernels = 0
    for name, body in re.findall(
        r"\.entry (\w*finalizeKernel\w*)\((.*?)\n}", ptx.read_text(), re.DOTALL
    ):
        if "float_e4m3" in name:
            continue
        kernels += 1
        arithmetic = Counter(re.findall(r"\b(?:fma|mul|sub|div)[.a-z]*\.f32\b", body))
        assert set(arithmetic) == {"fma.rn.ftz.f32"}, name
    # Scalar and vector, two dtypes, two of weights, three unrollings, with PDL or not.
    assert kernels == 48
