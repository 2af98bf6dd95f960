"""The real series: at every later release, and as commits that are checked in turn."""

from pathlib import Path

import pytest

from recipe import drift
from recipe.apply import PinFiles
from recipe.drift import CONFLICT
from recipe.export import export
from recipe.export_git import upstream_bound
from recipe.pin import Pin, load_pin, load_pins
from recipe.series import Sources, load_series
from recipe.tree import overlay_files
from recipe.wheel import WheelFiles, fetch_wheel
from tests.series.support import git

pytestmark = pytest.mark.cpu

LATER = pytest.mark.parametrize("pin", load_pins()[1:], ids=lambda pin: pin.name)


def release(pin: Pin) -> WheelFiles:
    return WheelFiles(fetch_wheel(pin.any_flavor))


class Changed:
    """A release with some files changed."""

    def __init__(self, files: PinFiles, changes: dict[str, bytes]) -> None:
        self.label = f"{files.label}, changed"
        self.has, self.mode = files.has, files.mode
        self._files, self._changes = files, changes

    def read(self, name: str) -> bytes:
        return self._changes.get(name) or self._files.read(name)


@LATER
def test_the_series_fits_every_later_release(pin: Pin) -> None:
    sources = Sources()
    found = drift.measure(sources, release(load_pin()), release(pin), pin)
    print("\n".join(drift.report(found, "")))
    assert found.fits
    assert len(found.patches) == len(load_series(sources))
    assert found.symbols > 10
    overlay_files(source=release(pin), sources=sources, pin=pin)


@LATER
def test_a_broken_release_is_told_with_patch_hunk_and_cure(pin: Pin) -> None:
    """A line between those that the first hunk of each patch stands on is changed."""
    sources = Sources()
    series = load_series(sources.of(pin))
    files = release(pin)
    for patch in series[:1] + series[-1:]:
        edit = patch.edits[0]
        kept = [line for line in edit.hunks[0].before if line in edit.hunks[0].after]
        line = max(kept, key=len)
        data = files.read(edit.path).replace(line, b"changed = 'upstream'\n")
        broken = Changed(files, {edit.path: data})
        found = drift.measure(sources, release(load_pin()), broken, pin)
        statuses = {drifted.name: drifted.status for drifted in found.patches}
        assert statuses[patch.name] == CONFLICT
        text = "\n".join(drift.report(found, f" --pin {pin.name}"))
        block = text[text.index(f"conflict  {patch.name}") :]
        assert f"{edit.path} hunk 1, line {edit.hunks[0].start}" in block
        assert "changed = 'upstream'" in block
        assert f"cure: ./build.sh refresh --start DIR --pin {pin.name}" in block


@LATER
def test_the_files_of_every_later_release_compile(pin: Pin) -> None:
    files = overlay_files(pin=pin)
    assert set(files) == set(overlay_files())
    for path, data in files.items():
        if path.endswith(".py"):
            compile(data, path, "exec", dont_inherit=True)


def test_every_exported_commit_imports_passes_and_is_clean(tmp_path: Path) -> None:
    """What ``--verify`` does; it raises for a commit that does not."""
    repo, out = tmp_path / "vllm", tmp_path / "out"
    made = export(repo, out, check=True)
    patches = upstream_bound(load_series())
    subjects = git(repo, "log", "--reverse", "--format=%s", "pin..pinned-hot-experts")
    assert subjects.splitlines() == [patch.subject for patch in patches]
    bodies = "".join(path.read_text() for path in made.texts[1:])
    for commit in made.commits:
        (line,) = [
            x for x in bodies.splitlines() if x.startswith(f"| {commit.id[:12]}")
        ]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[2].endswith("passed") and int(cells[2].split()[0]) > 0
        assert cells[3].endswith("files clean")
    assert "was checked" in made.texts[0].read_text()
