"""``pin.toml`` with several releases, and the series at a later one.

Field cases E1, E6, E7 and E19 again, where line numbers may be others.
"""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from recipe import refresh
from recipe import series as series_module
from recipe.apply import PinFiles, apply_series
from recipe.drift import CONFLICT, place
from recipe.errors import RecipeError
from recipe.locking import Release, later_locks, make_lock
from recipe.patch import read_patch
from recipe.pin import Pin, load_pin, load_pins
from recipe.series import Sources, load_series
from recipe.tree import build_tree, overlay_files
from recipe.wheel import fetch_wheel
from tests.series.support import (
    PIN_FILES,
    SAMPLES,
    commit,
    git,
    message,
    sample,
    snapshot,
    write_files,
)

PLAIN = PIN_FILES["vllm/plain.py"]
# Two lines more above every hunk, and a change where no hunk stands.
MOVED: dict[str, bytes | None] = {
    "vllm/plain.py": b"zero = 0\nnull = 0\n" + PLAIN.replace(b"line_30 = 30", b"x = 1"),
}
# The line that the first and the third patch edit has another neighbour.
CLASHING: dict[str, bytes | None] = {
    "vllm/plain.py": PLAIN.replace(b"line_11 = 11\n", b"line_11 = 0\n"),
}
Make = Callable[[dict[str, bytes | None]], Release]

ENTRY = """
[[pin]]
name = "{name}"
version = "{version}"
commit = "0123456"
python = ">=3.11"
[pin.flavors.cuda]
package = "vllm"
wheel = "vllm-1-py3-none-any.whl"
sha256 = "{sha256}"
base_python = "3.12"
"""


def entry(name: str, version: str) -> str:
    return ENTRY.format(name=name, version=version, sha256="0" * 64)


