"""The verb ``drift``: what another release of vLLM does to the series.

Per patch: whether each hunk stands where it says (clean), elsewhere (offset) or nowhere
(conflict). Then whether the release still has what the overlay imports, in the form
that the overlay uses.
"""

import argparse
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipe.apply import PinFiles
from recipe.errors import RecipeError
from recipe.patch import FileEdit, Hunk, Patch, split_lines
from recipe.pin import Pin, add_pin_option, load_pin, load_pins
from recipe.series import Sources, load_series, overlay_paths
from recipe.symbols import Finding, Release, compare, usage
from recipe.tree import overlay_files
from recipe.wheel import WheelFiles, fetch_wheel

CLEAN, OFFSET, CONFLICT = "clean", "offset", "conflict"


@dataclass(frozen=True)
class Placement:
    """Where a hunk stands in another release.

    Attributes:
        path: The file.
        number: Number of the hunk in that file, from 1.
        status: ``clean``, ``offset`` or ``conflict``.
        moved: How many lines below its place in the patch it stands.
        detail: For a conflict, what is there instead, line by line.
    """

    path: str
    number: int
    status: str
    moved: int = 0
    detail: tuple[str, ...] = ()


@dataclass(frozen=True)
class PatchDrift:
    """What another release does to one patch.

    Attributes:
        name: The patch.
        placements: Its hunks, in order.
        problems: Files that are gone, or are there and should not be.
    """

    name: str
    placements: tuple[Placement, ...]
    problems: tuple[str, ...]

    @property
    def status(self) -> str:
        """The worst of its hunks."""
        found = {placement.status for placement in self.placements}
        if self.problems or CONFLICT in found:
            return CONFLICT
        return OFFSET if OFFSET in found else CLEAN


@dataclass(frozen=True)
class Drift:
    """What another release does to the series and the overlay.

    Attributes:
        patches: Each patch, in order.
        findings: Symbols that are not the same.
        changed: Files that are edited or imported from and differ, with the number of
            lines that came and went.
        symbols: Number of symbols that were compared.
    """

    patches: tuple[PatchDrift, ...]
    findings: tuple[Finding, ...]
    changed: dict[str, int]
    symbols: int

    @property
    def fits(self) -> bool:
        """Whether every patch applies and no symbol is broken."""
        return not (
            any(patch.status == CONFLICT for patch in self.patches)
            or any(finding.broken for finding in self.findings)
        )


class DirectoryFiles:
    """A release as files in a directory: an unpacked wheel or a checkout."""

    def __init__(self, root: Path) -> None:
        self.label = str(root)
        self._root = root
        if not (root / "vllm" / "__init__.py").is_file():
            raise RecipeError(f"{root}: holds no vllm/__init__.py; name its parent")

    def has(self, name: str) -> bool:
        """Tell whether there is such a file."""
        return (self._root / name).is_file()

    def read(self, name: str) -> bytes:
        """Return the bytes of one file."""
        return (self._root / name).read_bytes()

    def mode(self, name: str) -> int:
        """Return the permission bits of one file."""
        return (self._root / name).stat().st_mode & 0o777


def place(edit: FileEdit, data: bytes) -> tuple[list[Placement], bytes]:
    """Find where the hunks of one file stand, and apply those that do.

    Args:
        edit: What a patch does to the file.
        data: The file.

    Returns:
        One placement a hunk, and the file with every hunk applied that stands at one
        place only.
    """
    lines = split_lines(data)
    placements = []
    found: list[tuple[int, Hunk]] = []
    for number, hunk in enumerate(edit.hunks, 1):
        places = hunk.places(lines)
        if hunk.start in places or (not hunk.before and not lines):
            placements.append(Placement(edit.path, number, CLEAN))
            found.append((hunk.start, hunk))
        elif len(places) == 1:
            moved = places[0] - hunk.start
            placements.append(Placement(edit.path, number, OFFSET, moved))
            found.append((places[0], hunk))
        else:
            detail = tuple(_instead(hunk, lines, places))
            placements.append(Placement(edit.path, number, CONFLICT, 0, detail))
    for at, hunk in reversed(found):
        begin = max(at - 1, 0)
        lines[begin : begin + len(hunk.before)] = hunk.after
    return placements, b"".join(lines)


