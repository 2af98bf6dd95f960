"""Check each exported commit in turn: it imports, passes its tests, is clean to lint.

The commit's files are laid over the pinned CPU wheel, whose machine code a checkout of
vLLM does not have.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from recipe.env import ensure_env
from recipe.errors import RecipeError
from recipe.export_git import Commit, git
from recipe.paths import ROOT, cache_dir
from recipe.pin import Pin
from recipe.testing import Step, Totals, run_step
from recipe.wheel import fetch_wheel, unpack

MARKER = "not gpu and not sm100"
WORKERS = 2
# A pytest plugin: the commit's modules are imported before any test is collected.
_PLUGIN = """
import importlib
import vllm
assert vllm.__file__ == {package!r}, vllm.__file__
for name in {modules!r}:
    importlib.import_module(name)
"""
_PLUGIN_NAME = "import_first"
# What vLLM's hooks refuse in new code beside ruff: by pattern, why.
REFUSED = {
    r"^\s*(import|from) (re|base64)\b": "vLLM imports regex and pybase64 instead",
    r"^\s*(import|from) (pickle|cloudpickle)\b": "vLLM allows no new use of pickle",
    r"^(import|from) (triton|tilelang)\b": "vLLM has wrappers of its own for it",
    r"\btorch\.cuda\.(empty_cache|synchronize|device_count|current_device|set_device"
    r"|mem_get_info|memory_\w+|max_memory_\w+|reset_peak_memory_stats|manual_seed\w*)\b"
    r"|\bwith torch\.cuda\.device\b": "vLLM wants torch.accelerator there",
}
_SPDX = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
)


@dataclass(frozen=True)
class Outcome:
    """What was really run for one commit.

    Attributes:
        commit: Its id.
        imported: Number of modules imported.
        tests: The arguments of pytest.
        passed: Tests that passed.
        skipped: Tests that were skipped.
        marker: Which of them were meant to run.
        linted: Number of files linted.
    """

    commit: str
    imported: int
    tests: tuple[str, ...]
    passed: int
    skipped: int
    marker: str
    linted: int


def verify(repo: Path, commits: Sequence[Commit], pin: Pin) -> list[Outcome]:
    """Check every commit.

    Args:
        repo: The repository.
        commits: The commits, oldest first.
        pin: The release, for its CPU wheel.

    Raises:
        RecipeError: A commit does not import, fails a test or is not clean.
    """
    python = ensure_env("cpu")
    with (
        tempfile.TemporaryDirectory(dir=cache_dir(), prefix="verify.") as work,
        ThreadPoolExecutor(WORKERS) as pool,
    ):
        stock = Path(work) / "stock"
        unpack(fetch_wheel(pin.flavor("cpu")), stock)
        jobs = []
        for number, commit in enumerate(commits, 1):
            tree = Path(work) / str(number)
            shutil.copytree(stock, tree, copy_function=os.link)
            for earlier in commits[: number - 1]:
                _lay(repo, earlier, tree)
            _require_clean(repo, commit, tree)
            jobs.append(pool.submit(_test, commit, tree, python))
        return [job.result() for job in jobs]


def _lay(repo: Path, commit: Commit, tree: Path) -> None:
    """Write the files of a commit into a tree of hard links."""
    for path in commit.changed:
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_bytes(git(repo, "cat-file", "blob", f"{commit.id}:{path}"))


def _test(commit: Commit, tree: Path, python: Path) -> Outcome:
    """Import the modules of a commit and run its own tests, in one process."""
    modules = sorted(
        path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
        for path in commit.changed
        if path.startswith("vllm/") and path.endswith(".py")
    )
    package = str(tree / "vllm" / "__init__.py")
    plugin = _PLUGIN.format(package=package, modules=modules)
    (tree / f"{_PLUGIN_NAME}.py").write_text(plugin)
    tests = tuple(
        value.split(" ")[0]
        for value in commit.patch.trailers["Test"]
        if (tree / value.split(" ")[0].split("::")[0]).exists()
    )
    if not tests:
        raise RecipeError(f"{_where(commit)}: brings no test that is for upstream")
    print(f"testing {_where(commit)}", file=sys.stderr, flush=True)
    totals = Totals()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        step = Step(_where(commit), lambda: python, tests, MARKER, lambda: tree)
        status = run_step(step, ["--quiet", "-p", _PLUGIN_NAME], report)
        totals.add(report, status)
    if totals.failed or not totals.passed:
        raise RecipeError(f"{_where(commit)}: {' '.join(tests)}: {totals}; see above")
    return Outcome(
        commit=commit.id,
        imported=len(modules),
        tests=tests,
        passed=totals.passed,
        skipped=totals.skipped,
        marker=MARKER,
        linted=sum(path.endswith(".py") for path in commit.changed),
    )


def _where(commit: Commit) -> str:
    return f"commit {commit.id[:12]} '{commit.patch.subject}'"


def _lint_config(repo: Path, commit: Commit, tree: Path) -> Path:
    """Return vLLM's own configuration of ruff where the repository has one."""
    if not git(repo, "ls-tree", "--name-only", commit.id, "pyproject.toml"):
        return ROOT / "pyproject.toml"
    config = tree / "pyproject.toml"
    config.write_bytes(git(repo, "cat-file", "blob", f"{commit.id}:pyproject.toml"))
    return config