def test_pins_are_found_by_name_and_release(tmp_path: Path) -> None:
    path = tmp_path / "pin.toml"
    path.write_text(entry("base", "1.0") + entry("next", "2.0"))
    first, second = load_pins(path)
    assert (first.name, second.version) == ("base", "2.0")
    assert second.any_flavor.version == "2.0"
    for pin in load_pins():
        assert load_pin(pin.name) is load_pin(pin.version) is pin
    assert load_pin() is load_pins()[0]
    with pytest.raises(RecipeError, match=r"--pin 0\.1: not in .*choose from: base"):
        load_pin("0.1")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"no \[\[pin\]\] table"),
        ("pin = 1", r"no \[\[pin\]\] table"),
        ("pin = [1]", "pin 1 is not a table"),
        ("version = '1.0'", "unknown key 'version'"),
        (entry("base", "1.0") * 2, "two pins are called 'base'"),
        (entry("base", "1.0") + entry("next", "1.0"), "two pins are called '1.0'"),
        (entry("Base", "1.0"), "'Base' is not a lower-case word"),
        (entry("base", "one"), "'one' is not a release number"),
        (entry("base", "1.0").replace("sha256", "md5"), "unknown key 'md5'"),
        (entry("base", "1.0").split("[pin.fl")[0], r"no \[pin.flavors.…\] table"),
    ],
)
def test_bad_pins_are_refused(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "pin.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=complaint):
        load_pins(path)


def test_hunks_may_stand_elsewhere_at_a_later_pin(
    make_later: Make,
    sources: Sources,
    pins: dict[str, PinFiles],
    pin: Pin,
    repo: Path,
    tmp_path: Path,
) -> None:
    """E1, E19: the result is recorded in the later pin's own lock and held to it."""
    later = make_later(MOVED)
    assert refresh.refresh(repo, sources, pins, pin, [later]) == [
        "patches/later/lock.json"
    ]
    assert refresh.check(sources, pins, pin, [later]) == []
    tree = build_tree("cuda", tmp_path / "tree", sources=sources, pin=later[0])
    expected = (MOVED["vllm/plain.py"] or b"").replace(
        b"line_10 = 10\n", b"line_10 = 12\nextra = 1\n"
    )
    assert (tree.root / "vllm/plain.py").read_bytes() == expected
    assert overlay_files(sources=sources, pin=later[0])["vllm/plain.py"] == expected
    with pytest.raises(RecipeError, match="line numbers must be exact"):
        make_lock(load_series(sources), later[1], later[0])
    lock = sources.of(later[0]).lock
    lock.write_text(lock.read_text().replace('plain.py": "', 'plain.py": "0'))
    with pytest.raises(RecipeError, match="sha256"):
        overlay_files(sources=sources, pin=later[0])


def test_e1_a_hunk_that_fits_in_two_places_is_refused(
    make_later: Make, sources: Sources, tmp_path: Path
) -> None:
    copy = b"".join(b"line_%02d = %d\n" % (n, n) for n in range(7, 14))
    changed = b"top = 0\n" + PLAIN + copy
    write_files(tmp_path, {"vllm/plain.py": changed})
    first = load_series(sources)[0]
    complaint = "hunk 1 fits at lines 9, 42; make a variant with more context"
    with pytest.raises(RecipeError, match=complaint):
        apply_series(tmp_path, [first], None, exact=False)


def test_e6_a_later_pin_that_has_the_change_is_refused(
    make_later: Make, sources: Sources
) -> None:
    have = PLAIN.replace(b"line_10 = 10\n", b"line_10 = 11\nextra = 1\n")
    later = make_later({"vllm/plain.py": have})
    with pytest.raises(RecipeError, match="0001-change-one-number.patch: does not app"):
        later_locks(load_series(sources), sources, [later])


def test_a_conflict_at_a_later_pin_stops_refresh(
    make_later: Make,
    sources: Sources,
    pins: dict[str, PinFiles],
    pin: Pin,
    repo: Path,
) -> None:
    before = snapshot(sources.root)
    with pytest.raises(RecipeError, match=r"pin later \(99.0\)(.|\n)*build.sh drift"):
        refresh.refresh(repo, sources, pins, pin, [make_later(CLASHING)])
    assert snapshot(sources.root) == before


def replace_in(repo: Path, name: str, old: bytes, new: bytes) -> None:
    """Mend a file where `git am` stopped."""
    data = (repo / name).read_bytes()
    assert data.count(old) == 1
    (repo / name).write_bytes(data.replace(old, new))


def test_a_variant_is_written_for_what_differs_only(
    home: Path,
    make_later: Make,
    sources: Sources,
    pins: dict[str, PinFiles],
    pin: Pin,
    tmp_path: Path,
) -> None:
    later = make_later(CLASHING)
    before = {name: data for name, data in sources.held().items()}
    first, _, third = load_series(sources)
    again = home / "later"
    wheel = fetch_wheel(later[0].any_flavor)
    with pytest.raises(RecipeError, match=f"not applied: {first.name}"):
        refresh.start(again, wheel, sources, log=False, pin=later[0])
    replace_in(again, "vllm/plain.py", b"= 10\n", b"= 11\nextra = 1\n")
    git(again, "add", "--all")
    # The third patch edits the same place and stops there as well.
    with pytest.raises(subprocess.CalledProcessError):
        git(again, "am", "--quiet", "--continue")
    replace_in(again, "vllm/plain.py", b"line_10 = 11\n", b"line_10 = 12\n")
    replace_in(again, "vllm/latin.py", b"two = 2", b"two = '\xe8'")
    git(again, "add", "--all")
    git(again, "am", "--quiet", "--continue")
    changed = refresh.refresh(again, sources, pins, pin, [later])
    assert changed == [
        f"patches/later/{first.name}",
        f"patches/later/{third.name}",
        "patches/later/lock.json",
    ]
    held = sources.held()
    assert {name: held[name] for name in before} == before
    assert refresh.check(sources, pins, pin, [later]) == []
    mine = load_series(sources.of(later[0]))
    assert [p.path.parent.name for p in mine] == ["later", "patches", "later"]
    assert load_series(sources)[0].path == first.path
    tree = build_tree("cuda", tmp_path / "tree", sources=sources, pin=later[0])
    data = (tree.root / "vllm/plain.py").read_bytes()
    assert b"line_10 = 12\nextra = 1\nline_11 = 0\n" in data
    # One byte of a variant is noticed like one of any patch.
    variant = mine[0].path
    variant.write_bytes(variant.read_bytes().replace(b"\n\nWhy:", b"\n\n\nWhy:"))
    assert refresh.check(sources, pins, pin, [later])


def test_a_later_pin_becomes_the_first(
    make_later: Make,
    home: Path,
    sources: Sources,
    pins: dict[str, PinFiles],
    pin: Pin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last step of a rebase: `pin.toml` names the release first."""
    later, files = make_later(MOVED)
    again = home / "later"
    wheel = fetch_wheel(later.any_flavor)
    refresh.start(again, wheel, sources, log=False, pin=later)
    refresh.refresh(again, sources, pins, pin, [(later, files)])
    assert (sources.patches / "later").is_dir()
    promoted = replace(later, name=pin.name)
    monkeypatch.setattr(series_module, "load_pins", lambda: (promoted,))
    changed = refresh.refresh(again, sources, files, promoted)
    assert "patches/later/lock.json" in changed
    assert not (sources.patches / "later").exists()
    assert refresh.check(sources, files, promoted) == []
    assert b"@@ -10,7 +10,8 @@" in load_series(sources)[0].raw


def test_e7_stray_variants_are_refused(make_later: Make, sources: Sources) -> None:
    later, _ = make_later(MOVED)
    folder = sources.patches / "later"
    folder.mkdir()
    (folder / "0009-none.patch").write_bytes(b"")
    for mine in (sources, sources.of(later)):
        with pytest.raises(RecipeError, match="has no patch of this name"):
            load_series(mine)
    (folder / "0009-none.patch").unlink()
    folder.rename(sources.patches / "former")
    with pytest.raises(RecipeError, match="no later pin .* is called so"):
        load_series(sources)


BAD = (
    *(
        "e02_crlf_patch",
        "e03_crlf_mixed",
        "e04_trimmed_context",
        "e05_blank_after_hunk",
    ),
    *("e08_no_prefix", "e09_mode_change", "e10_new_empty_file", "e11_quoted_path"),
    *("e12_pure_rename", "e13_binary_full", "e17_prose_diff", "e18_empty"),
)


@pytest.mark.parametrize("name", BAD)
def test_group_e_is_refused_in_a_variant(
    name: str, make_later: Make, sources: Sources
) -> None:
    """E2 to E5, E8 to E13, E17, E18: a variant is held to the form of any patch."""
    later, files = make_later(MOVED)
    first = load_series(sources)[0]
    variant = sources.patches / "later" / first.name
    variant.parent.mkdir()
    shutil.copyfile(sample(f"{name}.patch"), variant)
    with pytest.raises(RecipeError, match=first.name):
        load_series(sources.of(later))
    with pytest.raises(RecipeError, match=first.name):
        later_locks(load_series(sources), sources, [(later, files)])
    assert load_series(sources)[0].path == first.path


ABOVE = b"above = 0\n\nabove = 1\n"
APPLICABLE = sorted(
    path.name
    for path in SAMPLES.glob("*.patch")
    if path.stem not in BAD
    and path.stem not in ("e08_deep_prefix", "e11_spaced_path", "e13_binary")
    and path.stem not in ("e17_prose_indented", "e18_prose_only")
    and not path.stem.startswith("e19")
)


@pytest.mark.parametrize("name", APPLICABLE)
@pytest.mark.parametrize(
    "above", [b"", b"above = 0\n\nabove = 1\n"], ids=["as is", "moved"]
)
def test_group_e_at_other_lines(name: str, above: bytes, tmp_path: Path) -> None:
    """E1, E3, E6, E9, E14, E15: what `drift` says is what applying does, bytes too.

    Twice: nothing applies a second time.
    """
    patch = read_patch(sample(name))
    write_files(tmp_path, PIN_FILES)
    for edit in patch.edits:
        path = tmp_path / edit.path
        ends = b"\r\n" if edit.path.endswith("crlf.py") else b"\n"
        path.write_bytes(above.replace(b"\n", ends) + path.read_bytes())
    for _ in range(2):
        modes = {e.path: (tmp_path / e.path).stat().st_mode for e in patch.edits}
        placed = [place(e, (tmp_path / e.path).read_bytes()) for e in patch.edits]
        found = [placement.status for one, _ in placed for placement in one]
        if CONFLICT in found:
            with pytest.raises(RecipeError, match=name):
                apply_series(tmp_path, [patch], None, exact=False)
            return
        apply_series(tmp_path, [patch], None, exact=False)
        for edit, (_, data) in zip(patch.edits, placed, strict=True):
            assert (tmp_path / edit.path).read_bytes() == data
            assert (tmp_path / edit.path).stat().st_mode == modes[edit.path]
    raise AssertionError(f"{name} applied twice")


def test_patches_are_added_at_the_first_pin_only(
    make_later: Make,
    home: Path,
    sources: Sources,
    pins: dict[str, PinFiles],
    pin: Pin,
) -> None:
    later = make_later(MOVED)
    again = home / "later"
    wheel = fetch_wheel(later[0].any_flavor)
    refresh.start(again, wheel, sources, log=False, pin=later[0])
    commit(again, message("One patch more"), {"vllm/data.json": (b"2", b"3")})
    with pytest.raises(RecipeError, match="add and rename patches at the first pin"):
        refresh.refresh(again, sources, pins, pin, [later])


def test_a_repository_of_an_unknown_release_is_refused(
    make_later: Make,
    home: Path,
    sources: Sources,
    pins: dict[str, PinFiles],
    pin: Pin,
) -> None:
    later = make_later(MOVED)
    again = home / "later"
    wheel = fetch_wheel(later[0].any_flavor)
    refresh.start(again, wheel, sources, log=False, pin=later[0])
    with pytest.raises(RecipeError, match=r"release 99\.0, which is not in recipe/pin"):
        refresh.refresh(again, sources, pins, pin)
