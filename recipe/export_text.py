"""The texts of an export: a cover letter and a body for each pull request.

Prose that never changes is in ``recipe/templates``; every number comes from the series,
from what was run, or from a receipt. What no receipt shows is called not shown.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

from recipe.export_git import Commit
from recipe.export_verify import MARKER, Outcome
from recipe.patch import Patch
from recipe.paths import ROOT
from recipe.receipts import RATIO
from recipe.stats import Stats, is_hot

TEMPLATES = ROOT / "recipe" / "templates"
LARGE_BATCH = 32
Receipts = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class PullRequest:
    """Commits that go upstream together.

    Attributes:
        title: Its title.
        commits: The commits, oldest first.
    """

    title: str
    commits: tuple[Commit, ...]


def group(commits: Sequence[Commit]) -> list[PullRequest]:
    """Group commits: a ``Pull-request:`` trailer begins one and gives its title."""
    groups: list[tuple[str, list[Commit]]] = []
    for commit in commits:
        title = commit.patch.trailers.get("Pull-request", [""])[0]
        if title or not groups:
            groups.append((title or commit.patch.subject, []))
        groups[-1][1].append(commit)
    return [PullRequest(title, tuple(members)) for title, members in groups]


def _template(name: str, **values: str) -> str:
    text = Template((TEMPLATES / name).read_text())
    return text.substitute(values).rstrip("\n") + "\n"


def _paragraph(patch: Patch, start: str) -> str:
    found = [part for part in patch.paragraphs if part.startswith(f"{start}: ")]
    text = " ".join(found[0].removeprefix(f"{start}: ").split())
    return text[:1].upper() + text[1:]


def body(
    request: PullRequest, outcomes: Sequence[Outcome] | None, receipts: Receipts
) -> str:
    """Return the text of a pull request.

    Args:
        request: The pull request.
        outcomes: What was run for its commits; ``None`` if nothing was.
        receipts: Measured results.
    """
    patches = [commit.patch for commit in request.commits]
    purpose = [
        f"**{patch.subject}**\n\n{_paragraph(patch, 'Why')}\n\n"
        f"Why here: {_paragraph(patch, 'Why here')}"
        for patch in patches
    ]
    rfcs = dict.fromkeys(url for patch in patches for url in patch.trailers["RFC"])
    related = dict.fromkeys(
        text
        for patch in patches
        for text in patch.trailers["Related"]
        if not text.startswith("none ")
    )
    defaults = [
        f"- {patch.subject}: {_paragraph(patch, 'Default')}" for patch in patches
    ]
    return _template(
        "pull-request.md",
        title=request.title,
        first=request.commits[0].id[:12],
        last=request.commits[-1].id[:12],
        purpose="\n\n".join(purpose),
        references="\n".join(f"RFC: {url}" for url in rfcs),
        plan=_plan(request.commits),
        result=_result(request.commits, outcomes),
        output="\n".join(
            [
                "Without the new options nothing changes, commit by commit:",
                "",
                *defaults,
                "",
                "With them, from receipts on the whole branch:",
                "",
                *_parity(receipts)[0],
            ]
        ),
        related="\n".join(f"- {text}" for text in related) or "Nothing is known.",
        size=_size(patches, request.commits),
    )


def _plan(commits: Sequence[Commit]) -> str:
    lines = [
        "Every commit is checked out in turn, on a machine without a GPU: its modules",
        "are imported, its own test is run, its files are linted.",
        "",
        "```sh",
    ]
    for commit in commits:
        tests = " ".join(commit.patch.trailers["Test"])
        lines.append(f"pytest -m '{MARKER}' {tests}   # {commit.id[:12]}")
    return "\n".join([*lines, "```"])


def _result(commits: Sequence[Commit], outcomes: Sequence[Outcome] | None) -> str:
    if outcomes is None:
        return "Not run. `./build.sh export --verify` runs the plan and fills this in."
    by_id = {outcome.commit: outcome for outcome in outcomes}
    lines = [
        "| commit | modules imported | tests | lint |",
        "|---|---|---|---|",
    ]
    for commit in commits:
        outcome = by_id[commit.id]
        skipped = f", {outcome.skipped} skipped" if outcome.skipped else ""
        lines.append(
            f"| {commit.id[:12]} {commit.patch.subject} | {outcome.imported} | "
            f"{outcome.passed} passed{skipped} | {outcome.linted} files clean |"
        )
    return "\n".join(lines)


def _size(patches: Sequence[Patch], commits: Sequence[Commit]) -> str:
    changed = sum(patch.changed_lines for patch in patches)
    files = {path for patch in patches for path in patch.touched}
    hot = sum(
        edit.changed_lines
        for patch in patches
        for edit in patch.edits
        if is_hot(edit.path)
    )
    new = [path for patch in patches for path in patch.adds]
    tests = [path for path in new if path.startswith("tests/")]
    return (
        f"{len(commits)} commits. {changed} changed lines in {len(files)} files that "
        f"exist, {hot} of them in files that run in a forward step; "
        f"{len(new) - len(tests)} new modules and {len(tests)} new test files."
    )


def current(receipts: Receipts) -> Receipts:
    """Leave out the receipts that a later one replaces."""
    return {name: r for name, r in receipts.items() if "superseded_by" not in r}


def _parity(receipts: Receipts) -> tuple[list[str], list[str]]:
    """Return what parity receipts show, and the cases they do not."""
    shown, missing = [], []
    for name, receipt in current(receipts).items():
        words = {True: 0, False: 0, None: 0}
        for case in receipt.get("parity", ()):
            verdict = case.get("equal", case.get("tokens_equal"))
            words[verdict] += 1
            if verdict is None:
                missing.append(f"{_case(case)} ({name})")
        if sum(words.values()):
            shown.append(
                f"- {receipt['hardware']['name']}: {words[True]} cases equal, "
                f"{words[False]} different, {words[None]} not shown ({name})"
            )
    return shown or ["- no parity receipt: not shown"], missing


def _case(case: Mapping[str, Any]) -> str:
    fields = ("method", "kernel", "quantization", "dtype", "mode", "runner")
    return ", ".join(str(case[key]) for key in fields if case.get(key))


def _ratios(receipts: Receipts, wanted: Callable[[str, int], bool]) -> list[str]:
    found = []
    for name, receipt in current(receipts).items():
        for ratio, value in receipt.get("ratios", {}).items():
            what, streams = RATIO.fullmatch(ratio).groups()  # type: ignore[union-attr]
            if wanted(what, int(streams or 0)):
                found.append(f"`{ratio}` {value:.2f} ({name})")
    return found


def _large_batches(receipts: Receipts, stats: Stats) -> tuple[str, bool]:
    found = _ratios(receipts, lambda _, streams: streams >= LARGE_BATCH)
    if found:
        return f"Measured: {', '.join(found)}.", True
    most = max(
        (
            int(RATIO.fullmatch(ratio)[2] or 0)  # type: ignore[index]
            for receipt in current(receipts).values()
            for ratio in receipt.get("ratios", {})
        ),
        default=0,
    )
    best = _ratios(receipts, lambda _, streams: streams == most and most > 0)
    told = f" The most that a receipt has is {most}: {', '.join(best)}." if best else ""
    return f"Not shown: no receipt has {LARGE_BATCH} or more streams.{told}", False


def _speculation(receipts: Receipts, stats: Stats) -> tuple[str, bool]:
    found = [
        name
        for name, receipt in current(receipts).items()
        if receipt.get("engine", {}).get("speculative_config")
        or any(
            "spec" in str(case.get("mode", "")) for case in receipt.get("parity", ())
        )
    ]
    if found:
        return f"Served and compared: {', '.join(found)}.", True
    text = (
        "Not shown: no receipt has it. No id and no shape is changed, so the design is "
        "the same for it; draft layers stay resident unless the map names them."
    )
    return text, False


def _prefill(receipts: Receipts, stats: Stats) -> tuple[str, bool]:
    found = _ratios(receipts, lambda what, _: "prefill" in what or "ttft" in what)
    if found:
        return f"Measured: {', '.join(found)}.", True
    text = (
        "Not shown: no receipt measures it. Long prompts touch most experts, so cold "
        "bytes are expected to dominate there; the documentation says so."
    )
    return text, False


def _graphs(receipts: Receipts, stats: Stats) -> tuple[str, bool]:
    found = []
    for name, receipt in current(receipts).items():
        for case in receipt.get("parity", ()):
            verdict = case.get("equal", case.get("tokens_equal"))
            if "graph" in str(case.get("mode", "")).lower() and verdict is not None:
                word = "equal to" if verdict else "different from"
                found.append(f"{_case(case)}: {word} stock ({name})")
    if found:
        return f"They stay on. {'; '.join(found)}.", True
    return "Not shown: no receipt has them.", False


def _hot_path(receipts: Receipts, stats: Stats) -> tuple[str, bool]:
    most = max((patch.hot for patch in stats.patches), default=0)
    text = (
        f"{stats.hot} changed lines in files that run in a forward step, {most} at "
        f"most in one commit, of {stats.changed} changed lines in all."
    )
    return text, True


OBJECTIONS: tuple[tuple[str, Callable[[Receipts, Stats], tuple[str, bool]]], ...] = (
    ("Batches of 32 and more", _large_batches),
    ("Speculative decoding", _speculation),
    ("Prefill", _prefill),
    ("CUDA graphs", _graphs),
    ("Lines in the hot path", _hot_path),
)


def cover_letter(
    requests: Sequence[PullRequest],
    branch: str,
    base: str,
    stats: Stats,
    receipts: Receipts,
    verified: bool,
) -> str:
    """Return the letter that introduces the pull requests.

    Args:
        requests: The pull requests, in order.
        branch: The local branch.
        base: What it is built on.
        stats: Size of the series.
        receipts: Measured results.
        verified: Whether every commit was checked.
    """
    answers = [(what, *answer(receipts, stats)) for what, answer in OBJECTIONS]
    missing = [what for what, _, shown in answers if not shown] + _parity(receipts)[1]
    return _template(
        "cover-letter.md",
        title="Expert weights placed by use",
        count=str(sum(len(request.commits) for request in requests)),
        branch=branch,
        base=base,
        groups=f"{len(requests)} pull requests"
        if len(requests) != 1
        else "one pull request",
        verified="was checked" if verified else "`--verify` checks, and was not run",
        objections="\n".join(f"- **{what}.** {text}" for what, text, _ in answers),
        size=(
            f"{len(stats.patches)} commits, {stats.changed} changed lines in "
            f"{stats.files} files that exist, {stats.module_lines} lines in "
            f"{stats.modules} new modules, {stats.test_lines} lines of tests."
        ),
        missing="\n".join(f"- {text}" for text in missing) or "Nothing of the above.",
    )
