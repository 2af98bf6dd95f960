"""Rules for the repository itself: the real series, style, strays."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipe import refresh
from recipe.lock import load_lock
from recipe.locking import release_files
from recipe.paths import ROOT, cache_dir
from recipe.pin import load_pin, load_pins
from recipe.series import Sources, check_headers, check_ownership, load_series
from recipe.tree import build_tree, compile_tree, overlay_files
from recipe.wheel import fetch_wheel, unpack

# Where the release may be spelled although it is not the pin, and why.
MAY_SPELL_THE_RELEASE = {
    "recipe/pin.toml": "the one place",
}
# Directories of somebody's machine; a clone elsewhere has none of them.
MACHINE_PATHS = re.compile(
    r"(?<![\w.$}])/(root|home|work|Users)/\w|\b[A-Z]:\\\\Users\b"
)
MAY_NAME_A_DIRECTORY: dict[str, str] = {}
STYLED = (".",)


def tracked() -> list[str]:
    """Return the files of the repository, committed or about to be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return [name for name in result.stdout.decode().split("\0") if name]


def texts() -> dict[str, str]:
    """Return the text of every file that is text."""
    found = {}
    for name in tracked():
        path = ROOT / name
        if path.is_file() and b"\0" not in (data := path.read_bytes()):
            found[name] = data.decode(errors="replace")
    return found


def test_the_release_is_spelled_in_one_place() -> None:
    values = []
    for pin in load_pins():
        values += [pin.version, pin.commit]
        values += [flavor.wheel for flavor in pin.flavors.values()]
    pattern = re.compile(
        "|".join(rf"(?<![\d.]){re.escape(value)}(?![\d.]*\d)" for value in values)
    )
    strays = [
        f"{name}:{text[: match.start()].count(chr(10)) + 1}: {match.group()}"
        for name, text in texts().items()
        if name not in MAY_SPELL_THE_RELEASE
        for match in pattern.finditer(text)
    ]
    assert strays == []
    assert set(MAY_SPELL_THE_RELEASE) <= set(tracked())


def test_no_machine_paths() -> None:
    strays = [
        f"{name}: {match.group()}"
        for name, text in texts().items()
        if name not in MAY_NAME_A_DIRECTORY
        and not name.startswith("tests/series/samples")
        for match in MACHINE_PATHS.finditer(text)
    ]
    assert strays == []


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "--quiet", "--no-cache", *STYLED],
        ["ruff", "format", "--check", "--quiet", "--no-cache", *STYLED],
        ["mypy", "--no-error-summary", f"--cache-dir={cache_dir() / 'mypy'}"],
    ],
    ids=["ruff check", "ruff format", "mypy strict"],
)
def test_style(command: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_patches_are_never_converted() -> None:
    command = ["git", "check-attr", "text", "patches/0001-x.patch"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip().endswith("text: unset")


def test_the_series_is_in_order() -> None:
    """E7, E19: every patch, every trailer, every overlay file, without the wheels."""
    sources = Sources()
    patches = load_series(sources)
    assert patches, "the series is empty"
    problems = [*check_ownership(patches, sources), *check_headers(patches, sources)]
    for problem in problems:
        print(problem)
    assert [str(problem) for problem in problems if problem.fatal] == []


@pytest.mark.parametrize("name", [pin.name for pin in load_pins()])
def test_the_lock_covers_the_series(name: str) -> None:
    pin = load_pin(name)
    sources = Sources().of(pin)
    patches = load_series(sources)
    lock = load_lock(sources, pin)
    assert list(lock.after) == [patch.name for patch in patches]
    for patch in patches:
        assert set(lock.after[patch.name]) == set(patch.touched)
        assert set(patch.touched) <= set(lock.pin)
    added = sorted(path for patch in patches for path in patch.adds)
    assert sorted(lock.added) == added
    assert not set(lock.added) & set(lock.pin)


@pytest.mark.cpu
def test_refresh_reproduces_every_byte() -> None:
    pin = load_pin()
    later = [(other, release_files(other)) for other in load_pins()[1:]]
    assert refresh.check(Sources(), release_files(pin), pin, later) == []


@pytest.mark.cpu
@pytest.mark.skipif(shutil.which("quilt") is None, reason="quilt is not installed")
def test_quilt_push_applies_the_series_to_the_wheel(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    unpack(fetch_wheel(load_pin().flavor("cpu")), root)
    command = ["quilt", "--quiltrc", "-", "push", "-a", "--fuzz=0"]
    env = {"QUILT_PATCHES": str(Sources().patches), "PATH": "/usr/bin:/bin"}
    subprocess.run(command, cwd=root, env=env, check=True, capture_output=True)
    added = {path for patch in load_series() for path in patch.adds}
    for path, data in overlay_files().items():
        assert path in added or (root / path).read_bytes() == data


@pytest.mark.cpu
def test_the_cuda_tree_applies_and_compiles(tmp_path: Path) -> None:
    tree = build_tree("cuda", tmp_path / "tree")
    compile_tree(tree.root)
    files = overlay_files()
    assert set(files) == set(tree.files)
    assert all((tree.root / path).read_bytes() == files[path] for path in files)
