"""The series as commits, mails and texts; field cases of group E through that path."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from recipe import export_text
from recipe.apply import PinFiles, sha256
from recipe.errors import RecipeError
from recipe.export import export
from recipe.export_git import Commit, GitFiles, check_mails, trees, write_mails
from recipe.export_verify import refused
from recipe.lock import load_lock
from recipe.patch import parse_patch
from recipe.pin import Pin
from recipe.receipts import load_receipts
from recipe.series import Sources, load_series
from recipe.stats import measure
from tests.series.support import EXECUTABLE, NEW_FILES, PIN_FILES, git, snapshot
from tests.series.test_refresh import HOSTILE

SUBJECTS = [
    "[MoE][Offload] Change one number",
    "Edit a CR LF file and an executable",
    "Change the number again",
]
BRANCH = "pinned-hot-experts"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a repository as a clone of vLLM is: with tests and settings of its own."""
    repo = tmp_path / "vllm clone"
    files = {**PIN_FILES, "vllm/build.py": b"FLAVOR = 'cpu'\n"}
    for name, data in {**files, "tests/test_old.py": b"OLD = 1\n"}.items():
        path = repo / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if name == EXECUTABLE else 0o644)
    git(repo, "init", "--quiet")
    git(repo, "add", "--all")
    git(repo, "commit", "--quiet", "-m", "release")
    git(repo, "tag", "start")
    return repo


def make(
    repo: Path, sources: Sources, pin: Pin, out: Path, **options: object
) -> list[str]:
    """Export and return the ids of the commits."""
    made = export(repo, out, sources=sources, pin=pin, **options)  # type: ignore[arg-type]
    return [commit.id for commit in made.commits]


