"""Fixtures: a tiny pinned release, and a series made for it with the real workflow."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from recipe import refresh, series
from recipe.apply import PinFiles
from recipe.locking import Release
from recipe.pin import Pin
from recipe.series import Sources
from recipe.wheel import WheelFiles, fetch_wheel
from tests.series.support import CACHE, NEW_FILES, commit, make_pin, message


def pin_files(pin: Pin) -> dict[str, PinFiles]:
    """Return the files of every flavor."""
    return {name: WheelFiles(fetch_wheel(pin.flavors[name])) for name in pin.flavors}


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the pin, a repository from it, three commits, and the series from them."""
    home = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home / CACHE))
        pin = make_pin(home / CACHE)
        sources = Sources(home / "root")
        repo = home / "repo"
        refresh.start(repo, fetch_wheel(pin.flavor("cpu")), sources, log=False)
        commit(
            repo,
            message("[MoE][Offload] Change one number", tuple(NEW_FILES)),
            {"vllm/plain.py": (b"line_10 = 10\n", b"line_10 = 11\nextra = 1\n")},
            NEW_FILES,
        )
        commit(
            repo,
            message("Edit a CR LF file and an executable"),
            {
                "vllm/crlf.py": (b"crlf_4 = 4\r\n", b"crlf_4 = 44\r\n"),
                "vllm/tool.py": (b"two = 2", b"two = 22"),
            },
        )
        commit(
            repo,
            message("Change the number again"),
            {
                "vllm/plain.py": (b"line_10 = 11\n", b"line_10 = 12\n"),
                "vllm/latin.py": (b"two = 2", b"two = '\xe8'"),
            },
        )
        changed = refresh.refresh(repo, sources, pin_files(pin), pin)
        assert "patches/series" in changed
    return home


@pytest.fixture
def home(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a private copy of the template: ``cache``, ``root``, ``repo``."""
    copy = tmp_path / "home"
    shutil.copytree(template, copy, symlinks=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(copy / CACHE))
    return copy


@pytest.fixture
def pin(home: Path) -> Pin:
    """Return the tiny pin."""
    return make_pin(home / CACHE)


@pytest.fixture
def pins(pin: Pin) -> dict[str, PinFiles]:
    """Return the files of the tiny pin, by flavor."""
    return pin_files(pin)


@pytest.fixture
def make_later(
    home: Path, pin: Pin, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Release]:
    """Return what makes a tiny later pin, of one flavor, out of changed files."""

    def make(changes: dict[str, bytes | None]) -> Release:
        later = make_pin(
            home / CACHE, "99.0", name="later", changes=changes, flavors=("cuda",)
        )
        monkeypatch.setattr(series, "load_pins", lambda: (pin, later))
        return later, pin_files(later)

    return make


@pytest.fixture
def sources(home: Path) -> Sources:
    """Return the series of three patches."""
    return Sources(home / "root")


@pytest.fixture
def repo(home: Path) -> Path:
    """Return the repository the series came from."""
    return home / "repo"
