"""build.sh and ``python -m recipe`` as a newcomer meets them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.__main__ import VERBS
from recipe.paths import ROOT

LIMIT = 45


def build(*args: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run build.sh."""
    command = [str(ROOT / "build.sh"), *args]
    return subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, cwd="/"
    )


def recipe(*args: str) -> "subprocess.CompletedProcess[str]":
    """Run the tooling without the shell."""
    command = [sys.executable, "-B", "-m", "recipe", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_build_sh_is_thin() -> None:
    assert len((ROOT / "build.sh").read_text().splitlines()) <= LIMIT


def test_without_python_it_says_how_to_get_one() -> None:
    result = build("tree", "--help", PYTHON="no-such-python")
    assert result.returncode == 1
    assert result.stderr == (
        "error: no-such-python is missing; on Debian: "
        "apt-get install python3 python3-venv\n"
    )


def test_without_venv_it_says_how_to_get_it(tmp_path: Path) -> None:
    """Debian's python3 without python3-venv lacks ensurepip; -I -S shows the same."""
    python = tmp_path / "python3"
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "ensurepip.py").write_text("raise ImportError('no ensurepip')\n")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={blocked} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    result = build("tree", "--help", PYTHON=str(python))
    assert result.returncode == 1
    assert result.stderr.endswith("on Debian: apt-get install python3-venv\n")


def test_build_sh_passes_arguments_and_status_on(tmp_path: Path) -> None:
    result = build("verify", "--python", str(tmp_path / "a b"))
    assert result.returncode == 1
    assert f"error: --python {tmp_path}/a b: " in result.stderr
    assert "name an interpreter" in result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str) -> None:
    result = recipe(verb, "--help")
    assert result.returncode == 0, result.stderr
    assert f"usage: build.sh {verb}" in result.stdout


def test_every_verb_is_listed() -> None:
    result = recipe("--help")
    assert result.returncode == 0, result.stderr
    assert all(f"\n    {verb}" in result.stdout for verb in VERBS)


def test_an_unknown_verb_and_tier_are_errors() -> None:
    assert "invalid choice: 'make'" in recipe("make").stderr
    assert "error: no tier 'all'; choose from tier1" in recipe("test", "all").stderr


def test_refresh_wants_one_thing() -> None:
    result = recipe("refresh")
    assert result.returncode == 1
    assert result.stderr == "error: refresh: give one of --start DIR, DIR, --check\n"