def _instead(hunk: Hunk, lines: Sequence[bytes], places: list[int]) -> Iterator[str]:
    """Say why a hunk stands nowhere: what it stands on, against what is there."""
    if places:
        yield f"fits at lines {', '.join(map(str, places))}, and only one can be meant"
        return
    matcher = difflib.SequenceMatcher(None, lines, hunk.before, autojunk=False)
    block = matcher.find_longest_match()
    if not block.size:
        yield f"line {hunk.start}: none of the lines that it stands on is there"
        return
    begin = max(block.a - block.b, 0)
    there = lines[begin : begin + len(hunk.before)]
    yield f"line {hunk.start}; the most alike is at line {begin + 1}:"
    wanted, has = ([_text(line) for line in side] for side in (hunk.before, there))
    for line in difflib.ndiff(wanted, has):
        if line[:1] != "?":
            yield f"  {line}"


def _text(line: bytes) -> str:
    return line.decode("utf-8", "backslashreplace").rstrip("\n").replace("\r", "\\r")


def patch_drift(
    patches: Sequence[Patch], files: PinFiles
) -> tuple[list[PatchDrift], dict[str, bytes]]:
    """Place every patch in another release, going on after a conflict.

    Returns:
        What became of each patch, and the edited files as far as hunks stand there.
    """
    texts: dict[str, bytes] = {}
    result = []
    for patch in patches:
        placements: list[Placement] = []
        problems = [
            f"Adds: {path} is there now; compare the two, then edit it with a patch"
            for path in patch.adds
            if files.has(path)
        ]
        for edit in patch.edits:
            if edit.path not in texts:
                if not files.has(edit.path):
                    problems.append(f"{edit.path} is gone; find where its code went")
                    continue
                texts[edit.path] = files.read(edit.path)
            placed, texts[edit.path] = place(edit, texts[edit.path])
            placements += placed
        result.append(PatchDrift(patch.name, tuple(placements), tuple(problems)))
    return result, texts


def measure(
    sources: Sources, base: PinFiles, files: PinFiles, other: Pin | None = None
) -> Drift:
    """Compare another release with the one that the series is written for.

    Args:
        sources: The series.
        base: Files of the first pin.
        files: Files of the other release.
        other: Its pin, whose variants are taken; ``None`` if it has none.
    """
    series = load_series(sources.of(other) if other else sources)
    patches, texts = patch_drift(series, files)
    overlay = {
        path: sources.added_file(path).read_bytes()
        for path in overlay_paths(sources)
        if path.endswith(".py")
    }
    used = usage(overlay)
    _, at_base = patch_drift(load_series(sources), base)
    old = Release(_reader(base, at_base | overlay))
    new = Release(_reader(files, texts | overlay))
    relied = {edit.path for patch in series for edit in patch.edits}
    for symbol in used.symbols:
        definition = old.find(symbol)
        if definition and definition.path not in overlay:
            relied.add(definition.path)
    changed = {}
    for path in sorted(relied):
        if lines := _changed_lines(base, files, path):
            changed[path] = lines
    findings = compare(used, old, new)
    return Drift(tuple(patches), tuple(findings), changed, len(used.symbols))


class _reader:
    """Reads a release's file, or the one that the series makes of it."""

    def __init__(self, files: PinFiles, patched: dict[str, bytes]) -> None:
        self._files = files
        self._patched = patched

    def __call__(self, path: str) -> bytes | None:
        if path in self._patched:
            return self._patched[path]
        return self._files.read(path) if self._files.has(path) else None


