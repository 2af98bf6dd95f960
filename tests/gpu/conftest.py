"""Engines on a CUDA GPU, over whatever patched vLLM this Python imports."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "fixtures" / "tiny-moe"
CONFIG: dict[str, Any] = json.loads((MODEL / "config.json").read_text())
GENERATE = ROOT / "tests" / "engine" / "generate.py"
# Small enough that several engines share a GPU.
KV_CACHE_BYTES = 256 << 20
TIMEOUT_S = 540

Script = Callable[..., dict[str, Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this Python cannot run, and say why."""
    reason = None
    if importlib.util.find_spec("vllm") is None:
        reason = "this Python has no vllm"
    elif importlib.util.find_spec("vllm.config.expert_provider") is None:
        reason = "this Python's vllm is not patched: ./build.sh install"
    else:
        import torch

        if not torch.cuda.is_available():
            reason = "no CUDA GPU"
    if reason is not None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Run a script that reads a JSON job and writes a JSON result.

    Several may run at once, from threads.
    """
    numbers = itertools.count()

    def run(
        path: Path, job: dict[str, Any], env: dict[str, str] | None = None
    ) -> dict[str, Any]:
        result = tmp_path / f"{path.stem}{next(numbers)}.json"
        process = subprocess.run(
            [sys.executable, str(path)],
            input=json.dumps(job | {"result": str(result)}),
            capture_output=True,
            text=True,
            env=os.environ | (env or {}),
            cwd=tmp_path,
            timeout=TIMEOUT_S,
        )
        output = process.stdout + process.stderr
        if process.returncode:
            return {"status": process.returncode, "log": output}
        answer: dict[str, Any] = json.loads(result.read_text())
        return answer | {"status": 0, "log": output}

    return run


def at_once(script: Script, runs: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Run scripts side by side, and return their results in order."""
    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(lambda run: script(*run), runs))


def expert_map(config: dict[str, Any], hot: int) -> dict[str, Any]:
    """A map whose ranking is no prefix of the ids and differs from layer to layer."""
    experts, layers = config["num_experts"], config["num_hidden_layers"]
    entries = {}
    for layer in range(layers):
        ranking = [(7 * place + 3 * layer) % experts for place in range(experts)]
        weights = [experts - place for place in range(experts)]
        share = [weight / sum(weights) for weight in weights]
        name = f"model.layers.{layer}.mlp.experts"
        entries[name] = {"ranking": ranking, "share": share, "hot": hot}
    return {
        "format": "vllm-expert-map",
        "version": 1,
        "fingerprint": {
            "architecture": config["architectures"][0],
            "num_experts": experts,
            "top_k": config["num_experts_per_tok"],
            "hidden_size": config["hidden_size"],
            "moe_intermediate_size": config["moe_intermediate_size"],
            "num_moe_layers": layers,
            "quantization": None,
        },
        "layers": entries,
        "profiles": [],
        "expected_cold_share": 0.5,
    }
