"""F4, F5 and F7 again, on bases that hold a later pin's release."""

import dataclasses
import hashlib
import re
from collections.abc import Iterator

import pytest

from recipe.engine import pick_engine
from recipe.errors import RecipeError
from recipe.image import Result, plan_overlay
from recipe.pin import Flavor, Pin, load_pin, load_pins
from tests.image.support import CPU, SITE, Workshop

pytestmark = [
    pytest.mark.image,
    pytest.mark.parametrize(
        "pin", load_pins()[1:], ids=lambda pin: pin.name, scope="module"
    ),
]
BASE = "localhost/pinned-hot-test-small:later"


@pytest.fixture(scope="module")
def shop() -> Iterator[Workshop]:
    """Return a workshop with one engine: what the engines differ in is tested apart."""
    made = Workshop(pick_engine(install=True), [])
    yield made
    made.clean()


@pytest.fixture(scope="module")
def flavor(pin: Pin) -> Flavor:
    """Return the pin's build as it would be on the small base's Python."""
    return dataclasses.replace(pin.any_flavor, base_python=CPU.base_python)


@pytest.fixture(scope="module")
def base(shop: Workshop, flavor: Flavor) -> str:
    return shop.small_base(tag=BASE, flavor=flavor)


@pytest.fixture(scope="module")
def built(shop: Workshop, base: str, flavor: Flavor) -> Result:
    return shop.overlay(base, flavor)


def test_f4_labels_tell_the_release(built: Result, base: str, pin: Pin) -> None:
    labels = built.image.labels
    assert labels["pinned-hot-experts.vllm"] == f"{pin.version} ({pin.commit})"
    assert labels["org.opencontainers.image.base.name"] == base
    assert labels["org.opencontainers.image.base.digest"] == built.base.digest


def test_f4_base_of_another_pin_is_refused(
    shop: Workshop, base: str, flavor: Flavor, pin: Pin
) -> None:
    with pytest.raises(RecipeError, match="the base is not the pinned release"):
        shop.overlay(base, CPU)
    own = plan_overlay(pin=pin).before
    first = plan_overlay(pin=load_pin()).before
    moved = min(path for path, old in own.items() if old != first.get(path) and old)
    drifted = shop.derive(base, f"RUN echo '# moved on' >> {SITE}/{moved}")
    with pytest.raises(RecipeError, match=f"{re.escape(moved)} has sha256"):
        shop.overlay(drifted, flavor)


def test_f5_no_touched_file_is_skipped(built: Result, pin: Pin) -> None:
    overlay = plan_overlay(pin=pin)
    assert set(overlay.files) == set(built.contents.sha256)
    for path, data in overlay.files.items():
        found = built.contents.sha256[path]
        assert found == hashlib.sha256(data).hexdigest() != overlay.before[path], path


def test_f5_base_that_has_the_overlay_is_refused(
    shop: Workshop, built: Result, flavor: Flavor
) -> None:
    with pytest.raises(RecipeError, match="an overlay is in it already"):
        shop.overlay(built.tag, flavor)


def test_f7_config_is_inherited(built: Result) -> None:
    def rest(config: dict[str, object]) -> dict[str, object]:
        return {key: config[key] for key in config if key not in ("Labels", "Image")}

    assert rest(built.image.config) == rest(built.base.config)
    assert built.image.layers[:-1] == built.base.layers
    assert built.image.labels | built.base.labels == built.image.labels
