"""--expert-profile-out in the real engine on a CUDA GPU: graphs count what eager does.

Runs the vLLM that is importable, which must be the patched one:

    python -m pytest -p no:cacheprovider --noconftest -m gpu tests/gpu/test_profile.py
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "fixtures" / "tiny-moe"
SCRIPT = ROOT / "tests" / "engine" / "generate.py"
CONFIG = json.loads((MODEL / "config.json").read_text())
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


def run(folder: Path, mode: str, v2: bool) -> tuple[Any, Any]:
    """Run one engine; return what it wrote down and the counts of its profile."""
    from safetensors.numpy import load_file

    result, path = folder / "result.json", folder / "profile"
    engine = {
        "dtype": "float32",
        "max_model_len": 512,
        "gpu_memory_utilization": 0.3,
        "max_num_batched_tokens": 256,
        "expert_profile_out": str(path),
    }
    job = {
        "model": str(MODEL),
        "engine": engine | MODES[mode],
        "prompts": PROMPTS,
        "max_tokens": 24,
        "steps": STEPS,
        "result": str(result),
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_USE_V2_MODEL_RUNNER": str(int(v2))},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    found = json.loads(result.read_text())
    assert found["v2_runner"] == v2
    return found, load_file(path)


@pytest.fixture(scope="module", params=[False, True], ids=["v1_runner", "v2_runner"])
def eager(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bool, Any]:
    """Which model runner, and what it counts without graphs."""
    if importlib.util.find_spec("vllm.config.expert_profile") is None:
        pytest.skip("the importable vLLM is not the patched one")
    counts = exact(*run(tmp_path_factory.mktemp("eager"), "eager", request.param))
    return request.param, counts


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


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "eager"])
def test_graphs_count_what_eager_counts(tmp_path: Path, eager: Any, mode: str) -> None:
    """C4, C5, C7, C8, C12: start-up alone, padded batches, cached prompts."""
    v2, expected = eager
    counts = exact(*run(tmp_path, mode, v2))
    for name in expected:
        differing = abs(counts[name] - expected[name]).sum() / 2
        assert differing <= DIFFERING_ROUTES * expected[name].sum()
