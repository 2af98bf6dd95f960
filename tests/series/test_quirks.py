"""Field cases E1 to E6, E8 to E15 and E17 to E19: one sample diff for each quirk.

For each quirk the behaviour of git, GNU patch and unidiff is shown with the real tool,
then what this project makes of it.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from unidiff import PatchSet, UnidiffParseError

from recipe.apply import apply_series
from recipe.errors import RecipeError
from recipe.git import run_git
from recipe.patch import read_patch
from recipe.series import Sources, check_ownership
from tests.series.support import PIN_FILES, one_patch, sample, write_files

needs_patch = pytest.mark.skipif(
    shutil.which("patch") is None, reason="GNU patch is not installed"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a directory with the files of the pin."""
    root = tmp_path / "tree"
    write_files(root, PIN_FILES)
    return root


def git_apply(tree: Path, name: str, *options: str) -> int:
    """Run git apply as a user might, and return its status."""
    command = ["git", "apply", "-p1", *options, str(sample(name))]
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    return subprocess.run(command, cwd=tree, env=env, capture_output=True).returncode


def gnu_patch(
    tree: Path, name: str, *options: str
) -> "subprocess.CompletedProcess[str]":
    """Run GNU patch with fuzz and offsets as they are by default."""
    command = ["patch", "-p1", "-f", *options, "-i", str(sample(name))]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


def refused(name: str) -> str:
    """Return why a sample is refused when it is read."""
    with pytest.raises(RecipeError) as caught:
        read_patch(sample(name))
    text = str(caught.value)
    assert text.startswith(name)
    return text


def ours(tree: Path, name: str) -> dict[str, str]:
    """Apply a sample as this project does."""
    return apply_series(tree, [read_patch(sample(name))], None)[name]


def test_a_good_sample_applies(tree: Path) -> None:
    ours(tree, "good.patch")
    assert b"line_10 = 100\n" in (tree / "vllm/plain.py").read_bytes()


@needs_patch
def test_e1_gnu_patch_lands_in_the_wrong_function(tree: Path) -> None:
    before = PIN_FILES["vllm/twins.py"]
    result = gnu_patch(tree, "e01_fuzz.patch")
    assert result.returncode == 0 and "fuzz" in result.stdout
    after = (tree / "vllm/twins.py").read_bytes()
    assert after != before and b"gone" not in after


def test_e1_no_fuzz_here(tree: Path) -> None:
    assert git_apply(tree, "e01_fuzz.patch") == 1
    with pytest.raises(
        RecipeError, match=r"e01_fuzz.patch: does not apply: .*twins.py"
    ):
        ours(tree, "e01_fuzz.patch")
    assert (tree / "vllm/twins.py").read_bytes() == PIN_FILES["vllm/twins.py"]


def test_e1_an_offset_is_refused(tree: Path) -> None:
    target = tree / "vllm/plain.py"
    target.write_bytes(b"# one line more\n" + target.read_bytes())
    with pytest.raises(RecipeError, match=r"Hunk #1 succeeded at 9 \(offset 1 line\)"):
        ours(tree, "good.patch")


@needs_patch
def test_e2_tools_disagree_on_a_crlf_patch(tree: Path) -> None:
    assert git_apply(tree, "e02_crlf_patch.patch") != 0
    assert gnu_patch(tree, "e02_crlf_patch.patch").returncode == 0


def test_e2_a_crlf_patch_is_refused() -> None:
    assert ":1: line ends in CR LF" in refused("e02_crlf_patch.patch")


def test_e3_ignoring_whitespace_mixes_line_ends(tree: Path) -> None:
    assert git_apply(tree, "e03_crlf_lost.patch") == 1
    assert git_apply(tree, "e03_crlf_lost.patch", "--ignore-whitespace") == 0
    data = (tree / "vllm/crlf.py").read_bytes()
    assert 0 < data.count(b"\r\n") < data.count(b"\n")


def test_e3_crlf_target_keeps_its_bytes(tree: Path) -> None:
    ours(tree, "e03_crlf_target.patch")
    data = (tree / "vllm/crlf.py").read_bytes()
    assert b"crlf_4 = 44\r\n" in data and data.count(b"\r\n") == data.count(b"\n") == 9


def test_e3_lost_and_mixed_line_ends_are_refused(tree: Path) -> None:
    with pytest.raises(RecipeError, match="does not apply"):
        ours(tree, "e03_crlf_lost.patch")
    assert "some lines end in CR LF and some in LF" in refused("e03_crlf_mixed.patch")


