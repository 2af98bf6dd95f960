"""Greedy tokens of the trained model: layout split against resident."""

import json
from pathlib import Path

import pytest

from .conftest import CONFIG, GENERATE, Script, at_once, expert_map
from .test_engine import RUNNERS, job

pytestmark = pytest.mark.gpu

HOT = 20
CASES = [
    ("eager", "v2"),
    ("full_decode_graphs", "v1"),
    ("full_decode_graphs", "v2"),
]


@pytest.mark.parametrize("mode, runner", CASES)
def test_tokens_equal_resident(
    mode: str, runner: str, script: Script, tmp_path: Path
) -> None:
    """With no host sync in the step."""
    path = tmp_path / "map.json"
    path.write_text(json.dumps(expert_map(CONFIG, HOT)))
    split = {
        "expert_provider": "pinned_hot",
        "expert_map": str(path),
        "expert_layout": "split",
    }
    env = {"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner], "VLLM_GPU_SYNC_CHECK": "error"}
    steps = ["generate", "generate"]
    ours, stock = at_once(
        script,
        [
            (GENERATE, job(mode, split, ["residency", *steps]), env),
            (GENERATE, job(mode, {}, steps), env),
        ],
    )
    for result in (ours, stock):
        assert result["status"] == 0, result["log"][-6000:]
    assert ours["tokens"] == stock["tokens"]
    assert len({tuple(tokens) for tokens in ours["tokens"][0]}) > 10
    for layer in ours["residency"]:
        assert layer["hot_rows"] == HOT
        assert layer["cold_rows"] == CONFIG["num_experts"] - HOT
        assert layer["cold_bytes"] > 0
    assert "layout split, two_calls" in ours["log"]


def test_reload_is_refused(script: Script, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(expert_map(CONFIG, HOT)))
    split = {
        "expert_provider": "pinned_hot",
        "expert_map": str(path),
        "expert_layout": "split",
    }
    result = script(GENERATE, job("eager", split, ["generate", "reload"]))
    assert result["status"] != 0
    assert "its weights cannot be reloaded: layout split" in result["log"]
