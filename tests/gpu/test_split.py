"""Greedy tokens of the trained model: layout split against resident."""

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import CONFIG, GENERATE, Script, at_once, expert_map
from .test_engine import RUNNERS, job

pytestmark = pytest.mark.gpu

HOT = 20
# Of more than 1 024 ids stock's alignment orders an expert's tokens by atomics, and
# Marlin, which cuts sums by their places, then differs from itself.
MARLIN = {
    "quantization": "mxfp4",
    # Its other layers are too small for the kernel.
    "quantization_config": {"ignore": ["*_proj", "*.gate"]},
    "max_num_batched_tokens": 192,
}
CASES = [
    ({}, "two_calls", "eager", "v2"),
    ({}, "two_calls", "full_decode_graphs", "v1"),
    ({}, "two_calls", "full_decode_graphs", "v2"),
    ({}, "staged", "eager", "v2"),
    ({}, "staged", "full_decode_graphs", "v2"),
    (MARLIN, "staged", "eager", "v2"),
    (MARLIN, "staged", "full_decode_graphs", "v1"),
    (MARLIN, "staged", "full_decode_graphs", "v2"),
]


def pinned(folder: Path, quantization: str | None = None) -> dict[str, str]:
    path = folder / "map.json"
    made = expert_map(CONFIG, HOT)
    made["fingerprint"]["quantization"] = quantization
    path.write_text(json.dumps(made))
    return {"expert_provider": "pinned_hot", "expert_map": str(path)}


@pytest.mark.parametrize("kernel, split_mode, mode, runner", CASES)
def test_tokens_equal_resident(
    kernel: dict[str, Any],
    split_mode: str,
    mode: str,
    runner: str,
    script: Script,
    tmp_path: Path,
) -> None:
    """Those of both layouts, with no host sync in the step."""
    flags = kernel | pinned(tmp_path, kernel.get("quantization"))
    split = flags | {"expert_layout": "split", "expert_split_mode": split_mode}
    env = {"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner], "VLLM_GPU_SYNC_CHECK": "error"}
    steps = ["generate", "generate"]
    ours, in_range, stock = at_once(
        script,
        [
            (GENERATE, job(mode, split, ["residency", *steps]), env),
            (GENERATE, job(mode, flags | {"expert_layout": "range"}, steps), env),
            (GENERATE, job(mode, kernel, steps), env),
        ],
    )
    for result in (ours, in_range, stock):
        assert result["status"] == 0, result["log"][-6000:]
    assert ours["tokens"] == in_range["tokens"] == stock["tokens"]
    assert len({tuple(tokens) for tokens in ours["tokens"][0]}) > 10
    for layer in ours["residency"]:
        assert layer["hot_rows"] == HOT
        assert layer["cold_rows"] == CONFIG["num_experts"] - HOT
        assert layer["cold_bytes"] > 0
    assert f"layout split, {split_mode}" in ours["log"]


def test_reload_is_refused(script: Script, tmp_path: Path) -> None:
    split = pinned(tmp_path) | {"expert_layout": "split"}
    result = script(GENERATE, job("eager", split, ["generate", "reload"]))
    assert result["status"] != 0
    assert "its weights cannot be reloaded: layout split" in result["log"]
