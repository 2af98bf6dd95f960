"""Predictions are held against every receipt that has what they need."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipe.generated import replace_part
from recipe.receipts import load_receipts
from recipe.tree import patched_tree

pytestmark = pytest.mark.cpu

SCRIPT = Path(__file__).with_name("predictions.py")


@pytest.fixture(scope="module")
def predictions() -> Any:
    """The script as a module; it imports vLLM only when it predicts."""
    spec = importlib.util.spec_from_file_location("predictions", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["predictions"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Rows and table, made with the patched vLLM."""
    env = os.environ | {
        "PYTHONPATH": str(patched_tree("cpu")),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    done = subprocess.run(
        [sys.executable, "-B", str(SCRIPT), "--json"],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_every_receipt_of_the_benchmark_is_predicted(
    predictions: Any, found: dict[str, Any]
) -> None:
    """Every arm and number of streams of it, not some."""
    expected = {
        (name, arm, int(streams))
        for name, receipt in load_receipts().items()
        if "shape" in receipt
        for arm in receipt["arms"]
        if arm not in predictions.UNPREDICTED and not predictions.stages(receipt, arm)
        for streams in receipt["arms"][arm][0]["steps_ms"]
    }
    rows = {(row["receipt"], row["arm"], row["streams"]) for row in found["rows"]}
    assert rows == expected and expected
    assert {"all_hot", "matched", "split", "foreign", "positional"} == {
        arm for _, arm, _ in rows
    }


def test_predictions_are_near_or_explained(
    predictions: Any, found: dict[str, Any]
) -> None:
    """A miss needs a reason, and a reason needs a miss."""
    misses = {
        (row["receipt"], row["arm"], row["streams"])
        for row in found["rows"]
        if abs(row["error"]) > predictions.WITHIN
    }
    assert misses == predictions.MISSES.keys()


def test_the_table_in_the_docs_is_this_one(
    predictions: Any, found: dict[str, Any]
) -> None:
    """Written by `python tests/bench/predictions.py --write`."""
    page = predictions.PAGE.read_text()
    assert page == replace_part(predictions.PAGE, predictions.PART, found["table"])
