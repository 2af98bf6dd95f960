"""The patched tree: hashes before and after, prefixes, nothing half done (E6, E18)."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from recipe import locking
from recipe.apply import PinFiles
from recipe.errors import RecipeError
from recipe.pin import Pin
from recipe.series import Sources, load_series
from recipe.tree import build_tree, compile_tree, overlay_files, series_digest
from recipe.wheel import fetch_wheel, unpack
from tests.series.support import EXECUTABLE, NEW_FILES, PIN_FILES

LINES = {
    0: b"line_10 = 10\n",
    1: b"line_10 = 11\n",
    2: b"line_10 = 11\n",
    3: b"line_10 = 12\n",
}


def tamper(sources: Sources, *keys: str) -> str:
    """Change one hash in the lock; return the old one."""
    table = json.loads(sources.lock.read_bytes())
    inner = table
    for key in keys[:-1]:
        inner = inner[key]
    old: str = inner[keys[-1]]
    inner[keys[-1]] = "0" * 64
    sources.lock.write_text(json.dumps(table))
    return old


@pytest.mark.parametrize("flavor", ["cpu", "cuda"])
@pytest.mark.parametrize("upto", [0, 1, 2, 3, None])
def test_every_prefix(
    flavor: str, upto: int | None, sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    tree = build_tree(flavor, tmp_path / "tree", upto, sources=sources, pin=pin)
    count = 3 if upto is None else upto
    assert len(tree.patches) == count
    assert LINES[count] in (tree.root / "vllm/plain.py").read_bytes()
    for path, data in NEW_FILES.items():
        assert (tree.root / path).exists() == (count > 0)
        if count:
            assert (tree.root / path).read_bytes() == data
    untouched = set(PIN_FILES) - set(tree.files)
    assert all((tree.root / p).read_bytes() == PIN_FILES[p] for p in untouched)
    files = overlay_files(upto, sources=sources, pin=pin)
    assert set(files) == set(tree.files)
    assert all((tree.root / path).read_bytes() == files[path] for path in files)


def test_e9_modes_are_those_of_the_wheel(
    sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    tree = build_tree("cpu", tmp_path / "tree", sources=sources, pin=pin)
    modes = {
        p: (tree.root / p).stat().st_mode & 0o777 for p in (*PIN_FILES, *NEW_FILES)
    }
    assert modes.pop(EXECUTABLE) == 0o755
    assert set(modes.values()) == {0o644}


def test_e10_an_empty_package_is_there(
    sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    tree = build_tree("cpu", tmp_path / "tree", sources=sources, pin=pin)
    compile_tree(tree.root)
    assert list((tree.root / "vllm/fresh/__pycache__").glob("__init__.*.pyc"))


def test_compile_shows_a_syntax_error(
    sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    sources.added_file("vllm/fresh/code.py").write_text("def broken(:\n")
    tree = build_tree("cpu", tmp_path / "tree", sources=sources, pin=pin)
    with pytest.raises(RecipeError, match="does not compile"):
        compile_tree(tree.root)


@pytest.mark.parametrize("upto", [-1, 4])
def test_too_many_patches(
    upto: int, sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=rf"--patches {upto}: the series has 3"):
        build_tree("cpu", tmp_path / "tree", upto, sources=sources, pin=pin)


def test_e18_a_failure_leaves_the_destination_alone(
    sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    first, second, third = load_series(sources)
    second.path.write_bytes(second.raw.replace(b" crlf_3", b" crlf_x"))
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(RecipeError) as caught:
        build_tree("cpu", out / "tree", sources=sources, pin=pin)
    text = str(caught.value)
    assert text.startswith(f"{second.name}: does not apply: ")
    assert "vllm/crlf.py" in text
    assert f"patches not run: {third.name}" in text
    assert "repair: ./build.sh refresh --start DIR" in text
    assert first.name not in text
    assert list(out.iterdir()) == []
    with pytest.raises(RecipeError):
        overlay_files(sources=sources, pin=pin)


def test_e6_a_second_run_is_refused(sources: Sources, pin: Pin, tmp_path: Path) -> None:
    tree = build_tree("cpu", tmp_path / "tree", sources=sources, pin=pin)
    with pytest.raises(RecipeError, match="is not an empty directory"):
        build_tree("cpu", tree.root, sources=sources, pin=pin)
    again = build_tree("cpu", tmp_path / "again", sources=sources, pin=pin)
    result = subprocess.run(["diff", "-r", tree.root, again.root], capture_output=True)
    assert result.returncode == 0


def test_e1_the_pin_is_verified_before(
    sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    old = tamper(sources, "pin", "vllm/crlf.py")
    with pytest.raises(
        RecipeError, match=rf"vllm/crlf.py: sha256 is {old}, the pin has 0"
    ):
        build_tree("cpu", tmp_path / "tree", sources=sources, pin=pin)


def test_e1_every_file_is_verified_after(
    sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    name = load_series(sources)[1].name
    old = tamper(sources, "after", name, "vllm/tool.py")
    expected = (
        rf"{name}: vllm/tool.py: sha256 after the patch is {old}, lock.json says 0"
    )
    with pytest.raises(RecipeError, match=expected):
        build_tree("cpu", tmp_path / "tree", sources=sources, pin=pin)


@pytest.mark.parametrize("flavor", ["cpu", "cuda"])
def test_the_lock_belongs_to_the_wheels(
    flavor: str, sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    tamper(sources, "wheels", flavor)
    with pytest.raises(RecipeError, match="made for other wheels"):
        build_tree("cpu", tmp_path / "tree", sources=sources, pin=pin)


def test_a_changed_patch_needs_a_new_lock(
    sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    third = load_series(sources)[2]
    third.path.write_bytes(third.raw.replace(b"line_10 = 12", b"line_10 = 13"))
    with pytest.raises(RecipeError, match="sha256 after the patch"):
        build_tree("cpu", tmp_path / "tree", sources=sources, pin=pin)


def test_a_changed_wheel_is_refused(pin: Pin) -> None:
    wheel = fetch_wheel(pin.flavor("cpu"))
    with wheel.open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(RecipeError, match="sha256 is .*, the pin says"):
        fetch_wheel(pin.flavor("cpu"))


def test_an_added_path_must_not_exist_at_the_pin(
    sources: Sources, pins: dict[str, PinFiles], pin: Pin, tmp_path: Path
) -> None:
    first = load_series(sources)[0]
    first.path.write_bytes(first.raw.replace(b"vllm/fresh/code.py", b"vllm/imports.py"))
    sources.added_file("vllm/fresh/code.py").rename(
        sources.added_file("vllm/imports.py")
    )
    with pytest.raises(RecipeError, match="Adds: vllm/imports.py exists in"):
        build_tree("cpu", tmp_path / "tree", sources=sources, pin=pin)
    with pytest.raises(RecipeError, match="Adds: vllm/imports.py exists in"):
        locking.make_lock(load_series(sources), pins, pin)


def test_a_patched_path_must_exist_at_the_pin(
    sources: Sources, pins: dict[str, PinFiles], pin: Pin, tmp_path: Path
) -> None:
    second = load_series(sources)[1]
    second.path.write_bytes(second.raw.replace(b"vllm/tool.py", b"vllm/none.py"))
    for make in (
        lambda: build_tree("cpu", tmp_path / "tree", sources=sources, pin=pin),
        lambda: locking.make_lock(load_series(sources), pins, pin),
    ):
        with pytest.raises(RecipeError, match=r"vllm/none.py.*new files"):
            make()


@pytest.mark.parametrize("change", ["patch", "overlay", "series", "lock", "removal"])
def test_the_digest_covers_everything(change: str, sources: Sources) -> None:
    before = series_digest(sources)
    assert series_digest(sources) == before
    target = {
        "patch": load_series(sources)[0].path,
        "overlay": sources.added_file("vllm/fresh/code.py"),
        "series": sources.patches / "series",
        "lock": sources.lock,
        "removal": sources.added_file("vllm/fresh/__init__.py"),
    }[change]
    if change == "removal":
        target.unlink()
    else:
        target.write_bytes(target.read_bytes() + b"\n")
    assert series_digest(sources) != before
    (sources.overlay / "vllm/fresh/__pycache__").mkdir()


def test_unpack_refuses_a_directory_in_use(pin: Pin, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="is not empty"):
        unpack(fetch_wheel(pin.flavor("cpu")), tmp_path)


@pytest.mark.skipif(shutil.which("quilt") is None, reason="quilt is not installed")
def test_quilt_applies_the_series(sources: Sources, pin: Pin, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    unpack(fetch_wheel(pin.flavor("cpu")), root)
    command = ["quilt", "--quiltrc", "-", "push", "-a", "--fuzz=0"]
    env = {"QUILT_PATCHES": str(sources.patches), "PATH": "/usr/bin:/bin"}
    subprocess.run(command, cwd=root, env=env, check=True, capture_output=True)
    files = overlay_files(sources=sources, pin=pin)
    for path in set(files) - set(NEW_FILES):
        assert (root / path).read_bytes() == files[path]
