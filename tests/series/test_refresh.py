"""The author's workflow, and field cases E3, E15 and E16 through it."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from recipe import refresh
from recipe.apply import PinFiles
from recipe.errors import RecipeError
from recipe.pin import Pin
from recipe.series import Sources, load_series, overlay_paths
from recipe.wheel import fetch_wheel
from tests.series.support import NEW_FILES, PIN_FILES, commit, git, message, snapshot

# Settings of a developer that would each change the bytes of a patch.
HOSTILE = """
[diff]
    noprefix = true
    mnemonicPrefix = true
    algorithm = patience
    context = 7
    interHunkContext = 9
    renames = copies
    orderFile = order
    external = false
    colorMoved = zebra
    suppressBlankEmpty = true
    indentHeuristic = false
[color]
    ui = always
[core]
    abbrev = 7
    autocrlf = true
    eol = crlf
    whitespace = cr-at-eol
    quotePath = false
[format]
    subjectPrefix = RFC PATCH
    signature = mine
    numbered = true
    attach = true
    thread = true
    signOff = true
    from = true
    pretty = oneline
    useAutoBase = true
    notes = true
    coverLetter = true
    headers = "X-Mine: yes\\n"
[am]
    threeWay = true
    keepcr = false
[apply]
    whitespace = fix
    ignoreWhitespace = change
[commit]
    gpgSign = true
    cleanup = strip
[i18n]
    commitEncoding = latin-1
    logOutputEncoding = latin-1
[log]
    showSignature = true
    date = relative
