"""--expert-profile-out in the real engine on a CUDA GPU: graphs count as eager does."""

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import CONFIG, GENERATE, KV_CACHE_BYTES, MODEL, Script, at_once

pytestmark = pytest.mark.gpu

DOMAINS = json.loads((MODEL / "prompts.json").read_text())["prompts"]
TOP_K = CONFIG["num_experts_per_tok"]
PROMPTS = [prompt for domain in DOMAINS.values() for prompt in domain]
# Batch sizes of decode steps are padded to the next of these.
SIZES = [4, 16, 64]
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "full": {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": SIZES,
        }
    },
    "piecewise": {
        "compilation_config": {
            "cudagraph_mode": "PIECEWISE",
            "cudagraph_capture_sizes": SIZES,
        }
    },
}
STEPS = ("dump", "generate", "dump", "generate", "dump", "generate one", "dump")
# Padding changes which kernel variant runs, and so a close route now and then.
DIFFERING_ROUTES = 0.02


def job(path: Path, mode: str) -> dict[str, Any]:
    """An engine that records its routes in a file, and what it is asked."""
    engine = {
        "dtype": "float32",
        "max_model_len": 512,
        # Several engines share the GPU.
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "max_num_batched_tokens": 256,
        "expert_profile_out": str(path),
    }
    return {
        "model": str(MODEL),
        "engine": engine | MODES[mode],
        "prompts": PROMPTS,
        "max_tokens": 24,
        "steps": STEPS,
    }


def exact(found: Any, counts: Any) -> Any:
    """Check the totals of a run, and return its counts.

    Every token is fed but the last of each answer, and cached ones are not.
    """
    assert found["fed"][1]["cached"] > 0
    assert found["dumps"] == [{"tokens_prefill": 0, "tokens_decode": 0}] + [
        {"tokens_prefill": fed["prompt"] - fed["cached"], "tokens_decode": fed["later"]}
        for fed in found["fed"]
    ]
    for phase in ("prefill", "decode"):
        tokens = sum(dump[f"tokens_{phase}"] for dump in found["dumps"])
        per_layer = counts[f"counts_{phase}"].sum(axis=1).tolist()
        assert tokens > 0
        assert per_layer == [tokens * TOP_K] * CONFIG["num_hidden_layers"]
    return counts


@pytest.mark.parametrize("v2", (False, True), ids=["v1_runner", "v2_runner"])
def test_graphs_count_what_eager_counts(
    v2: bool, script: Script, tmp_path: Path
) -> None:
    """C4, C5, C7, C8, C12: start-up alone, padded batches, cached prompts."""
    from safetensors.numpy import load_file

    runs = []
    for mode in MODES:
        env = {
            "VLLM_USE_V2_MODEL_RUNNER": str(int(v2)),
            "VLLM_CACHE_ROOT": str(tmp_path / f"cache_{mode}"),
        }
        runs.append((GENERATE, job(tmp_path / mode, mode), env))
    counts = {}
    for mode, found in zip(MODES, at_once(script, runs), strict=True):
        assert found["status"] == 0, found["log"][-6000:]
        assert found["v2_runner"] == v2
        counts[mode] = exact(found, load_file(tmp_path / mode))
    shares = {}
    for mode in counts.keys() - {"eager"}:
        for name, expected in counts["eager"].items():
            differing = abs(counts[mode][name] - expected).sum() / 2
            shares[f"{mode} {name}"] = differing / expected.sum()
    print(json.dumps({"v2": v2, "differing": shares, "dumps": found["dumps"]}))
    assert max(shares.values()) <= DIFFERING_ROUTES
