"""Fixtures: engines that work here, the CPU base, images built once a session."""

from collections.abc import Iterator
from functools import cache

import pytest

from recipe.cpu_base import ensure_base
from recipe.engine import ENGINES, pick_engine
from recipe.image import Result
from tests.image.support import CPU, PLATFORM, Workshop


@cache
def unusable() -> dict[str, str | None]:
    """Return why each engine does not work here, ``None`` if it does."""
    return {name: ENGINES[name]().unusable() for name in ENGINES}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what takes a workshop with every engine that works, or with podman."""
    if "workshop" in metafunc.fixturenames:
        names = [name for name, reason in unusable().items() if reason is None]
        # Buildah runs no services, so with it alone nothing would be served.
        if names == ["buildah"]:
            names.append("podman")
        metafunc.parametrize(
            "workshop", names or ["podman"], indirect=True, scope="session"
        )


@pytest.fixture(scope="session")
def workshop(request: pytest.FixtureRequest) -> Iterator[Workshop]:
    """Return a workshop; with no engine at hand podman is installed for it."""
    shop = Workshop(pick_engine(request.param, install=True), [])
    yield shop
    shop.clean()


@pytest.fixture(scope="session")
def small(workshop: Workshop) -> str:
    """Return the name of the small base."""
    return workshop.small_base()


@pytest.fixture(scope="session")
def built(workshop: Workshop, small: str) -> Result:
    """Return the overlay on the small base."""
    return workshop.overlay(small)


@pytest.fixture(scope="session")
def base(workshop: Workshop) -> str:
    """Return the name of the CPU base, which stays for the next session."""
    return ensure_base(workshop.engine, CPU, PLATFORM, install=True)


@pytest.fixture(scope="session")
def served(workshop: Workshop, base: str) -> Result:
    """Return the overlay on the CPU base."""
    return workshop.overlay(base)
