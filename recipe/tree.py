"""The patched tree: the pin, the first N patches, and the files that they bring."""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipe.apply import (
    PinFiles,
    apply_series,
    check_absent,
    extract,
    touched_paths,
)
from recipe.env import locked
from recipe.errors import RecipeError
from recipe.lock import load_lock
from recipe.patch import Patch
from recipe.paths import PIN_FILE, STAMP_SOURCE, cache_dir
from recipe.pin import Flavor, Pin, add_pin_option, load_pin
from recipe.series import Sources, check_ownership, load_series, require
from recipe.wheel import NATIVE, WheelFiles, fetch_wheel, unpack

_DAY_S = 24 * 60 * 60


@dataclass(frozen=True)
class Tree:
    """A patched tree on disk.

    Attributes:
        root: Directory that holds ``vllm/`` and the dist-info.
        flavor: Name of the flavor it was made from.
        patches: Names of the applied patches.
        files: Paths that differ from the pin, edited and added.
    """

    root: Path
    flavor: str
    patches: tuple[str, ...]
    files: tuple[str, ...]


def first_patches(patches: Sequence[Patch], upto: int | None) -> list[Patch]:
    """Return the first ``upto`` patches, all of them for ``None``.

    Raises:
        RecipeError: There are fewer.
    """
    if upto is None:
        return list(patches)
    if not 0 <= upto <= len(patches):
        raise RecipeError(
            f"--patches {upto}: the series has {len(patches)}; name no more than that"
        )
    return list(patches[:upto])


def is_runtime(path: str) -> bool:
    """Tell whether a path belongs in a runtime; ``tests/`` is for upstream only."""
    return path.startswith("vllm/")


def overlay_files(
    upto: int | None = None,
    *,
    source: PinFiles | None = None,
    sources: Sources | None = None,
    pin: Pin | None = None,
) -> dict[str, bytes]:
    """Return the final bytes of every path that differs from the pin.

    Args:
        upto: Number of patches to take, all by default.
        source: Files to start from; a wheel of the pin by default. The touched files
            are the same in every flavor, or ``refresh`` would have refused them.
        sources: The series.
        pin: The release.

    Returns:
        Bytes by path relative to site-packages, ``tests/`` included.

    Raises:
        RecipeError: The series is not in order or does not apply to ``source``.
    """
    pin = pin or load_pin()
    sources = (sources or Sources()).of(pin)
    patches, everything = _load(sources, upto)
    lock = load_lock(sources, pin)
    source = source or WheelFiles(fetch_wheel(pin.any_flavor))
    check_absent(source, everything)
    with tempfile.TemporaryDirectory() as work:
        root = Path(work)
        touched = touched_paths(patches)
        extract(source, touched, root)
        apply_series(root, patches, lock, exact=sources.variant is None)
        files = {path: (root / path).read_bytes() for path in touched}
    return files | _added(patches, sources)


def build_tree(
    flavor: str,
    dest: Path,
    upto: int | None = None,
    *,
    sources: Sources | None = None,
    pin: Pin | None = None,
    native: bool = True,
) -> Tree:
    """Make a patched tree.

    It is made beside ``dest`` and renamed when it is whole: after a failure ``dest``
    is as it was.

    Args:
        flavor: ``cpu`` or ``cuda``.
        dest: Directory to make; it may exist if it is empty.
        upto: Number of patches to take, all by default.
        sources: The series.
        pin: The release.
        native: Also unpack machine code.

    Raises:
        RecipeError: ``dest`` is not empty, or the series does not apply exactly.
    """
    pin = pin or load_pin()
    sources = (sources or Sources()).of(pin)
    dest = dest.absolute()
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise RecipeError(
            f"{dest} is not an empty directory; remove it or name another"
        )
    patches, everything = _load(sources, upto)
    lock = load_lock(sources, pin)
    wheel = fetch_wheel(pin.flavor(flavor))
    check_absent(WheelFiles(wheel), everything)
    dest.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=dest.parent, prefix=f".{dest.name}."))
    try:
        unpack(wheel, work, native)
        _require_touched(work, patches)
        apply_series(work, patches, lock, exact=sources.variant is None)
        added = _added(patches, sources)
        for path, data in added.items():
            target = work / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(0o644)
        work.chmod(0o755)
        if dest.exists():
            dest.rmdir()
        os.rename(work, dest)
    except BaseException:
        shutil.rmtree(work)
        raise
    return Tree(
        root=dest,
        flavor=flavor,
        patches=tuple(patch.name for patch in patches),
        files=(*touched_paths(patches), *added),
    )


