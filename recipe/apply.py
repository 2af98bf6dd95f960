"""Apply patches to a directory: zero fuzz, every byte accounted for.

At the pin that the series is written for, line numbers are exact. At another one a hunk
may stand elsewhere in its file, if there is only one place that it can mean.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from recipe.errors import RecipeError
from recipe.git import run_git
from recipe.lock import Lock
from recipe.patch import FileEdit, Patch, split_lines

_OFFSET = re.compile(r"Hunk #\d+ succeeded at \d+ \(offset.*")


class PinFiles(Protocol):
    """Files of the pinned release, wherever they are."""

    label: str

    def has(self, name: str) -> bool:
        """Tell whether there is such a file."""

    def read(self, name: str) -> bytes:
        """Return the bytes of one file."""

    def mode(self, name: str) -> int:
        """Return the permission bits of one file."""


def sha256(data: bytes) -> str:
    """Return the sha256 in hex."""
    return hashlib.sha256(data).hexdigest()


def touched_paths(patches: Sequence[Patch]) -> list[str]:
    """Return every path that the patches edit, in order of first use."""
    return list(dict.fromkeys(path for patch in patches for path in patch.touched))


def extract(files: PinFiles, names: Sequence[str], dest: Path) -> None:
    """Write the named files below ``dest``, bytes and modes kept.

    Raises:
        RecipeError: A file does not exist at the pin.
    """
    for name in names:
        if not files.has(name):
            raise RecipeError(
                f"{name}: a patch edits it, but {files.label} has no such file; "
                "edit only what the wheel holds, new files go to overlay/"
            )
        target = dest / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(files.read(name))
        target.chmod(files.mode(name))


def check_absent(files: PinFiles, patches: Sequence[Patch]) -> None:
    """Check that the pin has none of the added files.

    Raises:
        RecipeError: It has one.
    """
    for patch in patches:
        for path in patch.adds:
            if files.has(path):
                raise RecipeError(
                    f"{patch.name}: Adds: {path} exists in {files.label}; "
                    "edit it with a patch and remove it from overlay/"
                )


def apply_series(
    root: Path, patches: Sequence[Patch], lock: Lock | None, *, exact: bool = True
) -> dict[str, dict[str, str]]:
    """Apply the patches in order to the files below ``root``.

    The first failure raises and leaves ``root`` half done: give a copy.

    Args:
        root: Directory with at least the touched files.
        patches: What to apply.
        lock: The recorded hashes, or ``None`` to find them out.
        exact: Refuse hunks that stand at another line than they say.

    Returns:
        sha256 of each touched file after each patch, by patch name and path.

    Raises:
        RecipeError: A patch does not apply, or not exactly where it says, or a hunk
            could stand in several places, or a file differs from the lock before or
            after.
    """
    after: dict[str, dict[str, str]] = {}
    if lock is not None:
        _check_pin(root, patches, lock)
    for position, patch in enumerate(patches):
        try:
            after[patch.name] = _apply(root, patch, exact)
            if lock is not None:
                _check_after(patch, after[patch.name], lock)
        except RecipeError as error:
            rest = [later.name for later in patches[position + 1 :]]
            left = ", ".join(rest) if rest else "none, it is the last"
            raise RecipeError(
                f"{error}\n  patches not run: {left}\n"
                "  repair: ./build.sh refresh --start DIR makes a git repository with "
                "the series as commits and stops there;\n"
                "  mend the commit, then ./build.sh refresh DIR writes patches/ anew"
            ) from None
    return after


def _check_pin(root: Path, patches: Sequence[Patch], lock: Lock) -> None:
    for path in touched_paths(patches):
        if path not in lock.pin:
            raise RecipeError(
                f"{path}: not in lock.json; run ./build.sh refresh to write it anew"
            )
        found = sha256((root / path).read_bytes())
        if found != lock.pin[path]:
            raise RecipeError(
                f"{path}: sha256 is {found}, the pin has {lock.pin[path]}; "
                "start from an untouched copy of the pinned release"
            )


def _check_after(patch: Patch, found: dict[str, str], lock: Lock) -> None:
    recorded = lock.after.get(patch.name)
    if recorded is None or set(recorded) != set(found):
        raise RecipeError(
            f"{patch.name}: lock.json does not know it or its files; "
            "run ./build.sh refresh to write the lock anew"
        )
    for path, digest in found.items():
        if digest != recorded[path]:
            raise RecipeError(
                f"{patch.name}: {path}: sha256 after the patch is {digest}, lock.json "
                f"says {recorded[path]}; restore the patch from git or run "
                "./build.sh refresh"
            )


def _apply(root: Path, patch: Patch, exact: bool) -> dict[str, str]:
    before = {path: (root / path).read_bytes() for path in patch.touched}
    modes = {path: (root / path).stat().st_mode & 0o777 for path in patch.touched}
    command = ["apply", "-v", "-p1", "--whitespace=nowarn", "-"]
    result = run_git(command, cwd=root, stdin=patch.diff)
    output = result.stderr.decode(errors="replace")
    if result.returncode:
        lines = [line for line in output.split("\n") if line.startswith("error: ")]
        reason = "; ".join(line.removeprefix("error: ") for line in lines) or output
        raise RecipeError(f"{patch.name}: does not apply: {reason}")
    if not exact:
        _check_places(patch, before)
    elif match := _OFFSET.search(output):
        paths = ", ".join(patch.touched)
        raise RecipeError(
            f"{patch.name}: {match.group()} in one of {paths}; line numbers must be "
            "exact, run ./build.sh refresh"
        )
    hashes = {}
    for edit in patch.edits:
        data = (root / edit.path).read_bytes()
        _check_counts(patch, edit, before[edit.path], data)
        # git writes the file anew, with 644 or 755 less the umask.
        (root / edit.path).chmod(modes[edit.path])
        hashes[edit.path] = sha256(data)
    return hashes


def _check_places(patch: Patch, before: dict[str, bytes]) -> None:
    """Check that no hunk was moved to one of several places that look alike."""
    for edit in patch.edits:
        lines = split_lines(before[edit.path])
        for number, hunk in enumerate(edit.hunks, 1):
            places = hunk.places(lines)
            if hunk.start not in places and len(places) > 1:
                raise RecipeError(
                    f"{patch.name}: {edit.path}: hunk {number} fits at lines "
                    f"{', '.join(map(str, places))}; make a variant with more context"
                )


def _check_counts(patch: Patch, edit: FileEdit, before: bytes, after: bytes) -> None:
    """Check that exactly the lines of the patch came and went, each as often."""
    expected = Counter(split_lines(before))
    expected.subtract(edit.removed)
    expected.update(edit.added)
    if (
        +expected != Counter(split_lines(after))
        or min(expected.values(), default=0) < 0
    ):
        raise RecipeError(
            f"{patch.name}: {edit.path}: the patch says {edit.added.total()} in and "
            f"{edit.removed.total()} out, the file shows another change; "
            "run ./build.sh refresh"
        )
