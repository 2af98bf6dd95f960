"""What is told about a release that differs: hunks, files, symbols."""

from collections.abc import Callable
from pathlib import Path

import pytest

from recipe import drift
from recipe.apply import PinFiles, apply_series, extract
from recipe.drift import CLEAN, CONFLICT, OFFSET, DirectoryFiles
from recipe.errors import RecipeError
from recipe.locking import Release as PinnedRelease
from recipe.pin import Pin
from recipe.series import Sources, load_series
from recipe.symbols import Release, Symbol, compare, usage
from tests.series.support import PIN_FILES, write_files

PLAIN = PIN_FILES["vllm/plain.py"]
Make = Callable[[dict[str, bytes | None]], PinnedRelease]


def statuses(
    make: Make, sources: Sources, pins: dict[str, PinFiles], changes: dict[str, bytes]
) -> tuple[list[str], list[str]]:
    """Return each patch's status, and the lines of the report."""
    later, files = make(dict(changes))
    found = drift.measure(sources, pins["cpu"], files["cuda"], later)
    lines = list(drift.report(found, " --pin later"))
    assert found.fits == (CONFLICT not in [patch.status for patch in found.patches])
    return [patch.status for patch in found.patches], lines


def test_an_equal_release_is_clean(
    make_later: Make, sources: Sources, pins: dict[str, PinFiles]
) -> None:
    found, lines = statuses(make_later, sources, pins, {})
    assert found == [CLEAN, CLEAN, CLEAN]
    assert "3 patches: 3 clean, 0 offset, 0 conflict" in lines


def test_moved_hunks_are_told_with_their_distance(
    make_later: Make, sources: Sources, pins: dict[str, PinFiles]
) -> None:
    changes = {"vllm/plain.py": b"zero = 0\nnull = 0\n" + PLAIN}
    found, lines = statuses(make_later, sources, pins, changes)
    assert found == [OFFSET, CLEAN, OFFSET]
    assert lines[0] == (
        "offset    0001-change-one-number.patch  (vllm/plain.py hunk 1 +2)"
    )
    assert "changed   vllm/plain.py (2 lines)" in lines


def test_a_conflict_is_told_with_patch_hunk_and_cure(
    make_later: Make, sources: Sources, pins: dict[str, PinFiles]
) -> None:
    """One conflict hides no other, in the same place or elsewhere."""
    changes = {
        "vllm/plain.py": PLAIN.replace(b"line_11 = 11\n", b"line_11 = 'other'\n"),
        "vllm/tool.py": b"#!/usr/bin/env python3\n\none = 1\ntwo = 2\nthree = 3\n",
    }
    found, lines = statuses(make_later, sources, pins, changes)
    assert found == [CONFLICT, CONFLICT, CONFLICT]
    text = "\n".join(line.strip() for line in lines)
    assert "conflict  0001-change-one-number.patch\n" in text
    assert "vllm/plain.py hunk 1, line 8; the most alike is at line 8:" in text
    assert "- line_11 = 11\n+ line_11 = 'other'\n" in text
    assert "vllm/tool.py hunk 1, line 1; the most alike is" in text
    assert "cure: ./build.sh refresh --start DIR --pin later stops there;" in text


def test_an_ambiguous_hunk_is_a_conflict(
    make_later: Make, sources: Sources, pins: dict[str, PinFiles]
) -> None:
    """E1: `git apply` would take the nearest place."""
    copy = b"".join(b"line_%02d = %d\n" % (n, n) for n in range(7, 14))
    changes = {"vllm/plain.py": b"top = 0\n" + PLAIN + copy}
    found, lines = statuses(make_later, sources, pins, changes)
    assert found[0] == CONFLICT
    assert any("fits at lines 9, 42, and only one can be meant" in x for x in lines)


