"""What was measured about maps on their own, foreign and blended traffic."""

import hashlib
import importlib.util
import json
from typing import Any

import pytest

from recipe.demo import FIXTURE
from recipe.paths import ROOT

CLASSES = ("code", "english", "japanese", "german")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """What ``traffic.py`` recorded."""
    path = ROOT / "recipe" / "receipts" / "cpu-traffic-maps.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def table() -> Any:
    """The module that makes a table of it."""
    path = FIXTURE / "traffic_table.py"
    spec = importlib.util.spec_from_file_location("traffic_table", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_was_measured_on_these_weights(record: dict[str, Any]) -> None:
    """A new checkpoint needs a new record."""
    data = (FIXTURE / "model.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest() == record["checkpoint_sha256"]


@pytest.mark.parametrize("traffic", CLASSES)
def test_a_map_of_own_traffic_leaves_far_less_cold(
    record: dict[str, Any], table: Any, traffic: str
) -> None:
    """C16: on requests of other documents than the map's."""
    for hot in record["scores"]:
        shares = table.cold_shares(record, hot)
        own = shares[traffic][traffic]
        foreign = [shares[name][traffic] for name in CLASSES if name != traffic]
        assert own < min(foreign)
        assert own < shares["blend"][traffic]
        assert sum(foreign) / len(foreign) > 1.2 * own
    assert sum(foreign) / len(foreign) < 1


def test_few_requests_are_enough_for_a_map(record: dict[str, Any], table: Any) -> None:
    """Three requests against 48, both scored on other documents."""
    for hot in record["scores"]:
        shares = table.cold_shares(record, hot)
        for one in CLASSES:
            assert abs(shares[f"{one}-small"][one] - shares[one][one]) < 0.03


def test_the_table_in_the_docs_is_this_one(record: dict[str, Any], table: Any) -> None:
    """Written by ``traffic_table.py``."""
    page = table.PAGE.read_text()
    assert page == table.filled(page, table.render(record))