def test_e4_trimmed_context_is_refused(tree: Path, tmp_path: Path) -> None:
    assert git_apply(tree, "e04_trimmed_context.patch") == 0
    converted = tmp_path / "converted.patch"
    data = sample("e04_trimmed_context.patch").read_bytes()
    converted.write_bytes(data.replace(b"\n", b"\r\n"))
    assert git_apply(tree, str(converted)) == 128
    assert "blank line without its leading space" in refused(
        "e04_trimmed_context.patch"
    )


@needs_patch
def test_e5_a_blank_line_hides_later_hunks(tree: Path) -> None:
    """GNU patch and unidiff each tell another story and none of them an error."""
    assert git_apply(tree, "e05_blank_after_hunk.patch") == 128
    assert gnu_patch(tree, "e05_blank_after_hunk.patch").returncode == 0
    data = (tree / "vllm/plain.py").read_bytes()
    assert b"line_10 = 100\n" in data and b"line_30 = 30\n" in data
    text = sample("e05_blank_after_hunk.patch").read_text()
    (file,) = PatchSet(text)
    assert (file.added, file.removed) == (2, 2)


def test_e5_a_blank_line_after_a_hunk_is_refused() -> None:
    text = refused("e05_blank_after_hunk.patch")
    assert "blank line" in text or "after a complete hunk" in text