def patched_tree(flavor: str, pin: Pin | None = None) -> Path:
    """Return the patched tree in the cache, made once for each state of the series.

    A release without the flavor gets another one's Python files and the machine code of
    the first pin's; its metadata is left out, so that those of the environment count.
    Trees that were not made within the last day are removed.
    """
    pin = pin or load_pin()
    name = f"{pin.name}-{flavor}-{series_digest()[:16]}"
    path = cache_dir() / "trees" / name
    with locked(path.parent):
        _make_patched(path, flavor, pin)
    return path


def _make_patched(path: Path, flavor: str, pin: Pin) -> None:
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        for old in path.parent.iterdir():
            if time.time() - old.stat().st_mtime > _DAY_S:
                shutil.rmtree(old)
        print(f"making the patched {flavor} tree in {path} …", file=sys.stderr)
        if flavor in pin.flavors:
            build_tree(flavor, path, pin=pin)
        else:
            with tempfile.TemporaryDirectory(dir=path.parent) as work:
                mixed = Path(work) / "tree"
                build_tree(pin.any_flavor.name, mixed, pin=pin, native=False)
                _borrow_machine_code(mixed, load_pin().flavor(flavor))
                mixed.rename(path)


def _borrow_machine_code(root: Path, flavor: Flavor) -> None:
    for metadata in root.glob("*.dist-info"):
        shutil.rmtree(metadata)
    files = WheelFiles(fetch_wheel(flavor))
    for name in files.names:
        if name.endswith(NATIVE):
            target = root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files.read(name))
            target.chmod(files.mode(name))


def series_digest(sources: Sources | None = None) -> str:
    """Return the sha256 over everything that decides what an overlay holds.

    That is the pin, the series with its patches and lock, the overlay files and the
    start-up check.
    """
    sources = sources or Sources()
    inputs = {"pin.toml": PIN_FILE}
    for label, folder in (
        ("patches", sources.patches),
        ("overlay", sources.overlay),
        ("stamp", STAMP_SOURCE),
    ):
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                inputs[f"{label}/{path.relative_to(folder).as_posix()}"] = path
    digest = hashlib.sha256()
    for name, path in sorted(inputs.items()):
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _load(sources: Sources, upto: int | None) -> tuple[list[Patch], list[Patch]]:
    everything = load_series(sources)
    require(check_ownership(everything, sources))
    return first_patches(everything, upto), everything


def _added(patches: Sequence[Patch], sources: Sources) -> dict[str, bytes]:
    paths = [path for patch in patches for path in patch.adds]
    return {path: sources.added_file(path).read_bytes() for path in paths}


def _require_touched(root: Path, patches: Sequence[Patch]) -> None:
    for patch in patches:
        for path in patch.touched:
            if not (root / path).is_file():
                raise RecipeError(
                    f"{patch.name}: {path} is not in the wheel; new files: overlay/"
                )


def compile_tree(root: Path) -> None:
    """Byte-compile every module of a tree with the running Python.

    Raises:
        RecipeError: A module does not compile.
    """
    print("compiling every module …", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "compileall", "-q", "-j0"]
    command += ["--invalidation-mode", "unchecked-hash", str(root / "vllm")]
    if subprocess.run(command).returncode:
        raise RecipeError(f"{root}: a module does not compile; see the lines above")


def _run(args: argparse.Namespace) -> int:
    print(f"making the {args.flavor} tree in {args.out} …", file=sys.stderr, flush=True)
    tree = build_tree(args.flavor, args.out, args.patches, pin=load_pin(args.pin))
    if args.compile:
        compile_tree(tree.root)
    print(
        f"{tree.root}: {len(tree.patches)} patches, {len(tree.files)} files differ "
        f"from the pin, digest {series_digest()[:12]}"
    )
    return 0


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Add the verb ``tree``."""
    parser = subparsers.add_parser("tree", help="make a patched tree in a directory")
    parser.add_argument("--flavor", choices=sorted(load_pin().flavors), default="cpu")
    add_pin_option(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--patches", type=int, metavar="N", help="take the first N patches only"
    )
    parser.add_argument(
        "--compile", action="store_true", help="byte-compile every module afterwards"
    )
    parser.set_defaults(run=_run)
