"""The author's workflow: the series as git commits, and back.

``refresh --start DIR`` makes a repository: the pin, a commit with all overlay files,
then a commit for each patch. The author edits, rebases and amends with plain git;
``refresh DIR`` writes ``patches/`` and ``overlay/`` from it. Import and export
reproduce every byte, which ``refresh --check`` proves.

The series is written for the first pin. For a later one ``refresh --start DIR --pin
NAME`` makes the repository, and ``refresh DIR`` writes a variant ``patches/NAME/…`` of
each patch that has other lines there; one whose hunks only stand elsewhere needs none.
"""

import argparse
import difflib
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.apply import PinFiles, extract, sha256, touched_paths
from recipe.errors import RecipeError
from recipe.git import run_git
from recipe.lock import Lock, dump_lock
from recipe.locking import (
    Release,
    later_locks,
    make_lock,
    release_files,
    with_variants,
)
from recipe.patch import Patch, parse_patch
from recipe.pin import Pin, add_pin_option, load_pin, load_pins
from recipe.series import (
    Sources,
    check_headers,
    check_ownership,
    load_series,
    overlay_paths,
    require,
)
from recipe.wheel import fetch_wheel, unpack

# Every option of format-patch that could change a byte, spelled out.
EXPORT = (
    *("format-patch", "--stdout", "-1", "--zero-commit", "--no-signature"),
    *("--no-numbered", "--subject-prefix=PATCH", "--no-stat", "--full-index"),
    *("--src-prefix=a/", "--dst-prefix=b/", "--no-relative", "-O/dev/null"),
    *("--unified=3", "--inter-hunk-context=0", "--diff-algorithm=myers"),
    *("--indent-heuristic", "--no-renames", "--no-ext-diff", "--no-textconv"),
    *("--no-color", "--no-attach", "--no-thread", "--no-cover-letter", "--no-base"),
    *("--no-notes", "--no-from", "--no-to", "--no-cc", "--no-add-header"),
    "--encode-email-headers",
)
IMPORT = (
    *("am", "--quiet", "--keep-non-patch", "--keep-cr", "--no-scissors", "--no-3way"),
    *("--no-signoff", "--no-gpg-sign", "--committer-date-is-author-date"),
    "--whitespace=nowarn",
)
OVERLAY_SUBJECT = "overlay: every new file (not exported as a patch)"
PIN_TAG = "pin"
_STATE = "pinned-hot-experts.json"
_IGNORED = "*.so\n*.pyc\n__pycache__/\n*.dist-info/\n/vllm/vllm-rs\n"
_IDENTITY = {
    "GIT_AUTHOR_NAME": "pinned-hot-experts",
    "GIT_AUTHOR_EMAIL": "recipe@localhost",
    "GIT_AUTHOR_DATE": "@0 +0000",
    "GIT_COMMITTER_NAME": "pinned-hot-experts",
    "GIT_COMMITTER_EMAIL": "recipe@localhost",
    "GIT_COMMITTER_DATE": "@0 +0000",
}
_SERIES_HEAD = (
    "# Written by ./build.sh refresh; a comment says what the next patch buys.\n"
)


@dataclass(frozen=True)
class Export:
    """What a repository says the series is.

    Attributes:
        patches: The patches, in order.
        overlay: Bytes of every overlay file at its path below ``overlay/``.
    """

    patches: tuple[Patch, ...]
    overlay: dict[str, bytes]

    def series(self) -> bytes:
        """Return the bytes of the series file."""
        entries = (
            f"# {patch.trailers.get('Buys', ['(no Buys: trailer)'])[0]}\n{patch.name}\n"
            for patch in self.patches
        )
        return (_SERIES_HEAD + "".join(entries)).encode()


def patch_name(number: int, subject: str) -> str:
    """Return the file name of a patch.

    Args:
        number: Position in the series, from 1.
        subject: First line of the message; leading ``[tags]`` are left out.
    """
    words = re.sub(r"^(\[[^\]]*\]\s*)+", "", subject).lower()
    slug = re.sub(r"[^a-z0-9]+", "-", words).strip("-")
    if len(slug) > 50:
        slug = slug[:51].rpartition("-")[0] or slug[:50]
    return f"{number:04d}-{slug or 'patch'}.patch"