def _changed_lines(old: PinFiles, new: PinFiles, path: str) -> int:
    before, after = (
        split_lines(files.read(path)) if files.has(path) else [] for files in (old, new)
    )
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    same = sum(block.size for block in matcher.get_matching_blocks())
    return len(before) + len(after) - 2 * same


def report(drift: Drift, where: str) -> Iterator[str]:
    """Yield the lines that tell people about a drift.

    Args:
        drift: The drift.
        where: What `refresh --start` is to be given to work there.
    """
    for patch in drift.patches:
        moved = [p for p in patch.placements if p.status == OFFSET]
        lines = ", ".join(f"{p.path} hunk {p.number} {p.moved:+d}" for p in moved)
        yield f"{patch.status:<8}  {patch.name}" + (f"  ({lines})" if moved else "")
        for problem in patch.problems:
            yield f"          {problem}"
        for placement in patch.placements:
            if placement.status == CONFLICT:
                first, *rest = placement.detail
                yield f"          {placement.path} hunk {placement.number}, {first}"
                yield from (f"          {line}" for line in rest)
        if patch.status == CONFLICT:
            yield f"          cure: ./build.sh refresh --start DIR{where} stops there;"
            yield "          mend it, git am --continue, then ./build.sh refresh DIR"
    yield ""
    for path, count in drift.changed.items():
        yield f"changed   {path} ({count} lines)"
    for finding in drift.findings:
        yield f"{'broken' if finding.broken else 'differs':<8}  {finding}"
        yield f"          imported by {', '.join(finding.where)}"
        if finding.broken:
            yield "          cure: change that in overlay/ so that it fits every pin"
    counts = [
        f"{sum(patch.status == status for patch in drift.patches)} {status}"
        for status in (CLEAN, OFFSET, CONFLICT)
    ]
    broken = sum(finding.broken for finding in drift.findings)
    yield f"{len(drift.patches)} patches: {', '.join(counts)}"
    yield f"{drift.symbols} imported symbols: {broken} broken"


def _targets(args: argparse.Namespace) -> list[tuple[str, PinFiles, Pin | None]]:
    if sum(map(bool, (args.pin, args.wheel, args.tree))) > 1:
        raise RecipeError("drift: give one of --pin NAME, --wheel FILE, --tree DIR")
    if args.wheel:
        if not args.wheel.is_file():
            raise RecipeError(f"--wheel {args.wheel}: no such file")
        return [(args.wheel.name, WheelFiles(args.wheel), None)]
    if args.tree:
        return [(str(args.tree), DirectoryFiles(args.tree), None)]
    pins = [load_pin(args.pin)] if args.pin else load_pins()[1:]
    if not pins:
        raise RecipeError("drift: recipe/pin.toml has one pin; name --wheel or --tree")
    return [
        (
            f"pin {pin.name}, release {pin.version}",
            WheelFiles(fetch_wheel(pin.any_flavor)),
            pin,
        )
        for pin in pins
    ]


def _run(args: argparse.Namespace) -> int:
    sources = Sources()
    first = load_pin()
    base = WheelFiles(fetch_wheel(first.any_flavor))
    status = 0
    for title, files, pin in _targets(args):
        print(f"from release {first.version} to {title}\n")
        drift = measure(sources, base, files, pin)
        where = f" --pin {pin.name}" if pin else " (once it is in recipe/pin.toml)"
        print("\n".join(report(drift, where)))
        if not drift.fits:
            status = 1
        elif pin:
            overlay_files(source=files, sources=sources, pin=pin)
            print("all clean: the result is what the lock of this pin records")
    return status


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Add the verb ``drift``."""
    parser = subparsers.add_parser(
        "drift", help="tell what another release of vLLM does to the series"
    )
    add_pin_option(parser)
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", help="a release that is not a pin"
    )
    parser.add_argument(
        "--tree", type=Path, metavar="DIR", help="likewise, unpacked or checked out"
    )
    parser.set_defaults(run=_run)
