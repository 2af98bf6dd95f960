"""The verb ``test``: the tiers, each with the Python it needs."""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipe.env import ensure_env
from recipe.errors import RecipeError
from recipe.paths import ROOT, cache_dir
from recipe.tree import build_tree, series_digest

_OTHERS = "not cpu and not image and not gpu and not sm100 and not drift"


@dataclass(frozen=True)
class Step:
    """One run of pytest.

    Attributes:
        title: What is tested.
        python: Makes or finds the interpreter.
        paths: What to collect, relative to ``where``.
        marker: Marker expression.
        where: Makes or finds the directory to run in.
    """

    title: str
    python: Callable[[], Path]
    paths: tuple[str, ...]
    marker: str
    where: Callable[[], Path] = lambda: ROOT


def _tools() -> Path:
    return Path(sys.executable)


def _cpu() -> Path:
    return ensure_env("cpu")


def _cuda() -> Path:
    return ensure_env("cuda")


def _patched(flavor: str) -> Path:
    """Return the patched tree, made once for each state of the series.

    Trees of other states are removed after a day, since another run may be using one.
    """
    path = cache_dir() / "trees" / f"{flavor}-{series_digest()[:16]}"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        for old in path.parent.iterdir():
            if time.time() - old.stat().st_mtime > DAY:
                shutil.rmtree(old)
        print(f"making the patched {flavor} tree …", file=sys.stderr, flush=True)
        build_tree(flavor, path)
    return path


TIERS: dict[str, tuple[Step, ...]] = {
    "tier1": (Step("series and tooling", _tools, ("tests/series",), _OTHERS),),
    "cpu": (
        Step("the CPU engine", _cpu, ("tests",), "cpu"),
        Step(
            "upstream-bound tests in the patched tree",
            _cpu,
            ("tests",),
            "not gpu and not sm100",
            lambda: _patched("cpu"),
        ),
    ),
    "image": (Step("images", _tools, ("tests/image",), "image"),),
    "gpu": (
        Step("the GPU engine", _cuda, ("tests",), "gpu"),
        Step(
            "upstream-bound tests in the patched tree",
            _cuda,
            ("tests",),
            "not cpu and not sm100",
            lambda: _patched("cuda"),
        ),
    ),
}
DEFAULT = ("tier1", "cpu", "image")
DAY = 24 * 60 * 60  # seconds


def run_step(step: Step, extra: Sequence[str]) -> int:
    """Run pytest for one step and return its status."""
    python, where = step.python(), step.where()
    command = [str(python), "-B", "-m", "pytest", "-p", "no:cacheprovider"]
    command += [f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={where}"]
    command += ["-m", step.marker, *step.paths, *extra]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if where != ROOT:
        env["PYTHONPATH"] = str(where)
    return subprocess.run(command, cwd=where, env=env).returncode


def _run(args: argparse.Namespace) -> int:
    tiers = args.tiers or list(DEFAULT)
    if unknown := [tier for tier in tiers if tier not in TIERS]:
        raise RecipeError(f"no tier {unknown[0]!r}; choose from {', '.join(TIERS)}")
    failed = []
    for tier in tiers:
        for step in TIERS[tier]:
            print(f"== {tier}: {step.title}", flush=True)
            begin = time.monotonic()
            status = run_step(step, args.extra)
            seconds = time.monotonic() - begin
            print(f"== {tier}: status {status} after {seconds:.0f} s", flush=True)
            if status:
                failed.append(f"{tier} ({step.title}, status {status})")
    if failed:
        raise RecipeError("tests failed: " + "; ".join(failed))
    return 0


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Add the verb ``test``."""
    parser = subparsers.add_parser("test", help="run the tests")
    parser.add_argument(
        "tiers", nargs="*", metavar="TIER", help=f"{', '.join(TIERS)}; all but gpu"
    )
    parser.add_argument(
        "--pytest",
        dest="extra",
        action="append",
        default=[],
        metavar="ARG",
        help="an argument for pytest, such as --pytest=-x",
    )
    parser.set_defaults(run=_run)
