"""The pinned upstream releases, read from ``recipe/pin.toml``."""

import argparse
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from recipe.errors import RecipeError
from recipe.paths import PIN_FILE


@dataclass(frozen=True)
class Flavor:
    """One build of the pinned release.

    Attributes:
        name: How this project calls it: ``cpu`` or ``cuda``.
        version: Release number.
        package: Distribution name on the package index.
        wheel: File name of the wheel.
        sha256: Hash of the wheel, 64 hex digits.
        base_image: Image that holds this build, ``None`` if there is none to name.
        base_python: Minor version of the Python in the base image, such as ``3.12``.
    """

    name: str
    version: str
    package: str
    wheel: str
    sha256: str
    base_image: str | None
    base_python: str


@dataclass(frozen=True)
class Pin:
    """An upstream release that the series applies to.

    Attributes:
        name: Its role, such as ``base``.
        version: Release number.
        commit: Abbreviated upstream commit id of the release.
        python: Python versions that the wheels accept (PEP 440 specifier).
        flavors: The builds, by name.
    """

    name: str
    version: str
    commit: str
    python: str
    flavors: dict[str, Flavor]

    def flavor(self, name: str) -> Flavor:
        """Return the flavor called ``name``.

        Raises:
            RecipeError: There is no such flavor.
        """
        if name not in self.flavors:
            known = ", ".join(sorted(self.flavors))
            raise RecipeError(
                f"flavor {name!r} is not in pin {self.name} ({self.version}); choose "
                f"from: {known}"
            )
        return self.flavors[name]

    @property
    def any_flavor(self) -> Flavor:
        """The build to read files from that are the same in all: the smallest one."""
        return self.flavors.get("cpu") or next(iter(self.flavors.values()))


def _text(
    table: Mapping[str, Any], key: str, where: str, pattern: str, what: str
) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise RecipeError(f"{where}: {key} = {value!r} is not {what}; correct it there")
    return value


def _flavor(name: str, table: Any, version: str, where: str) -> Flavor:
    where = f"{where} [pin.flavors.{name}]"
    if not isinstance(table, dict):
        raise RecipeError(f"{where} is not a table; write one line per key")
    known = {"package", "wheel", "sha256", "base_image", "base_python"}
    _check_keys(table, known, where)
    base_image = None
    if "base_image" in table:
        base_image = _text(table, "base_image", where, r"\S+", "an image reference")
    return Flavor(
        name=name,
        version=version,
        package=_text(table, "package", where, r"[a-z0-9-]+", "a package name"),
        wheel=_text(table, "wheel", where, r"[\w.+-]+\.whl", "a wheel file name"),
        sha256=_text(table, "sha256", where, r"[0-9a-f]{64}", "64 hex digits"),
        base_image=base_image,
        base_python=_text(
            table, "base_python", where, r"3\.\d+", "a Python minor version"
        ),
    )


def _check_keys(table: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(table) - known):
        raise RecipeError(f"{where}: unknown key {unknown[0]!r}; remove it")


def _pin(table: Any, where: str) -> Pin:
    if not isinstance(table, dict):
        raise RecipeError(f"{where} is not a table; write one line per key")
    _check_keys(table, {"name", "version", "commit", "python", "flavors"}, where)
    flavors = table.get("flavors")
    if not isinstance(flavors, dict) or not flavors:
        raise RecipeError(f"{where}: no [pin.flavors.…] table; restore it from git")
    version = _text(table, "version", where, r"\d+(\.\d+)+\w*", "a release number")
    return Pin(
        name=_text(table, "name", where, r"[a-z][a-z0-9-]*", "a lower-case word"),
        version=version,
        commit=_text(table, "commit", where, r"[0-9a-f]{7,40}", "a commit id"),
        python=_text(table, "python", where, r"[\d.,<>=!~]+", "a version specifier"),
        flavors={
            name: _flavor(name, value, version, where)
            for name, value in flavors.items()
        },
    )


@cache
def load_pins(path: Path = PIN_FILE) -> tuple[Pin, ...]:
    """Read and validate every pin, the one that the series is written for first.

    Raises:
        RecipeError: The file is missing, a field is absent or ill-formed, or two pins
            have one name or release.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path}: {error}; restore it from git") from error
    _check_keys(table, {"pin"}, str(path))
    entries = table.get("pin")
    if not isinstance(entries, list) or not entries:
        raise RecipeError(f"{path}: no [[pin]] table; restore it from git")
    pins = tuple(
        _pin(entry, f"{path} pin {number}") for number, entry in enumerate(entries, 1)
    )
    names = [word for pin in pins for word in (pin.name, pin.version)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RecipeError(f"{path}: two pins are called {twice[0]!r}; rename one")
    return pins


def load_pin(name: str | None = None) -> Pin:
    """Return one pin, by its name or its release; the first by default.

    Raises:
        RecipeError: There is no such pin; or see :func:`load_pins`.
    """
    pins = load_pins()
    if name is None:
        return pins[0]
    for pin in pins:
        if name in (pin.name, pin.version):
            return pin
    known = ", ".join(f"{pin.name} ({pin.version})" for pin in pins)
    raise RecipeError(f"--pin {name}: not in {PIN_FILE}; choose from: {known}")


def add_pin_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--pin``; :func:`load_pin` takes its value."""
    parser.add_argument(
        "--pin",
        metavar="NAME",
        help="name or number of a release in recipe/pin.toml; default: the first",
    )
