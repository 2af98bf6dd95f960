"""What the tests of the demo and its model share."""

import importlib.util
import json
from collections.abc import Callable, Sequence
from typing import Any

from recipe.demo import FIXTURE

REPEAT_PERIOD = "loops.py"


def measured() -> dict[str, Any]:
    """Return what ``measure.py`` recorded about the checkpoint."""
    record: dict[str, Any] = json.loads((FIXTURE / "measured.json").read_text())
    return record


def repeat_period() -> Callable[[Sequence[int]], int | None]:
    """Return the loop detector that lies beside the checkpoint."""
    spec = importlib.util.spec_from_file_location("loops", FIXTURE / REPEAT_PERIOD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[Sequence[int]], int | None] = module.repeat_period
    return found