def _lint(tree: Path, paths: Sequence[str], config: Path) -> Counter[str]:
    """Return what ruff says of files, each finding with its count."""
    if not paths:
        return Counter()
    findings: Counter[str] = Counter()
    common = ["--no-cache", f"--config={config}", *paths]
    for command in (["check", "--output-format=json"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *common],
            cwd=tree,
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1):
            raise RecipeError(f"ruff {command[0]}: {done.stderr.strip()}")
        if command[0] == "check":
            for found in json.loads(done.stdout):
                path = Path(found["filename"]).relative_to(tree)
                findings[f"{path}: {found['code']} {found['message']}"] += 1
        else:
            findings.update(
                f"{line.removeprefix('Would reformat: ')}: not formatted"
                for line in done.stdout.splitlines()
                if line.startswith("Would reformat: ")
            )
    return findings


def _require_clean(repo: Path, commit: Commit, tree: Path) -> None:
    """Lay a commit over its parent's tree; it must bring no finding of the lint set.

    Raises:
        RecipeError: It brings one, or is not signed off.
    """
    author = commit.patch.author
    text = git(repo, "log", "-1", "--format=%B", commit.id).decode()
    if f"\nSigned-off-by: {author}\n" not in text:
        raise RecipeError(f"{_where(commit)}: has no Signed-off-by of {author}")
    config = _lint_config(repo, commit, tree)
    edited = [path for path in commit.patch.touched if path.endswith(".py")]
    before = _lint(tree, edited, config)
    _lay(repo, commit, tree)
    files = [path for path in commit.changed if path.endswith(".py")]
    problems = list((_lint(tree, files, config) - before).elements())
    new = [path for path in commit.patch.adds if path.endswith(".py")]
    problems += refused({path: (tree / path).read_text() for path in new})
    if problems:
        title = f"{_where(commit)}: not clean to vLLM's lint rules:"
        raise RecipeError("\n  ".join([title, *problems]))


def refused(files: Mapping[str, str]) -> list[str]:
    """Return what vLLM's own hooks refuse in new files.

    Args:
        files: Text of each file by path.
    """
    problems = []
    for path, text in files.items():
        if text and not text.startswith(_SPDX):
            problems.append(f"{path}: does not begin with vLLM's SPDX lines")
        for pattern, why in REFUSED.items():
            for match in re.finditer(pattern, text, re.MULTILINE):
                line = text[: match.end()].count("\n") + 1
                problems.append(f"{path}:{line}: {match.group().strip()}: {why}")
    return problems