"""


def test_import_and_export_reproduce_every_byte(
    sources: Sources, pins: dict[str, PinFiles], pin: Pin
) -> None:
    assert refresh.check(sources, pins, pin) == []


@pytest.mark.parametrize("scope", ["user", "repository"])
def test_e16_user_git_config_does_not_leak(
    scope: str,
    home: Path,
    repo: Path,
    sources: Sources,
    pins: dict[str, PinFiles],
    pin: Pin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = home / "gitconfig"
    config.write_text(HOSTILE)
    before = snapshot(sources.root)
    naive = home / "naive"
    if scope == "user":
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
        monkeypatch.setenv("GIT_DIFF_OPTS", "-u9")
        monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    else:
        with (repo / ".git/config").open("a") as stream:
            stream.write(HOSTILE)
    # The same options without the guard give other bytes: the settings do bite.
    with naive.open("wb") as stream:
        command = ["git", "format-patch", "--stdout", "-1", "HEAD"]
        subprocess.run(command, cwd=repo, stdout=stream, stderr=subprocess.DEVNULL)
    assert b"--- a/vllm" not in naive.read_bytes()
    assert refresh.refresh(repo, sources, pins, pin) == []
    assert refresh.check(sources, pins, pin) == []
    assert snapshot(sources.root) == before


def test_e3_e15_bytes_survive_the_round_trip(sources: Sources) -> None:
    _, second, third = load_series(sources)
    assert b"-crlf_4 = 4\r\n+crlf_4 = 44\r\n" in second.raw
    assert b"+two = '\xe8'\n" in third.raw and third.touched[0] == "vllm/latin.py"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("series", b"CR LF", b"cr lf"),
        ("lock.json", b'"format": 1', b'"format":  1'),
        ("0002-edit-a-cr-lf-file-and-an-executable.patch", b"@@ -2,7", b"@@ -3,7"),
        ("0002-edit-a-cr-lf-file-and-an-executable.patch", b"\n\nWhy:", b"\n\n\nWhy:"),
    ],
)
def test_check_shows_a_changed_byte(
    name: str,
    old: bytes,
    new: bytes,
    sources: Sources,
    pins: dict[str, PinFiles],
    pin: Pin,
) -> None:
    file = sources.patches / name
    data = file.read_bytes()
    assert data.count(old) == 1
    file.write_bytes(data.replace(old, new))
    lines = refresh.check(sources, pins, pin)
    assert lines and lines[0] == f"--- patches/{name}"


def test_the_series_file_is_derived_from_the_headers(sources: Sources) -> None:
    text = (sources.patches / "series").read_text()
    for patch in load_series(sources):
        assert f"# {patch.trailers['Buys'][0]}\n{patch.name}\n" in text


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("[MoE][Offload] Resolve weights", "0007-resolve-weights.patch"),
        ("Say `x.y` and _z", "0007-say-x-y-and-z.patch"),
        ("[MoE]", "0007-patch.patch"),
        ("W" * 80, f"0007-{'w' * 50}.patch"),
        ("word " * 30, f"0007-{'-'.join(['word'] * 10)}.patch"),
    ],
)
def test_patch_names(subject: str, name: str) -> None:
    assert refresh.patch_name(7, subject) == name


def test_start_and_refresh_give_the_same_series(
    home: Path, sources: Sources, pins: dict[str, PinFiles], pin: Pin
) -> None:
    again = home / "again"
    refresh.start(again, fetch_wheel(pin.flavor("cpu")), sources, log=False)
    before = snapshot(sources.root)
    assert refresh.refresh(again, sources, pins, pin) == []
    assert snapshot(sources.root) == before
    git(again, "diff", "--quiet", "pin", "--", "vllm/data.json")


def test_an_amended_series_is_written(
    repo: Path, sources: Sources, pins: dict[str, PinFiles], pin: Pin
) -> None:
    git(repo, "reset", "--quiet", "--hard", "HEAD^^")
    (repo / "vllm/fresh/code.py").write_bytes(b"VALUE = 2\n")
    git(repo, "rm", "--quiet", "vllm/fresh/__init__.py")
    git(repo, "add", "--all")
    text = message("Change one number only", ("vllm/fresh/code.py",))
    test = tuple(path for path in NEW_FILES if path.startswith("tests/"))
    text = text.replace("Test:", f"Adds: {test[0]}\nTest:")
    git(repo, "commit", "--quiet", "--amend", "-m", text)
    changed = refresh.refresh(repo, sources, pins, pin)
    (patch,) = load_series(sources)
    assert patch.name == "0001-change-one-number-only.patch"
    assert overlay_paths(sources) == sorted([*test, "vllm/fresh/code.py"])
    assert sources.added_file("vllm/fresh/code.py").read_bytes() == b"VALUE = 2\n"
    assert set(changed) == {
        "overlay/vllm/fresh/__init__.py",
        "overlay/vllm/fresh/code.py",
        "patches/0001-change-one-number.patch",
        "patches/0001-change-one-number-only.patch",
        "patches/0002-edit-a-cr-lf-file-and-an-executable.patch",
        "patches/0003-change-the-number-again.patch",
        "patches/lock.json",
        "patches/series",
    }
    assert refresh.check(sources, pins, pin) == []


def test_overlay_edits_on_one_side_are_merged(
    repo: Path, sources: Sources, pins: dict[str, PinFiles], pin: Pin
) -> None:
    here = sources.added_file("vllm/fresh/__init__.py")
    here.write_bytes(b"edited = 'here'\n")
    (repo / "vllm/fresh/code.py").write_bytes(b"edited = 'there'\n")
    git(repo, "commit", "--quiet", "--all", "--amend", "--no-edit")
    changed = refresh.refresh(repo, sources, pins, pin)
    assert changed == ["overlay/vllm/fresh/code.py"]
    assert here.read_bytes() == b"edited = 'here'\n"


def test_overlay_edits_on_both_sides_are_refused(
    repo: Path, sources: Sources, pins: dict[str, PinFiles], pin: Pin
) -> None:
    here = sources.added_file("vllm/fresh/code.py")
    here.write_bytes(b"edited = 'here'\n")
    (repo / "vllm/fresh/code.py").write_bytes(b"edited = 'there'\n")
    git(repo, "commit", "--quiet", "--all", "--amend", "--no-edit")
    with pytest.raises(
        RecipeError, match="overlay/vllm/fresh/code.py was changed here"
    ):
        refresh.refresh(repo, sources, pins, pin)
    assert here.read_bytes() == b"edited = 'here'\n"


def test_patches_changed_meanwhile_are_not_overwritten(
    repo: Path, sources: Sources, pins: dict[str, PinFiles], pin: Pin
) -> None:
    with (sources.patches / "series").open("a") as stream:
        stream.write("# a note by hand\n")
    with pytest.raises(RecipeError, match="changed since .* was made"):
        refresh.refresh(repo, sources, pins, pin)


@pytest.mark.parametrize(
    ("prepare", "complaint"),
    [
        ("uncommitted", "not committed: .* vllm/plain.py"),
        ("untracked", "not committed: .* vllm/new.py"),
        ("deletion", "deletes the file or changes its mode"),
        ("mode", "deletes the file or changes its mode"),
        ("prose", "edits no file of the pin"),
        ("flavor", "vllm/build.py differs between the flavors"),
        ("executable", "new file with mode 100755"),
        ("merge", "there is a merge commit"),
        ("quotation", "which patch programs take for a diff"),
        ("rebasing", "rebase-merge is in progress"),
        ("foreign", "was not made by ./build.sh refresh --start"),
    ],
)
def test_refresh_refuses(
    prepare: str,
    complaint: str,
    repo: Path,
    sources: Sources,
    pins: dict[str, PinFiles],
    pin: Pin,
) -> None:
    before = snapshot(sources.root)
    plain, tool = repo / "vllm/plain.py", repo / "vllm/tool.py"
    text = message("Do something odd")
    if prepare == "uncommitted":
        plain.write_bytes(b"")
    elif prepare == "untracked":
        (repo / "vllm/new.py").write_bytes(b"")
    elif prepare == "deletion":
        git(repo, "rm", "--quiet", "vllm/data.json")
        git(repo, "commit", "--quiet", "-m", text)
    elif prepare == "mode":
        tool.chmod(0o644)
        git(repo, "commit", "--quiet", "--all", "-m", text)
    elif prepare == "prose":
        git(repo, "commit", "--quiet", "--allow-empty", "-m", text)
    elif prepare == "flavor":
        commit(repo, text, {"vllm/build.py": (b"FLAVOR", b"CHANGED")})
    elif prepare == "executable":
        new = repo / "vllm/script.py"
        new.write_bytes(b"pass\n")
        new.chmod(0o755)
        commit(repo, text, {"vllm/data.json": (b"2", b"3")})
    elif prepare == "merge":
        git(repo, "checkout", "--quiet", "-b", "side", "HEAD^")
        commit(repo, text, {"vllm/data.json": (b"2", b"3")})
        git(repo, "merge", "--quiet", "--no-edit", "series")
    elif prepare == "quotation":
        text = text.replace("Why:", "--- a/vllm/x.py\n\nWhy:", 1)
        commit(repo, text, {"vllm/data.json": (b"2", b"3")})
    elif prepare == "rebasing":
        (repo / ".git/rebase-merge").mkdir()
    elif prepare == "foreign":
        shutil.rmtree(repo / ".git")
    with pytest.raises(RecipeError, match=complaint):
        refresh.refresh(repo, sources, pins, pin)
    assert snapshot(sources.root) == before


def test_start_stops_where_a_patch_fails_and_goes_on_with_git(
    home: Path, sources: Sources, pins: dict[str, PinFiles], pin: Pin
) -> None:
    """The repair that the error of ``tree`` names: mend in git, then refresh."""
    second = load_series(sources)[1]
    broken = second.raw.replace(b" crlf_3 = 3\r\n", b" crlf_3 = 0\r\n")
    assert broken != second.raw
    second.path.write_bytes(broken)
    again = home / "again"
    with pytest.raises(RecipeError, match="git am stopped in .*again") as caught:
        refresh.start(again, fetch_wheel(pin.flavor("cpu")), sources, log=False)
    assert f"not applied: {second.name}, 0003-change-the-number-again.patch" in str(
        caught.value
    )
    with pytest.raises(RecipeError, match="rebase-apply is in progress"):
        refresh.refresh(again, sources, pins, pin)
    for path, old, new in (
        ("vllm/crlf.py", b"crlf_4 = 4\r\n", b"crlf_4 = 44\r\n"),
        ("vllm/tool.py", b"two = 2", b"two = 22"),
    ):
        (again / path).write_bytes(PIN_FILES[path].replace(old, new))
    git(again, "add", "--all")
    git(again, "am", "--quiet", "--continue")
    assert refresh.refresh(again, sources, pins, pin) == [f"patches/{second.name}"]
    assert second.path.read_bytes() == second.raw
    assert refresh.check(sources, pins, pin) == []


def test_the_lock_names_every_file(sources: Sources, pin: Pin) -> None:
    table = json.loads(sources.lock.read_bytes())
    patches = load_series(sources)
    assert list(table["after"]) == [patch.name for patch in patches]
    for patch in patches:
        assert set(table["after"][patch.name]) == set(patch.touched)
    assert table["added"] == sorted(NEW_FILES)
    assert table["wheels"] == {name: f.sha256 for name, f in pin.flavors.items()}
