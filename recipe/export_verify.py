"""Check each exported commit in turn: it imports, passes its tests, is clean to lint.

The commit's files are laid over the pinned CPU wheel, whose machine code a checkout of
vLLM does not have.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recipe.env import ensure_env
from recipe.errors import RecipeError
from recipe.export_git import Commit, git
from recipe.paths import ROOT
from recipe.pin import Pin
from recipe.testing import Step, Totals, run_step
from recipe.wheel import fetch_wheel, unpack

MARKER = "not gpu and not sm100"
WORKERS = 2
_IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import vllm
print(vllm.__file__)
"""
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
    outcomes = []
    with tempfile.TemporaryDirectory() as work:
        tree = Path(work)
        unpack(fetch_wheel(pin.flavor("cpu")), tree)
        for number, commit in enumerate(commits, 1):
            print(
                f"{number}/{len(commits)} {commit.patch.subject}",
                file=sys.stderr,
                flush=True,
            )
            config = _lint_config(repo, commit, tree)
            edited = [path for path in commit.patch.touched if path.endswith(".py")]
            before = _lint(tree, edited, config)
            for path in commit.changed:
                target = tree / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(git(repo, "cat-file", "blob", f"{commit.id}:{path}"))
            _require_clean(repo, commit, tree, config, before)
            outcomes.append(_check(commit, tree, python))
    return outcomes


def _check(commit: Commit, tree: Path, python: Path) -> Outcome:
    where = _where(commit)
    modules = sorted(
        path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
        for path in commit.changed
        if path.startswith("vllm/") and path.endswith(".py")
    )
    shown = subprocess.run(
        [str(python), "-B", "-c", _IMPORT, *modules],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    if shown.returncode or not shown.stdout.strip().split("\n")[-1].startswith(
        str(tree)
    ):
        raise RecipeError(f"{where}: does not import:\n{shown.stderr[-2000:]}")
    tests = tuple(
        value.split(" ")[0]
        for value in commit.patch.trailers.get("Test", ())
        if (tree / value.split(" ")[0].split("::")[0]).exists()
    )
    if not tests:
        raise RecipeError(f"{where}: brings no test of its own that is for upstream")
    totals = Totals()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        step = Step(where, lambda: python, tests, MARKER, lambda: tree, WORKERS)
        totals.add(report, run_step(step, ["--quiet"], report))
    if totals.failed or not totals.passed:
        raise RecipeError(f"{where}: {' '.join(tests)}: {totals}; see above")
    linted = sum(path.endswith(".py") for path in commit.changed)
    return Outcome(
        commit=commit.id,
        imported=len(modules),
        tests=tests,
        passed=totals.passed,
        skipped=totals.skipped,
        marker=MARKER,
        linted=linted,
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


def _require_clean(
    repo: Path, commit: Commit, tree: Path, config: Path, before: Counter[str]
) -> None:
    """Check that a commit brings no finding of vLLM's lint set.

    Args:
        repo: The repository.
        commit: The commit.
        tree: Where its files lie.
        config: The configuration of ruff.
        before: Findings in the edited files before the commit.

    Raises:
        RecipeError: It brings one, or is not signed off.
    """
    author = commit.patch.author
    text = git(repo, "log", "-1", "--format=%B", commit.id).decode()
    if f"\nSigned-off-by: {author}\n" not in text:
        raise RecipeError(f"{_where(commit)}: has no Signed-off-by of {author}")
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


def dump(outcomes: Sequence[Outcome]) -> str:
    """Return outcomes as JSON."""
    return json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n"
