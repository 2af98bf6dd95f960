"""Python environments with the pinned vLLM in them, one per flavor, made once."""

import argparse
import fcntl
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from recipe.errors import RecipeError
from recipe.paths import ROOT, cache_dir
from recipe.pin import Flavor, load_pin
from recipe.system import CPU_ENGINE, require_packages
from recipe.wheel import fetch_wheel

INSTALLER = ROOT / "recipe" / "inside" / "install.py"
READY = ".ready.json"


def env_dir(flavor: Flavor) -> Path:
    """Return where :func:`ensure_env` keeps the environment of a flavor.

    The name holds what the contents depend on: release, wheel and Python version.
    """
    python = "py{}.{}".format(*sys.version_info[:2])
    key = f"{flavor.name}-{flavor.version}-{flavor.sha256[:8]}-{python}"
    return cache_dir() / "envs" / key


def test_requirements() -> list[str]:
    """Return what the tests need beside vLLM, as ``pyproject.toml`` says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *optional["pictures"], *optional["next"]]


def install_command(
    python: str, wheel: str | None, flavor: Flavor, extras: Sequence[str]
) -> list[str]:
    """Return the command that installs a wheel, and completes it, with ``python``.

    Args:
        python: The interpreter to install into.
        wheel: Path of the wheel as that interpreter sees it; ``None`` for only extras.
        flavor: Which build it is.
        extras: More requirements.
    """
    command = [python, str(INSTALLER)]
    if wheel:
        command.append(f"--wheel={wheel}")
        if flavor.name == "cpu":
            command.append(f"--cpu={flavor.version}")
    return command + [f"--extra={extra}" for extra in extras]


def ensure_env(
    flavor: str = "cpu", with_tests: bool = True, where: Path | None = None
) -> Path:
    """Return the Python of an environment that has the pinned vLLM, making it once.

    An environment whose making was interrupted is removed and made anew. Concurrent
    callers wait for the first.

    Args:
        flavor: Which build of the pinned release.
        with_tests: Also install what the tests need.
        where: Directory of the environment, by default :func:`env_dir`.

    Returns:
        Path of the interpreter.

    Raises:
        RecipeError: ``where`` holds something else, or a step failed.
    """
    build = load_pin().flavor(flavor)
    if flavor == "cpu":
        require_packages(CPU_ENGINE)
    directory = (where or env_dir(build)).absolute()
    python = directory / "bin" / "python"
    extras = test_requirements() if with_tests else []
    with locked(directory):
        ready = _ready(directory)
        if ready is not None and ready["wheel"] != build.sha256:
            raise RecipeError(
                f"{directory}: holds another wheel (sha256 {ready['wheel']}); remove "
                "the directory or name another one with --dir"
            )
        if ready is not None and set(extras) <= set(ready["extras"]):
            return python
        if ready is None:
            _create(directory)
            wheel: str | None = str(fetch_wheel(build))
        else:
            extras = sorted({*extras, *ready["extras"]})
            wheel = None
        _say(f"installing {build.package} {build.version} into {directory}")
        command = install_command(str(python), wheel, build, extras)
        if status := subprocess.run(command, stdout=sys.stderr).returncode:
            raise RecipeError(
                f"{directory}: the install ended with status {status}; see above, then "
                "run it again (what is there is not reused)"
            )
        table = {"wheel": build.sha256, "flavor": flavor, "extras": extras}
        partial = directory / f"{READY}.partial"
        partial.write_text(json.dumps(table) + "\n")
        partial.replace(directory / READY)
    return python


def _create(directory: Path) -> None:
    if directory.exists() and any(directory.iterdir()):
        if not (directory / "pyvenv.cfg").exists():
            raise RecipeError(
                f"{directory}: not empty and no Python environment; name another "
                "directory with --dir"
            )
        _say(f"removing the half-made {directory}")
        shutil.rmtree(directory)
    command = [sys.executable, "-m", "venv", str(directory)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        shutil.rmtree(directory, ignore_errors=True)
        raise RecipeError(
            f"{' '.join(command)} failed: {(made.stdout + made.stderr).strip()}; on "
            "Debian it needs: apt-get install python3-venv"
        )


def _ready(directory: Path) -> dict[str, list[str] | str] | None:
    try:
        table: dict[str, list[str] | str] = json.loads((directory / READY).read_text())
    except FileNotFoundError:
        return None
    return table


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time make ``path``, by a lock file beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for the process that is making {path}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(args: argparse.Namespace) -> int:
    print(ensure_env(args.flavor, not args.no_tests, args.dir))
    return 0


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Register the verb ``env``."""
    parser = subparsers.add_parser(
        "env",
        help="make a Python environment with the pinned vLLM and print its Python",
    )
    parser.add_argument("--flavor", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dir", type=Path, help="where to make it (default: in the cache directory)"
    )
    parser.add_argument(
        "--no-tests", action="store_true", help="leave out what only the tests need"
    )
    parser.set_defaults(run=_run)