def _git(repo: Path, *args: str, env: dict[str, str] | None = None) -> bytes:
    result = run_git(args, cwd=repo, env=env)
    if result.returncode:
        message = (result.stderr or result.stdout).decode(errors="replace").strip()
        raise RecipeError(f"git {args[0]} in {repo}: {message}")
    return result.stdout


def make_repository(repo: Path) -> None:
    """Make an empty repository that keeps bytes, whoever uses it later."""
    _git(repo, "init", "--quiet", "--template=", "--initial-branch=series")
    info = repo / ".git" / "info"
    info.mkdir(exist_ok=True)
    (info / "exclude").write_text(_IGNORED)
    for setting in ("core.autocrlf", "core.safecrlf", "am.threeWay"):
        _git(repo, "config", setting, "false")
    _git(repo, "config", "am.keepcr", "true")
    _git(repo, "config", "apply.whitespace", "nowarn")


def commit_pin(repo: Path) -> None:
    """Commit what lies in the directory as the pin."""
    _git(repo, "add", "--all")
    _git(repo, "commit", "--quiet", "--allow-empty", "-m", "pin", env=_IDENTITY)
    _git(repo, "tag", "--no-sign", PIN_TAG)


def import_series(repo: Path, patches: Sequence[Patch]) -> None:
    """Commit the patches on top of what is there.

    Raises:
        RecipeError: A patch does not apply; ``git am`` is left in progress there.
    """
    if not patches:
        return
    identity = {key: _IDENTITY[key] for key in _IDENTITY if "COMMITTER" in key}
    files = [str(patch.path.absolute()) for patch in patches]
    result = run_git([*IMPORT, *files], cwd=repo, env=identity)
    if result.returncode:
        done = int(_git(repo, "rev-list", "--count", f"{PIN_TAG}..HEAD").decode())
        first = _git(repo, "log", "--format=%s", f"{PIN_TAG}..HEAD").decode()
        done -= first.split("\n").count(OVERLAY_SUBJECT)
        left = ", ".join(patch.name for patch in patches[done:])
        raise RecipeError(
            f"git am stopped in {repo}; not applied: {left}\n"
            f"{(result.stdout + result.stderr).decode(errors='replace').strip()}\n"
            f"  mend it there, `git am --continue`, then ./build.sh refresh {repo}"
        )


def export_series(repo: Path) -> Export:
    """Read the series out of a repository.

    Raises:
        RecipeError: The repository has uncommitted changes, a merge, or a commit that
            cannot be a patch of the series.
    """
    _check_ready(repo)
    pin, tip = (
        _git(repo, "rev-parse", f"{name}^{{commit}}").decode().strip()
        for name in (PIN_TAG, "HEAD")
    )
    # A bare repository that borrows the objects has no settings that could leak.
    with tempfile.TemporaryDirectory() as work:
        bare = Path(work)
        _git(bare, "init", "--quiet", "--bare", "--template=")
        objects = bare / "objects/info/alternates"
        objects.parent.mkdir(exist_ok=True)
        objects.write_text(f"{(repo / '.git/objects').resolve()}\n")
        return _export(bare, pin, tip, repo)


