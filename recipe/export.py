"""The verb ``export``: the series as a branch of vLLM and as pull requests in waiting.

It stops at the local branch and the files beside it. A person submits.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipe.errors import RecipeError
from recipe.export_git import (
    Commit,
    check_mails,
    find_base,
    make_commits,
    open_repository,
    set_branch,
    upstream_bound,
    write_mails,
)
from recipe.export_text import PullRequest, body, cover_letter, group
from recipe.export_verify import Outcome, verify
from recipe.lock import load_lock
from recipe.patch import Patch
from recipe.pin import Pin, load_pin
from recipe.receipts import load_receipts
from recipe.refresh import patch_name
from recipe.series import (
    Sources,
    check_headers,
    check_ownership,
    load_series,
    require,
)
from recipe.stats import measure

BRANCH = "pinned-hot-experts"


@dataclass(frozen=True)
class Exported:
    """What an export made.

    Attributes:
        base: Commit that it is built on.
        commits: The commits, oldest first.
        requests: The pull requests.
        mails: Each commit as a mail.
        texts: Cover letter and bodies.
    """

    base: str
    commits: tuple[Commit, ...]
    requests: tuple[PullRequest, ...]
    mails: tuple[Path, ...]
    texts: tuple[Path, ...]


def export(
    repo: Path,
    out: Path,
    *,
    branch: str = BRANCH,
    base: str | None = None,
    check: bool = False,
    sources: Sources | None = None,
    pin: Pin | None = None,
) -> Exported:
    """Make the branch, the mails and the texts.

    Args:
        repo: A clone of vLLM, or a directory to make a repository in.
        out: Where mails and texts go.
        branch: Name of the local branch.
        base: Revision to build on; by default the release's tag or commit.
        check: Also import, test and lint every commit.
        sources: The series.
        pin: The release.

    Raises:
        RecipeError: The series is not in order, does not apply there, or a commit fails
            its check; the branch is then not made.
    """
    pin = pin or load_pin()
    sources = (sources or Sources()).of(pin)
    everything = load_series(sources)
    problems = [
        *check_ownership(everything, sources),
        *check_headers(everything, sources),
    ]
    require(problems)
    patches = upstream_bound(everything)
    if not patches:
        raise RecipeError("no patch is meant for upstream; nothing to export")
    open_repository(repo, pin)
    start = find_base(repo, pin, base)
    commits = make_commits(repo, start, patches, sources, load_lock(sources, pin))
    outcomes = verify(repo, commits, pin) if check else None
    mails = write_mails(repo, commits, out / "mails")
    check_mails(repo, start, commits[-1].id, mails)
    set_branch(repo, branch, commits[-1].id)
    requests = group(commits)
    texts = _write_texts(out, requests, outcomes, branch, start, patches, sources)
    return Exported(start, tuple(commits), tuple(requests), tuple(mails), tuple(texts))


def _write_texts(
    out: Path,
    requests: Sequence[PullRequest],
    outcomes: Sequence[Outcome] | None,
    branch: str,
    base: str,
    patches: Sequence[Patch],
    sources: Sources,
) -> list[Path]:
    receipts = load_receipts()
    stats = measure(patches, sources)
    letter = cover_letter(
        requests, branch, base[:12], stats, receipts, outcomes is not None
    )
    texts = {"cover-letter.md": letter}
    for number, request in enumerate(requests, 1):
        name = Path(patch_name(number, request.title)).stem
        texts[f"pull-request-{name}.md"] = body(request, outcomes, receipts)
    for name, text in texts.items():
        (out / name).write_text(text)
    return [out / name for name in texts]


def _run(args: argparse.Namespace) -> int:
    repo: Path = args.repo.absolute()
    out: Path = args.out or repo.with_name(f"{repo.name}-pull-requests")
    if out.exists() and any(out.iterdir()):
        raise RecipeError(f"--out {out}: not empty; remove it or name another")
    print(f"exporting to {repo} …", file=sys.stderr, flush=True)
    made = export(repo, out, branch=args.branch, base=args.base, check=args.verify)
    count = len(made.commits)
    print(f"{repo}: branch {args.branch}, {count} commits on {made.base[:12]}")
    for commit in made.commits:
        print(f"  {commit.id[:12]} {commit.patch.subject}")
    for path in made.texts:
        print(path)
    print(f"{made.mails[0].parent}: {len(made.mails)} mails, which give the same trees")
    if not args.verify:
        print("not checked commit by commit; --verify does that")
    return 0


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Add the verb ``export``."""
    parser = subparsers.add_parser(
        "export", help="make a branch of vLLM and pull requests from the series"
    )
    parser.add_argument(
        "--repo",
        type=Path,
        required=True,
        metavar="DIR",
        help="a clone of vLLM, or a new directory for a repository of the pinned wheel",
    )
    parser.add_argument("--branch", default=BRANCH, metavar="NAME")
    parser.add_argument(
        "--base", metavar="REV", help="commit to build on; default: the release's tag"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: DIR-pull-requests"
    )
    parser.add_argument(
        "--verify", action="store_true", help="import, test and lint every commit"
    )
    parser.set_defaults(run=_run)