def test_a_repository_is_made_from_the_wheel(
    sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    repo = tmp_path / "new"
    ids = make(repo, sources, pin, tmp_path / "out")
    assert git(repo, "rev-parse", BRANCH).strip() == ids[-1]
    log = git(repo, "log", "--reverse", "--format=%s", f"pin..{BRANCH}").splitlines()
    assert log == SUBJECTS
    assert git(repo, "status", "--porcelain") == ""
    assert git(repo, "rev-parse", "--abbrev-ref", "HEAD").strip() != BRANCH


def test_every_commit_holds_its_patch_and_its_new_files(
    sources: Sources, pin: Pin, clone: Path, tmp_path: Path
) -> None:
    """E3, E9, E10, E14, E15: bytes, modes, empty files, final newlines."""
    ids = make(clone, sources, pin, tmp_path / "out", base="start")
    lock = load_lock(sources, pin)
    for commit, patch in zip(ids, load_series(sources), strict=True):
        files = GitFiles(clone, commit)
        for path in patch.touched:
            assert sha256(files.read(path)) == lock.after[patch.name][path], path
            assert files.mode(path) == (0o755 if path == EXECUTABLE else 0o644)
        names = git(clone, "diff-tree", "-r", "--name-only", f"{commit}^", commit)
        assert set(names.split()) == {*patch.touched, *patch.adds}
    files = GitFiles(clone, ids[0])
    for path, data in NEW_FILES.items():
        assert (files.read(path), files.mode(path)) == (data, 0o644)
    assert GitFiles(clone, ids[-1]).has("tests/test_old.py")


def test_messages_keep_tags_and_sign_off_only(
    sources: Sources, pin: Pin, clone: Path, tmp_path: Path
) -> None:
    ids = make(clone, sources, pin, tmp_path / "out", base="start")
    text = git(clone, "log", "-1", "--format=%B", ids[0])
    assert text.startswith("[MoE][Offload] Change one number\n\nWhy: ")
    assert text.rstrip().endswith("\n\nSigned-off-by: Ada Example <ada@example.org>")
    for key in (
        "Buys",
        "RFC",
        "Upstream-Status",
        "Related",
        "Adds",
        "Test",
        "Drop-when",
    ):
        assert f"\n{key}:" not in text
    who = git(clone, "log", "-1", "--format=%an <%ae> %ad", ids[0]).strip()
    assert who == "Ada Example <ada@example.org> Fri Jan 2 03:04:05 2026 +0900"


def test_nothing_but_the_branch_changes(
    sources: Sources, pin: Pin, clone: Path, tmp_path: Path
) -> None:
    """E16: neither hooks nor settings take part; index and files stay as they are."""
    naive = tmp_path / "naive"
    make(clone, sources, pin, naive, base="start", branch="plain")
    (clone / "vllm/plain.py").write_bytes(b"edited = 1\n")
    git(clone, "add", "--all")
    (clone / "vllm/plain.py").write_bytes(b"edited = 2\n")
    for name in ("pre-commit", "commit-msg", "reference-transaction"):
        hook = clone / ".git/hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text("#!/bin/sh\nexit 1\n")
        hook.chmod(0o755)
    with (clone / ".git/config").open("a") as stream:
        stream.write(HOSTILE)
    (clone / ".git/info").mkdir(exist_ok=True)
    (clone / ".git/info/attributes").write_text("*.py eol=crlf text diff=python\n")
    outside = {
        name: state
        for name, state in snapshot(clone).items()
        if not name.startswith((".git/objects", ".git/refs"))
    }
    ids = make(clone, sources, pin, tmp_path / "out", base="start")
    now = snapshot(clone)
    assert {name: now[name] for name in outside} == outside
    assert ids[-1] == git(clone, "rev-parse", "plain").strip()
    for mail in sorted((naive / "mails").iterdir()):
        assert (tmp_path / "out/mails" / mail.name).read_bytes() == mail.read_bytes()


def test_git_am_gives_the_same_trees(
    sources: Sources, pin: Pin, clone: Path, tmp_path: Path
) -> None:
    """The command of the cover letter, with the user's git; then the mails again."""
    ids = make(clone, sources, pin, tmp_path / "out", base="start")
    mails = sorted(str(path) for path in (tmp_path / "out/mails").iterdir())
    other = tmp_path / "other"
    git(tmp_path, "clone", "--quiet", str(clone), str(other))
    git(other, "am", "--quiet", "--keep-non-patch", "--keep-cr", *mails)
    assert trees(other, "start", "HEAD") == trees(clone, "start", ids[-1])
    log = git(other, "log", "--reverse", "--format=%s", "start..HEAD").splitlines()
    assert log == SUBJECTS
    git(other, "tag", "again")
    again = [
        Commit(patch, commit, ())
        for patch, commit in zip(
            load_series(sources),
            git(other, "rev-list", "--reverse", "start..again").split(),
            strict=True,
        )
    ]
    for path in write_mails(other, again, tmp_path / "again"):
        mail = tmp_path / "out/mails" / path.name
        assert path.read_bytes() == mail.read_bytes()


def test_mails_that_give_another_tree_are_noticed(
    sources: Sources, pin: Pin, clone: Path, tmp_path: Path
) -> None:
    made = export(clone, tmp_path / "out", base="start", sources=sources, pin=pin)
    mail = made.mails[0]
    mail.write_bytes(mail.read_bytes().replace(b"+line_10 = 11", b"+line_10 = 10"))
    with pytest.raises(RecipeError, match="git am"):
        check_mails(clone, made.base, made.commits[-1].id, made.mails)


def test_a_mail_is_a_patch_of_this_project_less_its_trailers(
    sources: Sources, pin: Pin, clone: Path, tmp_path: Path
) -> None:
    """E17, E18: what reads the series reads a mail, where it only edits."""
    make(clone, sources, pin, tmp_path / "out", base="start")
    second = load_series(sources)[1]
    mail = parse_patch((tmp_path / "out/mails" / second.name).read_bytes(), second.path)
    assert (mail.diff, mail.subject) == (second.diff, second.subject)
    assert set(mail.trailers) == {"Signed-off-by"}


def test_the_same_series_gives_the_same_commits(
    sources: Sources, pin: Pin, clone: Path, tmp_path: Path
) -> None:
    first = make(clone, sources, pin, tmp_path / "one", base="start")
    assert make(clone, sources, pin, tmp_path / "two", base="start") == first


def test_hunks_move_in_a_clone_at_another_commit(
    sources: Sources, pin: Pin, clone: Path, tmp_path: Path
) -> None:
    """E1: zero fuzz there as well."""
    plain = clone / "vllm/plain.py"
    plain.write_bytes(b"top = 0\n" + plain.read_bytes())
    git(clone, "commit", "--quiet", "--all", "-m", "main moved on")
    ids = make(clone, sources, pin, tmp_path / "out", base="HEAD")
    data = GitFiles(clone, ids[-1]).read("vllm/plain.py")
    assert data.startswith(b"top = 0\n") and b"line_10 = 12\nextra = 1\n" in data
    plain.write_bytes(plain.read_bytes().replace(b"line_09 = 9", b"line_09 = 0"))
    git(clone, "commit", "--quiet", "--all", "-m", "main moved on again")
    with pytest.raises(RecipeError, match="0001-change-one-number.patch: does not app"):
        make(clone, sources, pin, tmp_path / "no", base="HEAD", branch="none")
    assert git(clone, "branch", "--list", "none") == ""


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"base": "nowhere"}, "has no nowhere; fetch the tag"),
        ({}, r"has no v[\d.]+ or \w+ or pin; fetch the tag"),
        ({"base": "start", "branch": "a b"}, "--branch a b: not a branch name"),
        ({"base": "start", "branch": "taken"}, "branch taken is there and differs"),
    ],
)
def test_bad_arguments_are_explained(
    options: dict[str, str],
    complaint: str,
    sources: Sources,
    pin: Pin,
    clone: Path,
    tmp_path: Path,
) -> None:
    git(clone, "branch", "taken")
    with pytest.raises(RecipeError, match=complaint):
        make(clone, sources, pin, tmp_path / "out", **options)


