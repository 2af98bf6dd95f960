"""Compute the locks: what the series makes of each pin, and with which variants.

The series is written for the first pin. A later pin may have a variant of a patch, in
``patches/NAME/`` under the same file name, and always has its own lock there.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from recipe.apply import PinFiles, apply_series, extract, sha256, touched_paths
from recipe.errors import RecipeError
from recipe.lock import Lock, dump_lock
from recipe.patch import Patch, read_patch
from recipe.pin import Pin
from recipe.series import Sources, load_series
from recipe.wheel import WheelFiles, fetch_wheel

# A pin and its files, by flavor.
Release = tuple[Pin, Mapping[str, PinFiles]]


def release_files(pin: Pin) -> dict[str, PinFiles]:
    """Return the files of a pin, by flavor, from its wheels."""
    return {name: WheelFiles(fetch_wheel(pin.flavors[name])) for name in pin.flavors}


def make_lock(
    patches: Sequence[Patch],
    pins: Mapping[str, PinFiles],
    pin: Pin,
    *,
    exact: bool = True,
) -> tuple[Lock, dict[str, bytes]]:
    """Compute the lock by applying the series to the pinned files.

    Args:
        patches: The series.
        pins: The pinned files, by flavor.
        pin: The release, for the hashes of its wheels.
        exact: Refuse hunks that stand at another line than they say.

    Returns:
        The lock, and the final bytes of the edited files.

    Raises:
        RecipeError: A patch does not apply, edits a file that is not the same in every
            flavor, or adds one that exists.
    """
    touched = touched_paths(patches)
    for patch in patches:
        for path in patch.touched:
            versions = {f.read(path) for f in pins.values() if f.has(path)}
            if len(versions) > 1:
                raise RecipeError(
                    f"{patch.name}: {path} differs between the flavors "
                    f"{', '.join(pins)}; make the change elsewhere"
                )
        for path in patch.adds:
            for files in pins.values():
                if files.has(path):
                    raise RecipeError(
                        f"{patch.name}: Adds: {path} exists in {files.label}; edit it"
                    )
    with tempfile.TemporaryDirectory() as work:
        root = Path(work)
        for files in pins.values():
            extract(files, touched, root)
        before = {path: sha256((root / path).read_bytes()) for path in touched}
        after = apply_series(root, patches, None, exact=exact)
        final = {path: (root / path).read_bytes() for path in touched}
    wheels = {name: flavor.sha256 for name, flavor in pin.flavors.items()}
    added = tuple(path for patch in patches for path in patch.adds)
    return Lock(wheels, before, after, added), final


def later_locks(
    patches: Sequence[Patch], sources: Sources, later: Sequence[Release]
) -> dict[str, bytes]:
    """Return what ``patches/`` holds for the pins after the first.

    Args:
        patches: The series at the first pin.
        sources: Where the variants are.
        later: Each pin with its files, by flavor.

    Returns:
        Bytes of every variant and lock, by path below ``patches/``.

    Raises:
        RecipeError: A variant belongs to no patch, or the series does not apply.
    """
    wanted: dict[str, bytes] = {}
    names = {patch.name for patch in patches}
    for pin, files in later:
        folder = sources.patches / pin.name
        variants = {
            path.name: read_patch(path)
            for path in sorted(folder.glob("*.patch") if folder.is_dir() else ())
        }
        if stray := sorted(set(variants) - names):
            raise RecipeError(
                f"{folder / stray[0]}: the series has no patch of this name; rename or "
                "remove it"
            )
        series = [variants.get(patch.name, patch) for patch in patches]
        wanted |= {f"{pin.name}/{name}": variants[name].raw for name in variants}
        wanted[f"{pin.name}/lock.json"] = _later_lock(series, pin, files)
    return wanted


def _later_lock(
    series: Sequence[Patch], pin: Pin, files: Mapping[str, PinFiles]
) -> bytes:
    try:
        return dump_lock(make_lock(series, files, pin, exact=False)[0])
    except RecipeError as error:
        raise RecipeError(
            f"pin {pin.name} ({pin.version}): {error}\n"
            f"  ./build.sh drift --pin {pin.name} shows every hunk and its cure"
        ) from None


def with_variants(
    patches: Sequence[Patch], sources: Sources, release: str, later: Sequence[Release]
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Compute what ``patches/`` holds with the variants of a later pin.

    Args:
        patches: What its repository says that the series is.
        sources: The series.
        release: Number of the release that the repository is of.
        later: Each later pin with its files, by flavor.

    Returns:
        Bytes of every file, by path below ``patches/``; the final bytes of the edited
        files of that release.

    Raises:
        RecipeError: No pin is of that release, or the repository adds, drops, renames
            or reorders patches.
    """
    found = [entry for entry in later if entry[0].version == release]
    if not found:
        raise RecipeError(
            f"the repository is of release {release}, which is not in recipe/pin.toml; "
            "add it there"
        )
    pin, files = found[0]
    written = load_series(replace(sources, variant=None))
    names = [patch.name for patch in written]
    if (others := [patch.name for patch in patches]) != names:
        raise RecipeError(
            f"the repository of pin {pin.name} has {', '.join(others)}; the "
            f"series has {', '.join(names)}; add and rename patches at the first pin"
        )
    lock, final = make_lock(patches, files, pin)
    wanted = {
        name: data
        for name, data in sources.held().items()
        if not name.startswith(f"{pin.name}/")
    }
    for old, new in zip(written, patches, strict=True):
        if not same_change(old, new):
            wanted[f"{pin.name}/{new.name}"] = new.raw
    wanted[f"{pin.name}/lock.json"] = dump_lock(lock)
    return wanted, final


def same_change(one: Patch, other: Patch) -> bool:
    """Tell whether two patches say and do the same, wherever their hunks stand."""

    def contents(patch: Patch) -> object:
        edits = [
            (edit.path, [(hunk.before, hunk.after) for hunk in edit.hunks])
            for edit in patch.edits
        ]
        return patch.subject, patch.author, patch.paragraphs, patch.trailers, edits

    return contents(one) == contents(other)