def test_gone_and_new_files_are_told(
    make_later: Make, sources: Sources, pins: dict[str, PinFiles]
) -> None:
    later, files = make_later({"vllm/tool.py": None, "vllm/fresh/code.py": b"V = 2\n"})
    found = drift.measure(sources, pins["cpu"], files["cuda"], later)
    assert [patch.status for patch in found.patches] == [CONFLICT, CONFLICT, CLEAN]
    text = "\n".join(drift.report(found, ""))
    assert "vllm/tool.py is gone; find where its code went" in text
    assert "Adds: vllm/fresh/code.py is there now" in text


def test_a_broken_symbol_is_told_with_where_it_is_imported(
    make_later: Make, sources: Sources, pins: dict[str, PinFiles]
) -> None:
    code = sources.added_file("vllm/fresh/code.py")
    code.write_bytes(b"from vllm.twins import f0\n\nVALUE = f0()\n")
    new = PIN_FILES["vllm/twins.py"].replace(b"def f0()", b"def f0(mode)")
    later, files = make_later({"vllm/twins.py": new})
    found = drift.measure(sources, pins["cpu"], files["cuda"], later)
    assert not found.fits
    text = "\n".join(line.strip() for line in drift.report(found, ""))
    assert (
        "broken    vllm.twins.f0: takes mode\n"
        "imported by vllm/fresh/code.py:1\n"
        "cure: change that in overlay/ so that it fits every pin\n"
    ) in text
    assert "1 imported symbols: 1 broken" in text


def test_hunks_are_placed_as_git_places_them(
    make_later: Make, sources: Sources, pins: dict[str, PinFiles], pin: Pin
) -> None:
    """The report and the build use two programs; they must agree byte for byte."""
    _, files = make_later({"vllm/plain.py": b"zero = 0\n" + PLAIN})
    texts = drift.patch_drift(load_series(sources), files["cuda"])[1]
    root = sources.root / "work"
    extract(files["cuda"], list(texts), root)
    apply_series(root, load_series(sources), None, exact=False)
    for path, data in texts.items():
        assert (root / path).read_bytes() == data, path


def test_a_directory_is_read_like_a_wheel(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"holds no vllm/__init__\.py"):
        DirectoryFiles(tmp_path)
    write_files(tmp_path, PIN_FILES)
    files = DirectoryFiles(tmp_path)
    assert files.read("vllm/crlf.py") == PIN_FILES["vllm/crlf.py"]
    assert (files.mode("vllm/tool.py"), files.has("vllm/none.py")) == (0o755, False)


def release(**files: str) -> Release:
    """Return a release of modules of `lib`, given by name."""
    paths = {f"lib/{name}.py": text.encode() for name, text in files.items()}
    paths.setdefault("lib/__init__.py", b"")
    return Release(paths.get)


def findings(user: str, old: Release, new: Release) -> list[tuple[str, bool]]:
    used = usage({"user/code.py": user.encode()}, "lib")
    return [(str(found), found.broken) for found in compare(used, old, new)]


NOT_FOUND = "is not found in the release that the overlay is written for"
FUNCTION = "from lib.a import f\nf(1, key=2)\n"


