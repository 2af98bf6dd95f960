"""The pinned upstream release, read from ``recipe/pin.toml``."""

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
        package: Distribution name on the package index.
        wheel: File name of the wheel.
        sha256: Hash of the wheel, 64 hex digits.
        base_image: Image that holds this build, ``None`` if there is none to name.
        base_python: Minor version of the Python in the base image, such as ``3.12``.
    """

    name: str
    package: str
    wheel: str
    sha256: str
    base_image: str | None
    base_python: str


@dataclass(frozen=True)
class Pin:
    """The upstream release that the series applies to.

    Attributes:
        version: Release number.
        commit: Abbreviated upstream commit id of the release.
        python: Python versions that the wheels accept (PEP 440 specifier).
        flavors: The builds, by name.
    """

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
                f"flavor {name!r} is not in the pin; choose from: {known}"
            )
        return self.flavors[name]


def _text(
    table: Mapping[str, Any], key: str, where: str, pattern: str, what: str
) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise RecipeError(f"{where}: {key} = {value!r} is not {what}; correct it there")
    return value


def _flavor(name: str, table: Any, where: str) -> Flavor:
    where = f"{where} [flavors.{name}]"
    if not isinstance(table, dict):
        raise RecipeError(f"{where} is not a table; write one line per key")
    known = {"package", "wheel", "sha256", "base_image", "base_python"}
    if unknown := sorted(set(table) - known):
        raise RecipeError(f"{where}: unknown key {unknown[0]!r}; remove it")
    base_image = None
    if "base_image" in table:
        base_image = _text(table, "base_image", where, r"\S+", "an image reference")
    return Flavor(
        name=name,
        package=_text(table, "package", where, r"[a-z0-9-]+", "a package name"),
        wheel=_text(table, "wheel", where, r"[\w.+-]+\.whl", "a wheel file name"),
        sha256=_text(table, "sha256", where, r"[0-9a-f]{64}", "64 hex digits"),
        base_image=base_image,
        base_python=_text(
            table, "base_python", where, r"3\.\d+", "a Python minor version"
        ),
    )


@cache
def load_pin(path: Path = PIN_FILE) -> Pin:
    """Read and validate the pin.

    Raises:
        RecipeError: The file is missing or a field is absent or ill-formed.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path}: {error}; restore it from git") from error
    where = str(path)
    flavors = table.get("flavors")
    if not isinstance(flavors, dict) or not flavors:
        raise RecipeError(f"{where}: no [flavors.…] table; restore it from git")
    return Pin(
        version=_text(table, "version", where, r"\d+(\.\d+)+\w*", "a release number"),
        commit=_text(table, "commit", where, r"[0-9a-f]{7,40}", "a commit id"),
        python=_text(table, "python", where, r"[\d.,<>=!~]+", "a version specifier"),
        flavors={name: _flavor(name, value, where) for name, value in flavors.items()},
    )
