"""Greedy tokens of the trained model: pinned_hot against resident, in every mode."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from .conftest import (
    CONFIG,
    GENERATE,
    KV_CACHE_BYTES,
    MODEL,
    Script,
    at_once,
    expert_map,
)

pytestmark = pytest.mark.gpu

GRAPHS = {"enforce_eager": False}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "full_decode_graphs": GRAPHS
    | {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "compiled_piecewise": GRAPHS
    | {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "compiled_full_and_piecewise": GRAPHS
    | {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
}
RUNNERS = {"v2": "1", "v1": "0"}
PAGE_BYTES = 2 << 20
# Pages of the model's expert tensors that are hot: some of every layer's.
HOT_PAGES = CONFIG["num_hidden_layers"]


def job(mode: str, engine: dict[str, Any], steps: list[str]) -> dict[str, Any]:
    domains = json.loads((MODEL / "prompts.json").read_text())["prompts"]
    options = {
        "dtype": "bfloat16",
        "max_model_len": 512,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "max_num_seqs": 8,
    }
    return {
        "model": str(MODEL),
        "engine": options | MODES[mode] | engine,
        "prompts": [prompt for name in domains for prompt in domains[name]],
        "max_tokens": 24,
        "steps": steps,
    }


def pinned(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(expert_map(CONFIG, 1)))
    gib = HOT_PAGES * PAGE_BYTES / (1 << 30)
    return {
        "expert_provider": "pinned_hot",
        "expert_map": str(path),
        "expert_hbm_gib": gib,
        # Not `auto`: neighbours on the GPU may slow down what it measures.
        "expert_layout": "range",
    }


def equal_to_stock(
    script: Script,
    folder: Path,
    env: dict[str, str],
    stock: dict[str, Any],
    *ours: dict[str, Any],
) -> list[dict[str, Any]]:
    """Run jobs at once, compare all tokens with stock's, and return the other runs.

    Each compiles for itself. Inductor chooses among kernels without timing them:
    otherwise two compilations of stock, too, may differ in the last bits of a sum.
    """
    runs = []
    for number, asked in enumerate((stock, *ours)):
        own = {
            "VLLM_CACHE_ROOT": str(folder / f"cache{number}"),
            "TORCHINDUCTOR_DETERMINISTIC": "1",
        }
        runs.append((GENERATE, asked, env | own))
    expected, *found = at_once(script, runs)
    for result in (expected, *found):
        assert result["status"] == 0, result["log"][-6000:]
        assert len({tuple(tokens) for tokens in result["tokens"][0]}) > 10
    for number, result in enumerate(found):
        answers = zip(chain(*result["tokens"]), chain(*expected["tokens"]), strict=True)
        unequal = sum(got != want for got, want in answers)
        assert not unequal, f"{unequal} answers of job {number} differ"
    return found


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_equal_resident(
    mode: str, runner: str, script: Script, tmp_path: Path
) -> None:
    """Before and after a reload in place, with no host sync in the step."""
    env = {"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner], "VLLM_GPU_SYNC_CHECK": "error"}
    steps = ["generate", "reload", "generate"]
    pinned_job = job(mode, pinned(tmp_path), ["residency", *steps])
    [ours] = equal_to_stock(script, tmp_path, env, job(mode, {}, steps), pinned_job)
    for layer in ours["residency"]:
        assert layer["cold_rows"] > 0
    assert sum(x["hot_bytes"] for x in ours["residency"]) == HOT_PAGES * PAGE_BYTES
    assert sum(x["cold_bytes"] for x in ours["residency"]) > 0


def test_hot_and_cold_rows_are_served(script: Script, tmp_path: Path) -> None:
    """The prompts reach rows of both kinds in every layer."""
    steps = ["residency", "count", "generate"]
    ours = script(GENERATE, job("eager", pinned(tmp_path), steps))
    assert ours["status"] == 0, ours["log"][-6000:]
    for name, counts in ours["counts"].items():
        assert sum(count > 0 for count in counts) > CONFIG["num_experts_per_tok"], name
    assert "reads host memory in a range at" in ours["log"]