def _export(bare: Path, pin: str, tip: str, repo: Path) -> Export:
    pinned = set(_paths(bare, pin))
    if _git(bare, "rev-list", "--merges", f"{pin}..{tip}"):
        raise RecipeError(f"{repo}: there is a merge commit; rebase it away")
    commits = _git(bare, "rev-list", "--reverse", f"{pin}..{tip}").decode().split()
    patches: list[Patch] = []
    for commit in commits:
        subject = _git(bare, "log", "-1", "--format=%s", commit).decode().strip()
        where = f"{repo}: commit {commit[:10]} '{subject}'"
        edited = _edited(bare, commit, where, pinned)
        if not edited and subject == OVERLAY_SUBJECT:
            continue
        if not edited:
            raise RecipeError(
                f"{where} edits no file of the pin; squash it into a patch or into "
                f"'{OVERLAY_SUBJECT}'"
            )
        raw = _git(bare, *EXPORT, commit, "--", *edited, env=_IDENTITY)
        patches.append(parse_patch(raw, Path(patch_name(len(patches) + 1, subject))))
    overlay = {
        path: _git(bare, "cat-file", "blob", f"{tip}:{path}")
        for path in _paths(bare, tip)
        if path not in pinned
    }
    return Export(tuple(patches), overlay)


def _check_ready(repo: Path) -> None:
    if (
        not (repo / ".git").is_dir()
        or run_git(["rev-parse", "--verify", "--quiet", PIN_TAG], cwd=repo).returncode
    ):
        raise RecipeError(
            f"{repo} was not made by ./build.sh refresh --start; make one"
        )
    for busy in ("rebase-apply", "rebase-merge", "MERGE_HEAD", "CHERRY_PICK_HEAD"):
        if (repo / ".git" / busy).exists():
            raise RecipeError(
                f"{repo}: {busy} is in progress; finish or abort it first"
            )
    if changes := _git(repo, "status", "--porcelain").decode():
        first = changes.split("\n")[0]
        raise RecipeError(f"{repo}: not committed: {first}; commit or remove it first")


def _paths(repo: Path, revision: str) -> list[str]:
    listing = _git(repo, "ls-tree", "-r", "-z", "--name-only", revision)
    return [name.decode() for name in listing.split(b"\0") if name]


def _edited(repo: Path, commit: str, where: str, pinned: set[str]) -> list[str]:
    """Return the files of the pin that a commit edits; refuse all but plain edits."""
    raw = _git(
        repo, "diff-tree", "-r", "-z", "--no-renames", "--raw", f"{commit}^", commit
    )
    fields = raw.decode().split("\0")
    edited = []
    for head, path in zip(fields[::2], fields[1::2], strict=False):
        old_mode, new_mode, *_, status = head.lstrip(":").split(" ")
        if path in pinned:
            if status != "M" or old_mode != new_mode:
                raise RecipeError(
                    f"{where}: {path}: deletes the file or changes its mode or type; "
                    "a patch may edit lines only"
                )
            edited.append(path)
        elif status != "D" and new_mode != "100644":
            raise RecipeError(
                f"{where}: {path}: new file with mode {new_mode}; make it 100644"
            )
    return edited


def start(
    repo: Path,
    wheel: Path,
    sources: Sources,
    *,
    log: bool = True,
    pin: Pin | None = None,
) -> list[Patch]:
    """Make a repository with the pin and the series in it.

    Args:
        repo: Directory to make.
        wheel: The pinned wheel.
        sources: The series; none yet is fine.
        log: Say what goes on.
        pin: The release that the wheel is of; the first by default.

    Raises:
        RecipeError: The directory is not empty or a patch does not apply.
    """
    pin = pin or load_pin()
    sources = sources.of(pin)
    patches = load_series(sources) if sources.patches.is_dir() else []
    if log:
        print(f"unpacking the pin into {repo} …", file=sys.stderr, flush=True)
    repo.mkdir(parents=True, exist_ok=True)
    unpack(wheel, repo)
    make_repository(repo)
    commit_pin(repo)
    overlay = {
        path: sources.added_file(path).read_bytes() for path in overlay_paths(sources)
    }
    for path, data in overlay.items():
        target = repo / path
        if target.exists():
            raise RecipeError(f"overlay/{path} exists at the pin; make it a patch")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    _git(repo, "add", "--all")
    message = ("--quiet", "--allow-empty", "-m", OVERLAY_SUBJECT)
    _git(repo, "commit", *message, env=_IDENTITY)
    _write_state(repo, sources, pin.version)
    import_series(repo, patches)
    return patches


