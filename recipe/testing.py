"""The verb ``test``: the tiers, each with the Python it needs."""

import argparse
import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from recipe.errors import RecipeError
from recipe.paths import ROOT
from recipe.pin import Pin, load_pins

_OTHERS = "not cpu and not image and not gpu and not sm100"


@dataclass(frozen=True)
class Step:
    """One run of pytest.

    Attributes:
        title: What is tested.
        python: Makes or finds the interpreter.
        paths: What to collect, relative to ``where``.
        marker: Marker expression.
        where: Makes or finds the directory to run in.
        workers: Processes that share the test files between them.
    """

    title: str
    python: Callable[[], Path]
    paths: tuple[str, ...]
    marker: str
    where: Callable[[], Path] = lambda: ROOT
    workers: int = 1


def _tools() -> Path:
    return Path(sys.executable)


def _cpu() -> Path:
    from recipe.env import ensure_env

    return ensure_env("cpu")


def _cpu_tree(pin: Pin | None = None) -> Path:
    from recipe.tree import patched_tree

    return patched_tree("cpu", pin)


def _overlaid() -> Path:
    """This Python, whose vLLM has the overlay: in an image, or after ``install``."""
    try:
        found = find_spec("vllm.config.expert_provider")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise RecipeError(
            f"{sys.executable} has no vLLM with the overlay. Run this in the image, or "
            "set PYTHON to one for which ./build.sh install was run."
        )
    return Path(sys.executable)


def _upstream_tests() -> Path:
    """The overlay's tests alone: beside them, its vLLM would hide the installed one."""
    folder = Path(tempfile.mkdtemp(prefix="upstream-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(ROOT / "overlay" / "tests", folder / "tests")
    return folder


def _at(pin: Pin) -> Step:
    return Step(
        f"upstream-bound tests in the patched tree of {pin.version}",
        _cpu,
        ("tests",),
        "not gpu and not sm100",
        lambda: _cpu_tree(pin),
        workers=2,
    )


TIERS: dict[str, tuple[Step, ...]] = {
    "tier1": (
        Step("series and tooling", _tools, ("tests/series", "tests/demo"), _OTHERS),
    ),
    "cpu": (
        Step("the CPU engine", _cpu, ("tests",), "cpu", workers=2),
        Step(
            "upstream-bound tests in the patched tree",
            _cpu,
            ("tests",),
            "not gpu and not sm100",
            _cpu_tree,
            workers=2,
        ),
        *(_at(pin) for pin in load_pins()[1:]),
    ),
    "image": (Step("images", _tools, ("tests/image",), "image"),),
    "gpu": (
        Step("layers on this GPU", _overlaid, ("tests",), "gpu", _upstream_tests),
        Step("engines on this GPU", _overlaid, ("tests/gpu",), "gpu"),
    ),
}
DEFAULT = ("tier1", "cpu", "image")


@dataclass
class Totals:
    """Tests of all steps, as pytest's JUnit reports count them."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, report: Path, status: int) -> None:
        """Add one report; a run that failed without saying where counts as one."""
        before = self.failed
        if report.exists():
            self._add(report)
        if status and self.failed == before:
            self.failed += 1

    def _add(self, report: Path) -> None:
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = int(suite.get("skipped", 0))
            self.failed += bad
            self.skipped += skipped
            self.passed += int(suite.get("tests", 0)) - bad - skipped

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def run_step(step: Step, extra: Sequence[str], report: Path) -> int:
    """Run pytest for one step, write its JUnit report, and return its status."""
    python, where = step.python(), step.where()
    command = [str(python), "-B", "-m", "pytest", "-p", "no:cacheprovider"]
    command += [f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={where}"]
    command += [f"--junitxml={report}", "-m", step.marker, *step.paths, *extra]
    if step.workers > 1:
        command += [f"--numprocesses={step.workers}", "--dist=loadfile"]
    env = dict(os.environ)
    if step.python is not _overlaid:
        env.pop("PYTHONPATH", None)
    if where != ROOT:
        env["PYTHONPATH"] = os.pathsep.join(
            [str(where), *filter(None, [env.get("PYTHONPATH")])]
        )
    return subprocess.run(command, cwd=where, env=env).returncode


def _run(args: argparse.Namespace) -> int:
    tiers = args.tiers or list(DEFAULT)
    if unknown := [tier for tier in tiers if tier not in TIERS]:
        raise RecipeError(f"no tier {unknown[0]!r}; choose from {', '.join(TIERS)}")
    failed = []
    totals = Totals()
    for tier in tiers:
        for step in TIERS[tier]:
            print(f"== {tier}: {step.title}", flush=True)
            begin = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                report, before = Path(folder) / "report.xml", totals.passed
                try:
                    status = run_step(step, args.extra, report)
                except RecipeError as error:
                    print(f"error: {error}", flush=True)
                    status = 1
                totals.add(report, status)
                if status == 0 and totals.passed == before:
                    print("error: no test of this step ran", flush=True)
                    status = 1
            seconds = time.monotonic() - begin
            print(f"== {tier}: status {status} after {seconds:.0f} s", flush=True)
            if status:
                failed.append(f"{tier} ({step.title}, status {status})")
    if failed:
        print("tests failed: " + "; ".join(failed))
    print(totals, flush=True)
    return int(bool(failed))


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
