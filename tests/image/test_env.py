"""The Python environment: what is reused, what is refused, what is made anew."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipe.env import READY, ensure_env, env_dir, install_command
from recipe.errors import RecipeError
from recipe.paths import ROOT
from tests.image.support import CPU

pytestmark = pytest.mark.image

VENV_LIMIT_S = 60.0


def test_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(RecipeError, match="no Python environment"):
        ensure_env(where=tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_environment_of_another_wheel_is_refused(tmp_path: Path) -> None:
    table = {"wheel": "0" * 64, "flavor": "cpu", "extras": []}
    (tmp_path / READY).write_text(json.dumps(table))
    with pytest.raises(RecipeError, match="holds another wheel"):
        ensure_env(where=tmp_path)


def test_ready_environment_is_returned_as_it_is(tmp_path: Path) -> None:
    table = {"wheel": CPU.sha256, "flavor": "cpu", "extras": []}
    (tmp_path / READY).write_text(json.dumps(table))
    found = ensure_env(with_tests=False, where=tmp_path)
    assert found == tmp_path / "bin" / "python"
    assert os.listdir(tmp_path) == [READY]


def test_environment_is_keyed_by_wheel_and_python() -> None:
    name = env_dir(CPU).name
    assert CPU.sha256[:8] in name
    assert "py{}.{}".format(*sys.version_info[:2]) in name


def test_only_the_cpu_flavor_is_completed() -> None:
    command = install_command("python", "x.whl", CPU, ["hypothesis"])
    assert [word.partition("=")[0] for word in command[2:]] == [
        "--wheel",
        "--cpu",
        "--extra",
    ]
    assert len(install_command("python", None, CPU, ["hypothesis"])) == 3


def start(directory: Path, log: Path) -> None:
    """Start making an environment, and kill it once it has begun to install."""
    command = [sys.executable, "-m", "recipe", "env", "--dir", str(directory)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            limit = time.monotonic() + VENV_LIMIT_S
            while "installing " not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < limit, log.read_text()
                time.sleep(0.1)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_half_made_environment_is_not_reused(tmp_path: Path) -> None:
    directory, log = tmp_path / "env", tmp_path / "log"
    start(directory, log)
    assert (directory / "pyvenv.cfg").exists()
    assert not (directory / READY).exists()
    (directory / "left-over").touch()
    start(directory, log)
    assert f"removing the half-made {directory}" in log.read_text()
    assert not (directory / "left-over").exists()