def test_e5_lines_on_disk_are_counted(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on disk is compared with the patch, whatever the tool's status says."""
    patch = read_patch(sample("good.patch"))
    other = read_patch(sample("e03_crlf_target.patch"))
    # The diff of one patch with the edits of another stands for a tool that skips.
    wrong = type(patch)(**(vars(patch) | {"diff": other.diff}))
    with pytest.raises(
        RecipeError, match=r"good.patch: vllm/plain.py: the patch says 1 "
    ):
        apply_series(tree, [wrong], None)


@needs_patch
def test_e6_gnu_patch_applies_twice_or_reverses(tree: Path) -> None:
    for _ in range(2):
        assert gnu_patch(tree, "e06_short_context.patch").returncode == 0
    assert (tree / "vllm/imports.py").read_bytes().count(b"import c\n") == 2
    command = ["patch", "-p1", "-t", "-i", str(sample("good.patch"))]
    for expected in (100, 10):
        assert subprocess.run(command, cwd=tree, capture_output=True).returncode == 0
        line = b"line_10 = %d\n" % expected
        assert line in (tree / "vllm/plain.py").read_bytes()


@pytest.mark.parametrize("name", ["e06_short_context.patch", "good.patch"])
def test_e6_applied_twice_is_refused(tree: Path, name: str) -> None:
    ours(tree, name)
    with pytest.raises(RecipeError, match="does not apply|offset"):
        ours(tree, name)


@pytest.mark.parametrize("name", ["e08_no_prefix.patch", "e08_deep_prefix.patch"])
def test_e8_only_p1_paths_are_taken(name: str, tmp_path: Path) -> None:
    if name == "e08_no_prefix.patch":
        assert "only -p1 paths" in refused(name)
        return
    sources = one_patch(tmp_path, sample(name))
    problems = check_ownership([read_patch(sample(name))], sources)
    assert any("src/vllm/plain.py is not vllm/**/*.py" in p.text for p in problems)


def test_e9_modes_are_kept(tree: Path) -> None:
    ours(tree, "e09_executable_target.patch")
    assert (tree / "vllm/tool.py").stat().st_mode & 0o777 == 0o755


def test_e9_a_mode_change_is_refused() -> None:
    assert "changes a file mode" in refused("e09_mode_change.patch")


@needs_patch
def test_e10_an_empty_new_file_is_refused_with_the_cure(tree: Path) -> None:
    """New files are whole files in overlay/, so that none can be lost."""
    assert gnu_patch(tree, "e10_new_empty_file.patch").returncode == 0
    assert (tree / "vllm/empty/__init__.py").read_bytes() == b""
    assert "put the file into overlay/" in refused("e10_new_empty_file.patch")


def test_e11_quoted_paths_are_refused() -> None:
    """Unidiff keeps the quotes of a path, so its answer could not be compared."""
    text = sample("e11_quoted_path.patch").read_text()
    (file,) = PatchSet(text)
    assert file.path != "vllm/é.json"
    assert "without quoting" in refused("e11_quoted_path.patch")
    assert "plain path" in refused("e11_spaced_path.patch")


def test_e12_a_rename_is_refused() -> None:
    assert "renames" in refused("e12_pure_rename.patch")


def test_e12_unidiff_on_a_pure_rename() -> None:
    text = sample("e12_pure_rename.patch").read_text()
    try:
        (file,) = PatchSet(text)
    except UnidiffParseError as error:
        assert "Unexpected trailing newline" in str(error)  # before release 1
    else:
        assert file.is_rename and not file.added


@needs_patch
def test_e13_binary_without_its_bytes(tree: Path) -> None:
    """GNU patch makes an empty file of it; with NUL bytes git refuses."""
    assert git_apply(tree, "e13_binary.patch") != 0
    assert gnu_patch(tree, "e13_binary.patch").returncode == 0
    assert (tree / "vllm/t.bin").read_bytes() == b""


@pytest.mark.parametrize("name", ["e13_binary.patch", "e13_binary_full.patch"])
def test_e13_binary_is_refused(name: str) -> None:
    assert "vllm/t.bin" in refused(name)


@pytest.mark.parametrize(
    ("name", "path", "change"),
    [
        ("e14_adds_final_newline.patch", "vllm/no_eol.py", 1),
        ("e14_drops_final_newline.patch", "vllm/plain.py", -1),
    ],
)
def test_e14_the_final_newline_comes_and_goes(
    tree: Path, name: str, path: str, change: int
) -> None:
    ours(tree, name)
    data = (tree / path).read_bytes()
    assert data.count(b"\n") == PIN_FILES[path].count(b"\n") + change


def test_e14_form_feeds_are_no_line_ends(tree: Path) -> None:
    patch = read_patch(sample("e14_form_feed.patch"))
    (edit,) = patch.edits
    assert (edit.added.total(), edit.removed.total()) == (2, 1)
    ours(tree, "e14_form_feed.patch")
    assert "\f\nthree = '\u2028'\n".encode() in (tree / "vllm/feeds.py").read_bytes()


def test_e15_patches_are_bytes(tree: Path) -> None:
    with pytest.raises(UnicodeDecodeError):
        PatchSet.from_filename(sample("e15_latin1.patch"), encoding="utf-8")
    ours(tree, "e15_latin1.patch")
    assert b"two = '\xe8'\n" in (tree / "vllm/latin.py").read_bytes()


@needs_patch
def test_e17_quoted_diffs_create_files(tree: Path) -> None:
    gnu_patch(tree, "e17_prose_indented.patch")
    assert (tree / "vllm/quoted.py").exists()


@pytest.mark.parametrize("name", ["e17_prose_diff.patch", "e17_prose_indented.patch"])
def test_e17_a_diff_in_the_message_is_refused(name: str) -> None:
    assert "which patch programs take for a diff" in refused(name)


def test_e17_a_marked_quotation_is_prose(tree: Path) -> None:
    ours(tree, "e17_prose_marked.patch")
    assert not (tree / "vllm/quoted.py").exists()
    if shutil.which("patch"):
        gnu_patch(tree, "e17_prose_marked.patch", "-R")
        assert not (tree / "vllm/quoted.py").exists()


@needs_patch
def test_e18_gnu_patch_accepts_an_empty_file(tree: Path) -> None:
    assert git_apply(tree, "e18_empty.patch") == 128
    assert gnu_patch(tree, "e18_empty.patch").returncode == 0


@pytest.mark.parametrize("name", ["e18_empty.patch", "e18_prose_only.patch"])
def test_e18_a_patch_without_a_diff_is_refused(name: str) -> None:
    assert "empty file" in refused(name) or "only prose" in refused(name)


@pytest.mark.parametrize("name", ["e19_csrc.patch", "e19_upstream_test.patch"])
def test_e19_files_that_no_wheel_holds_are_refused(name: str, tmp_path: Path) -> None:
    sources = one_patch(tmp_path, sample(name))
    problems = check_ownership([read_patch(sample(name))], sources)
    assert any("is not vllm/**/*.py or *.json" in problem.text for problem in problems)


def test_git_apply_inside_a_repository_skips_files(tmp_path: Path) -> None:
    """It exits 0 without touching the file; the environment used here prevents it."""
    outer = tmp_path / "outer"
    inner = outer / "inner"
    write_files(inner, PIN_FILES)
    subprocess.run(["git", "init", "-q", outer], check=True)
    env = {key: value for key, value in os.environ.items() if key[:4] != "GIT_"}
    command = ["git", "apply", "-p1", str(sample("good.patch"))]
    assert subprocess.run(command, cwd=inner, env=env).returncode == 0
    assert (inner / "vllm/plain.py").read_bytes() == PIN_FILES["vllm/plain.py"]
    ours(inner, "good.patch")
    assert b"line_10 = 100\n" in (inner / "vllm/plain.py").read_bytes()


def test_every_sample_is_used() -> None:
    text = Path(__file__).read_text()
    unused = [path.name for path in sample("").iterdir() if path.name not in text]
    assert unused == []


def test_git_is_run_without_configuration(tmp_path: Path) -> None:
    listing = run_git(["config", "--list", "--show-origin"], cwd=tmp_path).stdout
    origins = {line.split(b"\t")[0] for line in listing.splitlines()}
    assert origins == {b"command line:"}
    assert Sources(tmp_path).patches == tmp_path / "patches"
