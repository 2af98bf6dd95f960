"""Put the overlay onto an installed vLLM, take it away again, verify it.

RECORD of the installed distribution is left as it is: pip then reinstalls or removes
vLLM as ever, and the start-up check of the stamp notices if that reverted the overlay.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipe.apply import sha256
from recipe.errors import RecipeError
from recipe.lock import load_lock
from recipe.pin import Pin, load_pin, load_pins
from recipe.series import Sources
from recipe.stamp import MANIFEST, PACKAGE, overlay_id, stamp_files
from recipe.tree import is_runtime, overlay_files, series_digest

FORMAT = 1
RESTORE = f"{PACKAGE}/restore"
STATE = f"{RESTORE}/state.json"

# Run by the Python in question, from `/`: the current directory must not shadow vllm.
_LOCATE = """
import importlib.metadata, importlib.util, json, sys
spec = importlib.util.find_spec("vllm")
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
where = list(spec.submodule_search_locations or []) if spec else []
print(json.dumps({"where": where, "versions": versions, "path": sys.path}))
"""
_CHECK = """
import importlib.metadata, vllm_pinned_hot_overlay as overlay
overlay.check()
names = [e.name for e in importlib.metadata.entry_points(group="vllm.general_plugins")]
assert "pinned_hot_overlay" in names, names
print(overlay.__file__)
"""


@dataclass(frozen=True)
class Installed:
    """An installed vLLM.

    Attributes:
        python: The interpreter that finds it.
        site: Directory that holds ``vllm/``.
        versions: Version by name of those of the pin's distributions that are there.
    """

    python: Path
    site: Path
    versions: dict[str, str]


@dataclass(frozen=True)
class State:
    """What an installed overlay needs to know to be taken away.

    Attributes:
        digest: Series digest.
        version: Release it was made for.
        overlay: sha256 by path of what was installed.
        original: sha256 by path of what was there before; added files are left out.
        caches: Compiled files that were set aside, relative to site-packages.
        directories: Directories that were made, parents first.
        stamp: Files of the stamp.
    """

    digest: str
    version: str
    overlay: dict[str, str]
    original: dict[str, str]
    caches: tuple[str, ...]
    directories: tuple[str, ...]
    stamp: tuple[str, ...]


def locate(python: Path, pin: Pin) -> Installed:
    """Find vLLM as ``python`` finds it when started from ``/``.

    Raises:
        RecipeError: There is none, it is not a plain install, or it is another version.
    """
    packages = [flavor.package for flavor in pin.flavors.values()]
    found: dict[str, Any] = json.loads(_ask(python, _LOCATE, packages))
    where = found["where"]
    if len(where) != 1 or not os.path.isfile(os.path.join(where[0], "__init__.py")):
        raise RecipeError(
            f"{python}: vllm is not installed there (found {where or 'nothing'}); "
            f"install {' or '.join(packages)} {pin.version} first"
        )
    site = Path(where[0]).parent
    versions: dict[str, str] = found["versions"]
    wrong = {n: v for n, v in versions.items() if v.partition("+")[0] != pin.version}
    if wrong or not versions:
        releases = " or ".join(other.version for other in load_pins())
        raise RecipeError(
            f"{site}: found {wrong or 'no metadata of vllm'}, the overlay is made for "
            f"{releases}; install such a release"
        )
    if site.resolve() not in [Path(entry).resolve() for entry in found["path"]]:
        raise RecipeError(
            f"{site} is not on the path of {python} (an editable install?); "
            "install a wheel instead"
        )
    return Installed(python, site, versions)


def installed_pin(python: Path) -> Pin:
    """Return the pin whose release ``python`` finds, or the first."""
    packages = {f.package for pin in load_pins() for f in pin.flavors.values()}
    found: dict[str, Any] = json.loads(_ask(python, _LOCATE, sorted(packages)))
    releases = {version.partition("+")[0] for version in found["versions"].values()}
    return next((pin for pin in load_pins() if {pin.version} == releases), load_pin())


def _ask(python: Path, script: str, args: Sequence[str] = ()) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [os.path.abspath(python), "-c", script, *args]
    try:
        result = subprocess.run(
            command, cwd="/", env=env, capture_output=True, text=True
        )
    except OSError as error:
        raise RecipeError(f"--python {python}: {error}; name an interpreter") from error
    if result.returncode:
        lines = result.stderr.strip().split("\n")
        raise RecipeError(f"{python}: {lines[-1]}")
    return result.stdout.strip().split("\n")[-1]


def read_state(site: Path) -> State | None:
    """Return the state of an overlay that ``install`` put there, if there is one.

    Raises:
        RecipeError: There is an overlay that ``install`` did not make.
    """
    try:
        table = json.loads((site / STATE).read_bytes())
    except FileNotFoundError:
        if (site / MANIFEST).exists():
            raise RecipeError(
                f"{site / PACKAGE} was not made by install (the overlay of an image?) "
                "and cannot be changed; reinstall vLLM and remove that directory"
            ) from None
        return None
    if table.pop("format") != FORMAT:
        raise RecipeError(
            f"{site / STATE}: unknown format; use the release that wrote it"
        )
    for name in ("caches", "directories", "stamp"):
        table[name] = tuple(table[name])
    return State(**table)


class _Stock:
    """The files of the pin in a site-packages, seen through an installed overlay."""

    def __init__(self, site: Path, state: State | None) -> None:
        self.label = str(site)
        self._site = site
        self._state = state

    def _path(self, name: str) -> Path:
        state = self._state
        if state and _digest(self._site / name) == state.overlay.get(name):
            return self._site / RESTORE / "files" / name
        return self._site / name

    def has(self, name: str) -> bool:
        """Tell whether there is such a file."""
        return self._path(name).is_file()

    def read(self, name: str) -> bytes:
        """Return the bytes of one file."""
        return self._path(name).read_bytes()

    def mode(self, name: str) -> int:
        """Return the permission bits of one file."""
        return self._path(name).stat().st_mode & 0o777


def install(
    python: Path, *, sources: Sources | None = None, pin: Pin | None = None
) -> str:
    """Put the overlay onto the vLLM that ``python`` finds.

    Every file is verified before the first is written; a failure half way is undone.

    Returns:
        One line that says what was done.

    Raises:
        RecipeError: It is not the pinned release, a file is not as at the pin, or
            another overlay is installed.
    """
    pin = pin or installed_pin(python)
    sources = sources or Sources()
    there = locate(python, pin)
    site, state = there.site, read_state(there.site)
    digest = series_digest(sources)
    if state is not None and state.digest != digest:
        raise RecipeError(
            f"{site}: overlay {overlay_id(state.digest)} is installed, this is "
            f"{overlay_id(digest)}; run ./build.sh uninstall --python {python} first"
        )
    _verify_stock(site, state, load_lock(sources, pin).pin, there, pin)
    files = {
        path: data
        for path, data in overlay_files(
            source=_Stock(site, state), sources=sources, pin=pin
        ).items()
        if is_runtime(path)
    }
    todo = {
        path: data
        for path, data in files.items()
        if _digest(site / path) != sha256(data)
    }
    stamp = stamp_files(files, sources=sources, pin=pin)
    if not todo and all(_digest(site / p) == sha256(d) for p, d in stamp.items()):
        _ask(python, _CHECK)
        return f"{site}: overlay {overlay_id(digest)} is installed already, verified"
    try:
        _write(site, todo, files, stamp, digest, pin, state)
        _ask(python, _CHECK)
    except BaseException:
        print("installation failed, putting everything back …", file=sys.stderr)
        if (state := read_state(site)) is not None:
            _restore(site, state, _sort(site, state)[0])
        raise
    return (
        f"{site}: overlay {overlay_id(digest)} installed, {len(files)} files "
        f"({len(todo)} written)"
    )


def _verify_stock(
    site: Path,
    state: State | None,
    pinned: Mapping[str, str],
    there: Installed,
    pin: Pin,
) -> None:
    names = " or ".join(there.versions)
    cure = (
        f"reinstall it (pip install --force-reinstall --no-deps {names}, "
        f"release {pin.version})"
    )
    for path, recorded in pinned.items():
        file = site / path
        if file.is_symlink():
            raise RecipeError(f"{file} is a symbolic link; {cure} as copies")
        found = _digest(file)
        if found is None:
            raise RecipeError(f"{file} is missing; {cure}")
        if found == recorded or (state and found == state.overlay.get(path)):
            continue
        raise RecipeError(
            f"{file}: sha256 is {found}, the pin has {recorded}; it was changed, {cure}"
        )


def _digest(path: Path) -> str | None:
    try:
        return sha256(path.read_bytes())
    except FileNotFoundError:
        return None


def _caches(site: Path, path: str) -> list[Path]:
    """Return the compiled files of a module."""
    source = site / path
    if source.suffix != ".py":
        return []
    return sorted((source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"))


def _write(
    site: Path,
    todo: Mapping[str, bytes],
    files: Mapping[str, bytes],
    stamp: Mapping[str, bytes],
    digest: str,
    pin: Pin,
    old: State | None,
) -> None:
    """Set the originals aside, note how to undo, then write."""
    restore = site / RESTORE
    made = list(old.directories) if old else []
    _make_directories(site, restore, [])
    original = dict(old.original) if old else {}
    caches = set(old.caches) if old else set()
    for path in todo:
        if (site / path).exists():
            _copy(site / path, restore / "files" / path)
            original[path] = sha256((site / path).read_bytes())
        for cache in _caches(site, path):
            name = cache.relative_to(site).as_posix()
            if path in original:
                _copy(cache, restore / "caches" / name)
                caches.add(name)
    for path in todo:
        for parent in reversed(Path(path).parents):
            if not (site / parent).exists() and str(parent) not in made:
                made.append(str(parent))
    state = State(
        digest=digest,
        version=pin.version,
        overlay={path: sha256(data) for path, data in files.items()},
        original=original,
        caches=tuple(sorted(caches)),
        directories=tuple(made),
        stamp=tuple(stamp),
    )
    table = {"format": FORMAT, **asdict(state)}
    _put(site, STATE, (json.dumps(table, indent=2) + "\n").encode())
    for path, data in todo.items():
        for cache in _caches(site, path):
            cache.unlink()
        _put(site, path, data)
    # The manifest comes last: with it the overlay counts as installed.
    for path in sorted(stamp, key=lambda name: name == MANIFEST):
        _put(site, path, stamp[path])


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    _own(target, source.stat())


def _own(path: Path, like: os.stat_result) -> None:
    """Give a file the owner of another where that is allowed."""
    with contextlib.suppress(PermissionError):
        os.chown(path, like.st_uid, like.st_gid)


def _make_directories(site: Path, directory: Path, made: list[Path]) -> None:
    """Make a directory and its parents with mode and owner of the one they are in."""
    if directory.exists():
        return
    _make_directories(site, directory.parent, made)
    like = directory.parent.stat()
    directory.mkdir()
    directory.chmod(like.st_mode & 0o777)
    _own(directory, like)


def _put(site: Path, path: str, data: bytes) -> None:
    """Write a file atomically, with mode and owner of the old one or its directory."""
    target = site / path
    _make_directories(site, target.parent, [])
    exists = target.exists()
    like = (target if exists else target.parent).stat()
    mode = like.st_mode & 0o777 if exists else 0o644 & like.st_mode
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".overlay-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.chmod(name, mode)
        _own(Path(name), like)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _sort(site: Path, state: State) -> tuple[list[str], list[str]]:
    """Sort the overlaid files into ours, to be undone, and changed since."""
    ours, changed = [], []
    for path, recorded in state.overlay.items():
        found = _digest(site / path)
        if found == recorded:
            ours.append(path)
        elif found != state.original.get(path):
            changed.append(path)
    return ours, changed


def uninstall(python: Path, *, force: bool = False, pin: Pin | None = None) -> str:
    """Take the overlay away and restore every file, byte, mode and time.

    Args:
        python: The interpreter that finds vLLM.
        force: Restore files too that were edited after the installation.
        pin: The release.

    Returns:
        One line that says what was done.

    Raises:
        RecipeError: There is no overlay, or a file was edited after the installation.
    """
    pin = pin or load_pin()
    site, versions = _locate_any(python, pin)
    state = read_state(site)
    if state is None:
        raise RecipeError(
            f"{site}: no overlay is installed there; nothing to take away"
        )
    ours, changed = _sort(site, state)
    same = all(v.partition("+")[0] == state.version for v in versions.values())
    if changed and same and versions and not force:
        raise RecipeError(
            f"{site / changed[0]} was edited after the overlay was installed "
            f"({len(changed)} files in all); save your edit, then use --force"
        )
    if force:
        ours, changed = [*ours, *changed], []
    _restore(site, state, ours)
    for path in changed:
        print(f"left as it is, of another release: {site / path}")
    return (
        f"{site}: overlay {overlay_id(state.digest)} removed, {len(ours)} files undone"
    )


def _locate_any(python: Path, pin: Pin) -> tuple[Path, dict[str, str]]:
    """Find vLLM, of whatever version, or what an uninstalled one left behind."""
    packages = [flavor.package for flavor in pin.flavors.values()]
    found = json.loads(_ask(python, _LOCATE, packages))
    places = [Path(where).parent for where in found["where"]]
    places += [Path(entry) for entry in found["path"] if entry]
    for place in places:
        if (place / PACKAGE).is_dir():
            return place, found["versions"]
    raise RecipeError(f"{python}: no overlay is installed there; nothing to take away")


def _restore(site: Path, state: State, paths: Sequence[str]) -> None:
    restore = site / RESTORE
    for path in paths:
        for cache in _caches(site, path):
            cache.unlink()
        if path not in state.original:
            (site / path).unlink(missing_ok=True)
            continue
        saved = restore / "files" / path
        _replace_with_copy(saved, site / path)
        for name in state.caches:
            cache = site / name
            module = cache.parent.parent / (cache.name.split(".")[0] + ".py")
            if module == site / path:
                _replace_with_copy(restore / "caches" / name, cache)
    for directory in reversed(state.directories):
        for empty in (site / directory / "__pycache__", site / directory):
            with contextlib.suppress(OSError):
                empty.rmdir()
    outside = {site / p for p in state.stamp if not p.startswith(f"{PACKAGE}/")}
    for file in outside:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            file.unlink()
    for directory in {str(file.parent) for file in outside}:
        with contextlib.suppress(OSError):
            os.rmdir(directory)
    shutil.rmtree(site / PACKAGE)


def _replace_with_copy(saved: Path, target: Path) -> None:
    partial = target.with_name(f".overlay-{target.name}")
    target.parent.mkdir(exist_ok=True)
    _copy(saved, partial)
    os.replace(partial, target)


def verify(
    python: Path, *, sources: Sources | None = None, pin: Pin | None = None
) -> str:
    """Verify that the installed overlay is this one and whole.

    Returns:
        One line that says so.

    Raises:
        RecipeError: It is not.
    """
    pin = pin or installed_pin(python)
    sources = sources or Sources()
    there = locate(python, pin)
    install_it = f"run ./build.sh install --python {python}"
    state = read_state(there.site)
    if state is None:
        _verify_stock(there.site, None, load_lock(sources, pin).pin, there, pin)
        raise RecipeError(
            f"{there.site}: no overlay, vLLM is as at the pin; {install_it}"
        )
    digest = series_digest(sources)
    if state.digest != digest:
        raise RecipeError(
            f"{there.site}: overlay {overlay_id(state.digest)} is installed, this is "
            f"{overlay_id(digest)}; uninstall it, then {install_it}"
        )
    for path, recorded in state.overlay.items():
        found = _digest(there.site / path)
        if found != recorded:
            reverted = found == state.original.get(path)
            what = "was put back to the pin" if reverted else f"has sha256 {found}"
            raise RecipeError(f"{there.site / path} {what}; {install_it}")
    _ask(python, _CHECK)
    name, count = overlay_id(digest), len(state.overlay)
    return f"{there.site}: overlay {name}, {count} files verified"


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Add the verbs ``install``, ``uninstall`` and ``verify``."""
    for verb, text in (
        ("install", "put the overlay onto an installed vLLM"),
        ("uninstall", "take the overlay away and restore every byte"),
        ("verify", "check an installed overlay"),
    ):
        parser = subparsers.add_parser(verb, help=text)
        parser.add_argument(
            "--python",
            type=Path,
            required=True,
            metavar="PY",
            help="the interpreter that runs vLLM, such as venv/bin/python",
        )
        if verb == "uninstall":
            parser.add_argument(
                "--force", action="store_true", help="discard later edits, too"
            )
        parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        if args.verb == "install":
            print(install(args.python))
        elif args.verb == "uninstall":
            print(uninstall(args.python, force=args.force))
        else:
            print(verify(args.python))
    except OSError as error:
        raise RecipeError(f"{error}; is site-packages writable for you?") from error
    return 0