def _state(sources: Sources) -> dict[str, dict[str, str]]:
    return {
        "patches": {name: sha256(data) for name, data in sources.held().items()},
        "overlay": {
            path: sha256(sources.added_file(path).read_bytes())
            for path in overlay_paths(sources)
        },
    }


def _write_state(repo: Path, sources: Sources, release: str) -> None:
    table = {"release": release, **_state(sources)}
    (repo / ".git" / _STATE).write_text(json.dumps(table))


def merge_overlay(
    exported: Mapping[str, bytes], there: Mapping[str, bytes], base: Mapping[str, str]
) -> dict[str, bytes | None]:
    """Decide what to write below ``overlay/``.

    Args:
        exported: Files of the repository.
        there: Files of ``overlay/`` now.
        base: sha256 of each file when the two were last equal.

    Returns:
        New bytes by path, ``None`` for a file to delete; untouched files are left out.

    Raises:
        RecipeError: A file was changed on both sides.
    """

    def digest(data: bytes | None) -> str | None:
        return None if data is None else sha256(data)

    changes: dict[str, bytes | None] = {}
    for path in sorted({*exported, *there}):
        old = base.get(path)
        ours, theirs = digest(there.get(path)), digest(exported.get(path))
        if theirs in (ours, old):
            continue
        if ours != old:
            raise RecipeError(
                f"overlay/{path} was changed here and in the repository; merge them"
            )
        changes[path] = exported.get(path)
    return changes


def refresh(
    repo: Path,
    sources: Sources,
    pins: Mapping[str, PinFiles],
    pin: Pin,
    later: Sequence[Release] = (),
) -> list[str]:
    """Write ``patches/`` and ``overlay/`` from a repository.

    Everything is computed and checked before the first byte is written.

    Args:
        repo: The repository, of the first or a later pin.
        sources: The series.
        pins: Files of the first pin, by flavor.
        pin: The first pin.
        later: Each later pin with its files, by flavor.

    Returns:
        The files that changed, relative to the root of the series.

    Raises:
        RecipeError: See :func:`export_series` and :func:`make_lock`; or ``patches/``
            changed since the repository was made.
    """
    export = export_series(repo)
    base: dict[str, Any] = json.loads((repo / ".git" / _STATE).read_text())
    if base["release"] == pin.version:
        lock, final = make_lock(export.patches, pins, pin)
        wanted = rendered(export, lock, later_locks(export.patches, sources, later))
    else:
        wanted, final = with_variants(export.patches, sources, base["release"], later)
    for path, data in final.items():
        if _git(repo, "cat-file", "blob", f"HEAD:{path}") != data:
            raise RecipeError(
                f"{repo}: {path} at the tip is not what the patches make of the pin; "
                "make the repository anew with ./build.sh refresh --start"
            )
    now = _state(sources)
    if now["patches"] != base["patches"]:
        raise RecipeError(
            f"{sources.patches} changed since {repo} was made; make that anew "
            "with ./build.sh refresh --start, or restore patches/ from git"
        )
    there = {path: sources.added_file(path).read_bytes() for path in now["overlay"]}
    changes: dict[Path, bytes | None] = {
        sources.added_file(path): data
        for path, data in merge_overlay(export.overlay, there, base["overlay"]).items()
    }
    held = sources.held()
    for name in sorted({*held, *wanted}):
        if held.get(name) != wanted.get(name):
            changes[sources.patches / name] = wanted.get(name)
    for file, new in changes.items():
        if new is None:
            file.unlink()
            if file.parent != sources.patches and not any(file.parent.iterdir()):
                file.parent.rmdir()
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(new)
    _write_state(repo, sources, base["release"])
    return [str(file.relative_to(sources.root)) for file in changes]


