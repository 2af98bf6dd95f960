"""The stamp and its start-up check, called by vLLM's own plugin loader."""

import json
import subprocess
import sys
from pathlib import Path

from recipe.apply import sha256
from recipe.pin import Pin
from recipe.series import Sources
from recipe.stamp import MANIFEST, PACKAGE, stamp_files
from recipe.tree import series_digest
from tests.series.support import write_files

FILES = {"vllm/fresh.py": b"x = 1\n", "vllm/plain.py": b"y = 2\n"}


def test_the_stamp_tells_what_was_installed(sources: Sources, pin: Pin) -> None:
    stamp = stamp_files(FILES, sources=sources, pin=pin)
    table = json.loads(stamp[MANIFEST])
    assert table["digest"] == series_digest(sources)
    assert table["version"] == pin.version
    assert table["files"] == {path: sha256(data) for path, data in FILES.items()}
    names = {path.rpartition("/")[2] for path in stamp if ".dist-info/" in path}
    assert names == {"METADATA", "INSTALLER", "entry_points.txt"}


def test_the_stamp_needs_only_the_standard_library(
    sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    write_files(tmp_path, FILES | stamp_files(FILES, sources=sources, pin=pin))
    code = f"import {PACKAGE} as o; o.check(); print(o.overlay_id())"
    command = [sys.executable, "-S", "-c", code]
    env = {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, env=env, capture_output=True, text=True, cwd="/")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip() == series_digest(sources)[:12]
    (tmp_path / "vllm/fresh.py").unlink()
    result = subprocess.run(command, env=env, capture_output=True, text=True, cwd="/")
    assert "RuntimeError: overlay" in result.stderr
    assert "vllm/fresh.py cannot be read" in result.stderr