@pytest.mark.parametrize(
    ("user", "old", "new", "expected"),
    [
        (FUNCTION, "def f(x, key): ...", "def f(x, key):\n    return 1", []),
        (
            FUNCTION,
            "def f(x, key): ...",
            "def f(x, key, more=0): ...",
            [("lib.a.f: takes more=0", False)],
        ),
        (
            FUNCTION,
            "def f(x, key): ...",
            "def f(x, first=0, key=0): ...",
            [("lib.a.f: takes key no more, takes first=0, takes key=0", False)],
        ),
        (
            FUNCTION,
            "def f(x, key): ...",
            "def f(x, key, *, more): ...",
            [("lib.a.f: takes more", True)],
        ),
        (
            FUNCTION,
            "def f(x, key): ...",
            "def f(x, name): ...",
            [("lib.a.f: takes key no more, takes name", True)],
        ),
        (
            FUNCTION,
            "def f(x, key): ...",
            "async def f(x, key): ...",
            [("lib.a.f: is asynchronous on one side only", True)],
        ),
        (
            FUNCTION,
            "def f(x, key) -> int: ...",
            "def f(x, key) -> str: ...",
            [("lib.a.f: returns str instead of int", False)],
        ),
        (
            "from lib.a import f\nregister(f)\n",
            "def f(x, y=0): ...",
            "def f(y=0, x=0): ...",
            [("lib.a.f: takes x no more, takes x=0", True)],
        ),
        (
            FUNCTION,
            "def f(x, key): ...",
            "",
            [("lib.a.f: is gone; it was in lib/a.py", True)],
        ),
        (
            FUNCTION,
            "def f(x, key): ...",
            "def f(x, key) ...",
            [("lib.a.f: cannot be looked up, lib/a.py does not parse", True)],
        ),
        (
            FUNCTION,
            "def f(x, key): ...",
            "class f: ...",
            [("lib.a.f: was a function, is a class", True)],
        ),
        (
            "from lib.a import C\nC(1).run(2)\n",
            "class C:\n    def __init__(self, a): ...\n    def run(self, b): ...",
            "class C:\n    def __init__(self, a, c): ...\n    def other(self, b): ...",
            [("lib.a.C:__init__: takes c", True), ("lib.a.C:run: is gone", True)],
        ),
        (
            "from lib.a import C\nC().run(2)\n",
            "class B:\n    def run(self, b): ...\nclass C(B): ...",
            "class B:\n    def run(self): ...\nclass C(B): ...",
            [("lib.a.C:run: takes b no more", True)],
        ),
        (
            "from lib.a import C\nprint(C.size)\n",
            "class C:\n    size: int = 0\n    unused: int = 0",
            "class C:\n    size: float = 0",
            [("lib.a.C:size: was of type int, is of type float", False)],
        ),
        (
            "from lib.a import here\nhere.run()\n",
            "class P:\n    def run(self): ...\nhere: P",
            "class P: ...\nhere: P",
            [("lib.a.here:run: is gone", True)],
        ),
        (
            "from lib import a\na.f()\n",
            "def f(): ...",
            "",
            [("lib.a.f: is gone; it was in lib/a.py", True)],
        ),
        (
            "def later():\n    import lib.a as module\n    module.f()\n",
            "def f(): ...",
            "g = 1",
            [("lib.a.f: is gone; it was in lib/a.py", True)],
        ),
        (
            "from lib.a import NAME\n",
            "if True:\n    NAME = 1",
            "try:\n    NAME = 2\nexcept OSError:\n    NAME = 3",
            [],
        ),
        (
            "from lib.a import made\n",
            "def __getattr__(name): ...",
            "",
            [("lib.a.made: is gone; it was in lib/a.py", True)],
        ),
        (
            "from lib.a import nothing\n",
            "",
            "nothing = 1",
            [(f"lib.a.nothing: {NOT_FOUND}", False)],
        ),
    ],
)
def test_symbols_are_compared_by_use(
    user: str, old: str, new: str, expected: list[tuple[str, bool]]
) -> None:
    assert findings(user, release(a=old), release(a=new)) == expected


@pytest.mark.parametrize(
    "export", ["from lib.b import f", "from .b import f", "from lib.b import *"]
)
def test_re_exports_are_followed(export: str) -> None:
    old = release(a=export, b="def f(): ...")
    new = release(a=export, b="def f(x): ...")
    assert findings("from lib.a import f\nf()\n", old, new) == [
        ("lib.a.f: takes x", True)
    ]
    definition = old.find(Symbol("lib.a", "f"))
    assert definition is not None and definition.path == "lib/b.py"


def test_relative_imports_of_the_overlay_are_resolved() -> None:
    used = usage({"lib/sub/code.py": b"from ..a import f\nfrom . import g\n"}, "lib")
    assert set(used.symbols) == {Symbol("lib.a", "f"), Symbol("lib.sub", "g")}