def test_a_directory_that_is_no_repository_is_refused(
    sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some/file").write_text("")
    with pytest.raises(RecipeError, match="no git repository; name a clone of vLLM"):
        make(tmp_path / "some", sources, pin, tmp_path / "out")


def test_a_new_file_that_exists_there_is_refused(
    sources: Sources, pin: Pin, clone: Path, tmp_path: Path
) -> None:
    """E19: the wheel has no tests/, a clone may have a test of that name."""
    test = clone / "tests/sample/test_new.py"
    test.parent.mkdir()
    test.write_text("")
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "-m", "a test of this name")
    with pytest.raises(RecipeError, match="Adds: tests/sample/test_new.py exists in"):
        make(clone, sources, pin, tmp_path / "out", base="HEAD")


def edit_patch(sources: Sources, number: int, old: str, new: str) -> None:
    path = load_series(sources)[number].path
    text = path.read_bytes()
    assert text.count(old.encode()) == 1
    path.write_bytes(text.replace(old.encode(), new.encode()))


def test_local_patches_stay_here(
    sources: Sources, pin: Pin, clone: Path, tmp_path: Path
) -> None:
    edit_patch(sources, 1, "Pending [a sample]", "Inappropriate [for this repo only]")
    make(clone, sources, pin, tmp_path / "out", base="start")
    log = git(clone, "log", "--reverse", "--format=%s", f"start..{BRANCH}").splitlines()
    assert log == [SUBJECTS[0], SUBJECTS[2]]


def test_pull_requests_begin_where_a_patch_says(
    sources: Sources, pin: Pin, clone: Path, tmp_path: Path
) -> None:
    title = "[MoE][Offload] A pull request of two"
    edit_patch(sources, 1, "\nRFC:", f"\nPull-request: {title}\nRFC:")
    made = export(clone, tmp_path / "out", base="start", sources=sources, pin=pin)
    assert [request.title for request in made.requests] == [SUBJECTS[0], title]
    assert [len(request.commits) for request in made.requests] == [1, 2]
    names = [path.name for path in made.texts]
    assert names == [
        "cover-letter.md",
        "pull-request-0001-change-one-number.md",
        "pull-request-0002-a-pull-request-of-two.md",
    ]
    body = made.texts[2].read_text()
    for part in (
        f"<!-- Title: {title} -->",
        "## Purpose\n\n**Edit a CR LF file and an executable**\n\nA user cannot do",
        "RFC: https://github.com/vllm-project/vllm/issues/38256",
        "## Test Plan",
        "tests/sample/test_new.py   # ",
        "## Test Result\n\nNot run.",
        "## Not a duplicate of\n\nNothing is known.",
        "2 commits. 8 changed lines in 4 files that exist, 0 of them in files that",
        "with the help of an AI assistant",
    ):
        assert part in body, part
    assert "$" not in body.replace("$(", "")


def receipt(**fields: object) -> Mapping[str, Mapping[str, object]]:
    return {"one": {"hardware": {"name": "a card"}, **fields}}


