"""Greedy tokens of the trained model: layout split against resident."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from .conftest import CONFIG, GENERATE, MODEL, Script, expert_map
from .test_engine import RUNNERS, equal_to_stock, job

pytestmark = pytest.mark.gpu

HOT = 20
# Of more than 1 024 ids stock's alignment orders an expert's tokens by atomics, and
# Marlin, which cuts sums by their places, then differs from itself.
MARLIN = {
    "quantization": "mxfp4",
    "quantization_config": {"ignore": ["*_proj", "*.gate"]},
    "max_num_batched_tokens": 192,
}
# Stock pads smaller experts for Marlin and then feeds the router padded rows.
WIDTHS = {"hidden_size": 256, "moe_intermediate_size": 128}
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


def widened(folder: Path) -> Path:
    """Write the trained model with zeros up to `WIDTHS`, which computes the same.

    RMS norms divide by the mean over all of a row, zeros too; their weights make up
    for it.
    """
    from safetensors.torch import load_file, save_file
    from torch.nn.functional import pad

    wide = {CONFIG[name]: width for name, width in WIDTHS.items()}
    tensors = load_file(MODEL / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("layernorm.weight", "model.norm.weight")):
            shrink = (CONFIG["hidden_size"] / WIDTHS["hidden_size"]) ** 0.5
            tensors[name] = pad(
                tensor * shrink, (0, WIDTHS["hidden_size"] - len(tensor))
            )
        elif ".experts." in name:
            rows, columns = tensor.shape
            tensors[name] = pad(
                tensor, (0, wide[columns] - columns, 0, wide[rows] - rows)
            )
        elif name.endswith("o_proj.weight"):
            tensors[name] = pad(tensor, (0, 0, 0, WIDTHS["hidden_size"] - len(tensor)))
        elif tensor.dim() == 2:
            tensors[name] = pad(tensor, (0, WIDTHS["hidden_size"] - tensor.shape[1]))
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps(CONFIG | WIDTHS))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def pinned(
    folder: Path, config: dict[str, Any] = CONFIG, quantization: str | None = None
) -> dict[str, str]:
    path = folder / "map.json"
    made = expert_map(config, HOT)
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
    model, config = MODEL, CONFIG
    if kernel:
        model, config = widened(tmp_path / "model"), CONFIG | WIDTHS
    flags = kernel | pinned(tmp_path, config, kernel.get("quantization"))
    split = flags | {"expert_layout": "split", "expert_split_mode": split_mode}
    env = {"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner], "VLLM_GPU_SYNC_CHECK": "error"}
    steps = ["generate", "generate"]
    wanted = [
        (kernel, steps),
        (flags | {"expert_layout": "range"}, steps),
        (split, ["residency", *steps]),
    ]
    jobs = [
        job(mode, options, asked) | {"model": str(model)} for options, asked in wanted
    ]
    _, ours = equal_to_stock(script, tmp_path, env, *jobs)
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
