"""A model whose experts exceed the free HBM: refused by stock, loaded by pinned_hot."""

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import CONFIG, Script, expert_map

pytestmark = pytest.mark.gpu

CAPPED = Path(__file__).with_name("capped.py")
GIB = 1 << 30
MODEL: dict[str, Any] = CONFIG | {
    "hidden_size": 2048,
    "moe_intermediate_size": 1024,
    "intermediate_size": 1024,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
}
FREE_BYTES = 14 * GIB
HOT_GIB = 6.0
# Library handles, CUDA modules, allocator rounding.
SLACK_BYTES = GIB


def job(tmp_path: Path, free: int | None, engine: dict[str, Any]) -> dict[str, Any]:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "map.json").write_text(json.dumps(expert_map(MODEL, 40)))
    return {
        "model": str(folder),
        "free_bytes": free,
        "engine": {
            "dtype": "bfloat16",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 512,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
            "enforce_eager": True,
        }
        | engine,
        "prompts": [[3 + i, 5, 7, 11, 13] for i in range(4)],
    }


@pytest.mark.parametrize("budget", ("number", "auto"))
def test_model_larger_than_hbm(budget: str, script: Script, tmp_path: Path) -> None:
    """Peaks: hot bytes and one layer on the GPU, one layer in anonymous memory."""
    pinned: dict[str, Any] = {
        "expert_provider": "pinned_hot",
        "expert_map": str(tmp_path / "model" / "map.json"),
        "expert_hbm_gib": HOT_GIB if budget == "number" else "auto",
    }
    if budget == "auto":
        pinned["expert_keep_kv_tokens"] = 16384
    ours = script(CAPPED, job(tmp_path, FREE_BYTES, pinned))
    assert ours["status"] == 0, ours["log"][-6000:]
    assert ours["expert_bytes"] > 1.5 * FREE_BYTES
    assert ours["hot_bytes"] + ours["cold_bytes"] >= ours["expert_bytes"]
    peaks = ours["peaks"]
    hot_and_layers = ours["hot_bytes"] + ours["dense_bytes"] + 2 * ours["layer_bytes"]
    assert ours["hot_bytes"] < peaks["device"] < hot_and_layers + SLACK_BYTES
    assert peaks["host"] - ours["anonymous_before"] < ours["layer_bytes"] + 2 * GIB
    if budget == "number":
        assert HOT_GIB * GIB - (2 << 20) < ours["hot_bytes"] <= HOT_GIB * GIB
    else:
        assert ours["kv_tokens"] >= 16384
        assert ours["hot_bytes"] > HOT_GIB * GIB
    everything = script(CAPPED, job(tmp_path, None, {"gpu_memory_utilization": 0.9}))
    assert everything["status"] == 0, everything["log"][-6000:]
    assert ours["tokens"] == everything["tokens"]
    print(json.dumps({"ours": ours["load_s"], "stock": everything["load_s"]} | peaks))
    if budget == "number":
        stock = script(CAPPED, job(tmp_path, FREE_BYTES, {}))
        assert stock["status"] != 0
        assert "OutOfMemoryError" in stock["log"]