def rendered(
    export: Export, lock: Lock, later: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Return the bytes of every file, by path below ``patches/``."""
    return {
        **{patch.name: patch.raw for patch in export.patches},
        "series": export.series(),
        "lock.json": dump_lock(lock),
        **later,
    }


def check(
    sources: Sources,
    pins: Mapping[str, PinFiles],
    pin: Pin,
    later: Sequence[Release] = (),
) -> list[str]:
    """Import the series into repositories, export it, and compare every byte.

    Args:
        sources: The series.
        pins: Files of the first pin, by flavor.
        pin: The first pin.
        later: Each later pin with its files, by flavor.

    Returns:
        Lines of a diff, none if the files are what ``refresh`` would write.
    """
    export = _round_trip(load_series(sources), pins)
    lock, _ = make_lock(export.patches, pins, pin)
    wanted = rendered(export, lock, later_locks(export.patches, sources, later))
    for other, files in later:
        mine = sources.of(other)
        if any(mine.variants.glob("*.patch")):
            again = _round_trip(load_series(mine), files)
            wanted |= with_variants(again.patches, sources, other.version, later)[0]
    found = sources.held()
    return [
        line
        for name in sorted({*wanted, *found})
        for line in _diff(name, found, wanted)
    ]


def _round_trip(patches: Sequence[Patch], pins: Mapping[str, PinFiles]) -> Export:
    with tempfile.TemporaryDirectory() as work:
        repo = Path(work)
        make_repository(repo)
        extract(next(iter(pins.values())), touched_paths(patches), repo)
        commit_pin(repo)
        import_series(repo, patches)
        return export_series(repo)


def _diff(
    name: str, found: Mapping[str, bytes], wanted: Mapping[str, bytes]
) -> Iterable[str]:
    old, new = found.get(name, b""), wanted.get(name, b"")
    if old == new and (name in found) == (name in wanted):
        return []
    before, after = (
        [repr(line)[2:-1] for line in data.split(b"\n")] for data in (old, new)
    )
    return difflib.unified_diff(
        before, after, f"patches/{name}", f"refreshed/{name}", lineterm="", n=1
    )


def _run(args: argparse.Namespace) -> int:
    pin, sources = load_pin(), Sources()
    repo: Path | None = args.start or args.repo
    if bool(args.check) + bool(args.start) + bool(args.repo) != 1:
        raise RecipeError("refresh: give one of --start DIR, DIR, --check")
    if args.start:
        other = load_pin(args.pin)
        build = other.flavor(args.flavor) if args.flavor else other.any_flavor
        patches = start(args.start, fetch_wheel(build), sources, pin=other)
        print(f"{repo}: {len(patches)} patches as commits on tag '{PIN_TAG}'")
        print(f"edit and rebase there, then: ./build.sh refresh {repo}")
        return 0
    if args.pin or args.flavor:
        raise RecipeError("refresh: --pin and --flavor belong to --start DIR")
    files = release_files(pin)
    later = [(other, release_files(other)) for other in load_pins()[1:]]
    if repo is None:
        lines = check(sources, files, pin, later)
        for line in lines:
            print(line)
        if lines:
            raise RecipeError("patches/ is not what refresh writes; run it, see above")
        print("patches/ is byte for byte what refresh writes")
        return 0
    changed = refresh(repo, sources, files, pin, later)
    for name in changed:
        print(f"{'wrote' if (sources.root / name).exists() else 'removed'} {name}")
    print(f"{len(changed)} files changed")
    patches = load_series(sources)
    problems = [*check_ownership(patches, sources), *check_headers(patches, sources)]
    for problem in problems:
        if not problem.fatal:
            print(f"warning: {problem}", file=sys.stderr)
    require(problems)
    return 0


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Add the verb ``refresh``."""
    parser = subparsers.add_parser(
        "refresh", help="turn the series into git commits and back"
    )
    parser.add_argument("repo", nargs="?", type=Path, metavar="DIR")
    parser.add_argument("--start", type=Path, metavar="DIR", help="make the repository")
    parser.add_argument("--check", action="store_true", help="only compare every byte")
    parser.add_argument(
        "--flavor", choices=("cpu", "cuda"), help="the wheel to start from"
    )
    add_pin_option(parser)
    parser.set_defaults(run=_run)
