"""Field case E7, the rules for headers and size, and who owns which path."""

import re
from pathlib import Path

import pytest

from recipe.errors import RecipeError
from recipe.patch import parse_patch
from recipe.series import (
    MAX_LINES,
    TRAILERS,
    WARN_LINES,
    Sources,
    check_headers,
    check_ownership,
    load_series,
    parse_series,
    require,
)
from tests.series.support import PIN_FILES, sample

ONE, TWO = "0001-one.patch", "0002-two.patch"
REQUIRED = [key for key, rule in TRAILERS.items() if rule.required]
ILL_FORMED = {
    "Buys": "short",
    "Pull-request": "A title without tags",
    "RFC": "issue 38256",
    "Upstream-Status": "Pending",
    "Related": "the other one",
    "Adds": "csrc/kernel.cu",
    "Test": "by hand",
    "Drop-when": "never",
    "Size": "big",
    "Signed-off-by": "Ada",
    "Co-authored-by": "Bob",
}


@pytest.mark.parametrize(
    "text",
    [
        f"{ONE}\n{TWO}\n",
        f"{ONE}\n{TWO}",
        f"# buys one\n{ONE}\n\n   \n# buys two\n#\n{TWO}\n",
    ],
    ids=["plain", "no final newline", "comments and blank lines"],
)
def test_e7_every_name_is_read(text: str) -> None:
    assert parse_series(text.encode(), "series") == [ONE, TWO]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (f"{ONE} # why", "alone on its line"),
        (f"{ONE} -p0\n", "alone on its line"),
        (f" {ONE}\n", "alone on its line"),
        ("0001-one\n", "alone on its line"),
        ("0001-One.patch\n", "alone on its line"),
        ("../0001-one.patch\n", "alone on its line"),
        (f"{ONE}\r\n{TWO}\r\n", "CR LF"),
        (f"{ONE}\n{ONE}\n", "comes twice"),
    ],
)
def test_e7_anything_else_is_an_error_with_its_line(text: str, complaint: str) -> None:
    with pytest.raises(RecipeError, match=rf"^series:\d+: .*{complaint}"):
        parse_series(text.encode(), "series")


def test_e7_every_file_is_listed_and_every_name_is_there(sources: Sources) -> None:
    first = load_series(sources)[0]
    stray = sources.patches / "0009-stray.patch"
    stray.write_bytes(first.raw)
    with pytest.raises(RecipeError, match="0009-stray.patch is not listed"):
        load_series(sources)
    stray.rename(sources.patches / "notes.txt")
    with pytest.raises(RecipeError, match="notes.txt is not listed"):
        load_series(sources)
    (sources.patches / "notes.txt").unlink()
    first.path.unlink()
    with pytest.raises(RecipeError, match=rf"{first.name} is listed but missing"):
        load_series(sources)
    (sources.patches / "series").unlink()
    with pytest.raises(RecipeError, match="series is missing"):
        load_series(sources)


def test_e7_numbers_follow_the_order(sources: Sources) -> None:
    series = sources.patches / "series"
    lines = series.read_text().splitlines(keepends=True)
    series.write_text("".join(line for line in lines if not line.startswith("0001")))
    (sources.patches / load_first_name(lines)).unlink()
    with pytest.raises(RecipeError, match="is number 1 of the series"):
        load_series(sources)


def load_first_name(lines: list[str]) -> str:
    """Return the first patch name of a series file."""
    return next(line.strip() for line in lines if line.startswith("0001"))


def test_the_series_of_the_fixture_is_clean(sources: Sources) -> None:
    patches = load_series(sources)
    assert len(patches) == 3
    assert patches[0].adds and patches[0].touched == ("vllm/plain.py",)
    assert check_ownership(patches, sources) == []
    assert check_headers(patches, sources) == []


def edited(sources: Sources, pattern: str, replacement: str) -> list[str]:
    """Return the header findings after an edit of the first patch's message."""
    patches = load_series(sources)
    text, count = re.subn(pattern, replacement, patches[0].raw.decode(), flags=re.M)
    assert count
    patch = parse_patch(text.encode(), patches[0].path)
    found = check_headers([patch], sources)
    assert all(problem.patch == patch.name for problem in found)
    return [problem.text for problem in found if problem.fatal]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_trailer_is_an_error(sources: Sources, key: str) -> None:
    texts = edited(sources, rf"^{key}: .*\n", "")
    assert any(text.startswith(f"trailer {key}: is missing") for text in texts)


