"""``lock.json``: hashes of every touched file, at the pin and after each patch.

``patches/`` holds that of the first pin, ``patches/NAME/`` that of the pin NAME. They
are written by ``refresh`` and never by hand. A lock lets the series be checked without
the wheels, and it makes a build stop when a single byte is not as it was.
"""

import json
from dataclasses import dataclass
from typing import Any

from recipe.errors import RecipeError
from recipe.pin import Pin
from recipe.series import Sources

FORMAT = 1


@dataclass(frozen=True)
class Lock:
    """What is known about the files that the series touches.

    Attributes:
        wheels: sha256 of the wheel the hashes were taken from, by flavor.
        pin: sha256 of each touched file at the pin, by path.
        after: sha256 of each file after a patch, by patch name and path.
        added: Paths that the pin does not have and the overlay brings.
    """

    wheels: dict[str, str]
    pin: dict[str, str]
    after: dict[str, dict[str, str]]
    added: tuple[str, ...]

    def final(self, path: str) -> str:
        """Return the hash of a touched file after the whole series."""
        hashes = [files[path] for files in self.after.values() if path in files]
        return hashes[-1] if hashes else self.pin[path]


def dump_lock(lock: Lock) -> bytes:
    """Return the bytes of the lock file."""
    table = {
        "format": FORMAT,
        "wheels": dict(sorted(lock.wheels.items())),
        "pin": dict(sorted(lock.pin.items())),
        "after": {name: dict(sorted(lock.after[name].items())) for name in lock.after},
        "added": sorted(lock.added),
    }
    return (json.dumps(table, indent=2) + "\n").encode()


def load_lock(sources: Sources, pin: Pin) -> Lock:
    """Read the lock of a pin.

    Raises:
        RecipeError: It is missing, ill-formed, or made for other wheels.
    """
    sources = sources.of(pin)
    cure = "run ./build.sh refresh"
    try:
        table: dict[str, Any] = json.loads(sources.lock.read_bytes())
        if table["format"] != FORMAT:
            raise RecipeError(f"{sources.lock}: format {table['format']}; {cure}")
        lock = Lock(
            wheels=dict(table["wheels"]),
            pin=dict(table["pin"]),
            after={name: dict(files) for name, files in table["after"].items()},
            added=tuple(table["added"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(f"{sources.lock}: {error!r}; {cure}") from error
    wheels = {name: flavor.sha256 for name, flavor in pin.flavors.items()}
    if lock.wheels != wheels:
        raise RecipeError(
            f"{sources.lock}: made for other wheels than the pin's; {cure}"
        )
    return lock