def letter(sources: Sources, receipts: Mapping[str, Mapping[str, object]]) -> str:
    stats = measure(load_series(sources), sources)
    return export_text.cover_letter([], "b", "base", stats, receipts, False)


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        (
            {},
            "**Batches of 32 and more.** Not shown: no receipt has 32 or more streams.",
        ),
        (
            {"ratios": {"a_over_b_c16": 0.5, "a_over_b_c1": 2.0}},
            "The most that a receipt has is 16: `a_over_b_c16` 0.50 (one).",
        ),
        (
            {"ratios": {"a_over_b_c64": 0.75}},
            "**Batches of 32 and more.** Measured: `a_over_b_c64` 0.75 (one).",
        ),
        (
            {"ratios": {"a_over_b_c64": 0.75}, "superseded_by": "two"},
            "Not shown: no receipt has 32 or more streams.",
        ),
        ({}, "**Speculative decoding.** Not shown"),
        (
            {"engine": {"speculative_config": {"method": "mtp"}}},
            "**Speculative decoding.** Served and compared: one.",
        ),
        ({}, "**Prefill.** Not shown"),
        (
            {"ratios": {"matched_prefill_over_resident": 0.5}},
            "**Prefill.** Measured: `matched_prefill_over_resident` 0.50 (one).",
        ),
        ({}, "**CUDA graphs.** Not shown"),
        (
            {"parity": [{"mode": "FULL graphs", "tokens_equal": True}]},
            "**CUDA graphs.** They stay on. FULL graphs: equal to stock (one).",
        ),
        (
            {"parity": [{"mode": "FULL graphs", "tokens_equal": False}]},
            "FULL graphs: different from stock (one).",
        ),
        (
            {"parity": [{"kernel": "K", "dtype": "bf16", "equal": None}]},
            "\n- K, bf16 (one)\n",
        ),
        ({}, "**Lines in the hot path.** 0 changed lines"),
    ],
)
def test_objections_are_answered_from_receipts(
    fields: dict[str, object], answer: str, sources: Sources
) -> None:
    assert answer in letter(sources, receipt(**fields))


def test_the_letter_tells_what_is_not_shown(sources: Sources) -> None:
    text = letter(sources, receipt()).partition("## Not shown")[2]
    assert "- Batches of 32 and more\n- Speculative decoding\n- Prefill\n" in text
    for rival in ("offloader", "vllm#37190", "vllm#56177", "vllm#57794"):
        assert rival in letter(sources, receipt())


def test_numbers_of_the_letter_are_those_of_the_receipts() -> None:
    sources = Sources()
    text = letter(sources, load_receipts())
    shown = {
        f"`{name}` {value:.2f}"
        for receipt in load_receipts().values()
        for name, value in receipt.get("ratios", {}).items()
    }
    for ratio in re.findall(r"`\w+_c\d+` [\d.]+\d", text):
        assert ratio in shown


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("import re\n", "regex"),
        ("    from base64 import b64encode\n", "pybase64"),
        ("import pickle\n", "pickle"),
        ("import triton\n", "wrappers"),
        ("torch.cuda.empty_cache()\n", "torch.accelerator"),
        ("free = torch.cuda.mem_get_info(0)\n", "torch.accelerator"),
        ("import regex as re\n", None),
        ("event = torch.cuda.Event()\n", None),
        ("from vllm.triton_utils import triton\n", None),
    ],
)
def test_what_the_hooks_of_vllm_refuse(line: str, why: str | None) -> None:
    head = (
        "# SPDX-License-Identifier: Apache-2.0\n"
        "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
    )
    problems = refused({"vllm/a.py": head + line, "vllm/empty.py": ""})
    assert [why in text for text in problems] == ([True] if why else [])
    assert refused({"vllm/a.py": line})[0].endswith("SPDX lines")


def test_overlay_files_pass_what_the_hooks_refuse() -> None:
    sources = Sources()
    files = {
        path: sources.added_file(path).read_text()
        for patch in load_series(sources)
        for path in patch.adds
        if path.endswith(".py")
    }
    assert refused(files) == []


def test_the_pins_files_are_those_of_git(
    clone: Path, pins: dict[str, PinFiles]
) -> None:
    files = GitFiles(clone, "start")
    for path in PIN_FILES:
        assert files.read(path) == pins["cpu"].read(path)