@pytest.mark.parametrize("key", TRAILERS)
def test_an_ill_formed_trailer_is_an_error(sources: Sources, key: str) -> None:
    bad = f"{key}: {ILL_FORMED[key]}\n"
    texts = edited(sources, r"^(?=Drop-when: )", bad)
    assert any(text.startswith(f"trailer {key}: {ILL_FORMED[key]!r}") for text in texts)


def test_an_unknown_trailer_is_an_error(sources: Sources) -> None:
    texts = edited(sources, r"^Drop-when: ", "Drop-if: ")
    assert any(text.startswith("trailer Drop-if: is not known") for text in texts)


@pytest.mark.parametrize("key", [k for k, rule in TRAILERS.items() if rule.single])
def test_a_single_trailer_comes_once(sources: Sources, key: str) -> None:
    line = f"{key}: this is said more than once\n"
    texts = edited(sources, r"^(?=Test: )", line * 2)
    assert any(f"trailer {key}: comes" in text for text in texts)


@pytest.mark.parametrize(
    "status",
    [
        "Pending [a reason]",
        "Submitted [https://github.com/vllm-project/vllm/pull/1]",
        "Backport [a release]",
        "Denied [https://github.com/vllm-project/vllm/pull/1]",
        "Inappropriate [a reason]",
    ],
)
def test_every_upstream_status_is_taken(sources: Sources, status: str) -> None:
    assert edited(sources, r"^Upstream-Status: .*", f"Upstream-Status: {status}") == []


@pytest.mark.parametrize("start", ["Why: ", "Why here: ", "Default: "])
def test_a_missing_paragraph_is_an_error(sources: Sources, start: str) -> None:
    texts = edited(sources, rf"^{start}.*\n", "Something else is said here.\n")
    assert texts == [f"needs one paragraph that starts '{start}…' and says it"]


def test_the_author_signs_off(sources: Sources) -> None:
    texts = edited(
        sources, r"^Signed-off-by: .*", "Signed-off-by: Bob <bob@example.org>"
    )
    assert texts == [
        "no Signed-off-by of the author Ada Example <ada@example.org>; add it"
    ]


def test_the_test_must_exist(sources: Sources) -> None:
    texts = edited(sources, r"^Test: .*", "Test: tests/nowhere/test_none.py")
    assert texts == [
        "trailer Test: tests/nowhere/test_none.py is neither in overlay/ nor in tests/"
    ]


@pytest.mark.parametrize(
    "lines", [WARN_LINES, WARN_LINES + 1, MAX_LINES, MAX_LINES + 1]
)
@pytest.mark.parametrize("explained", [False, True])
def test_size_warns_then_fails(lines: int, explained: bool, tmp_path: Path) -> None:
    raw = sample("good.patch").read_bytes()
    added = lines - 1
    hunk = b"@@ -8,7 +8,%d @@" % (6 + added)
    raw = raw.replace(b"@@ -8,7 +8,7 @@", hunk)
    raw = raw.replace(b"+line_10 = 100\n", b"+line_10 = 100\n" * added)
    if explained:
        raw = raw.replace(b"Test: ", b"Size: it cannot be split in two\nTest: ")
    patch = parse_patch(raw, tmp_path / "0001-sample.patch")
    assert patch.changed_lines == lines
    found = [
        p for p in check_headers([patch], Sources(tmp_path)) if "changes" in p.text
    ]
    fatal = [problem.fatal for problem in found]
    assert fatal == ([] if explained or lines <= WARN_LINES else [lines > MAX_LINES])


def test_an_unclaimed_overlay_file_is_an_error(sources: Sources) -> None:
    sources.added_file("vllm/fresh/extra.py").write_text("")
    (problem,) = check_ownership(load_series(sources), sources)
    assert str(problem).startswith("overlay/vllm/fresh/extra.py: no patch claims it")
    with pytest.raises(RecipeError, match="no patch claims it"):
        require([problem])


def test_a_claimed_file_must_be_there_and_have_one_owner(sources: Sources) -> None:
    sources.added_file("vllm/fresh/code.py").unlink()
    patches = load_series(sources)
    (problem,) = check_ownership(patches, sources)
    assert problem.text.startswith("Adds: vllm/fresh/code.py is not in overlay/")
    second = parse_patch(patches[0].raw, Path("0002-again.patch"))
    problems = check_ownership([patches[0], second], sources)
    assert any("is claimed by 0001-" in problem.text for problem in problems)


def test_a_path_is_patched_or_added_never_both(sources: Sources) -> None:
    target = sources.added_file("vllm/plain.py")
    target.write_bytes(PIN_FILES["vllm/plain.py"])
    texts = [p.text for p in check_ownership(load_series(sources), sources)]
    assert any("is in overlay/ and edited here" in text for text in texts)
