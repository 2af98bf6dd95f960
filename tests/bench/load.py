"""Time to load a checkpoint with pinned_hot and with resident experts, in turn.

    python tests/bench/load.py --layers 8 --commit ABC --out receipt.json

Writes a model of random weights, one file a layer, which stays in the page cache if
there is room. Every load has its own process. A ratio above 1 is slower than stock.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arms import expert_map, hardware, model_config, scattered

SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "capped.py"
SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "moe_intermediate_size": 1024,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "quantization": None,
}
HOT = 98
SCALE = 0.02


def layer_shapes(config: dict[str, Any], layer: int) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of a layer's tensors, as Qwen3-MoE checkpoints have them."""
    hidden, head = config["hidden_size"], config["head_dim"]
    width = config["moe_intermediate_size"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    prefix = f"model.layers.{layer}."
    yield prefix + "input_layernorm.weight", [hidden]
    yield prefix + "post_attention_layernorm.weight", [hidden]
    yield prefix + "self_attn.q_norm.weight", [head]
    yield prefix + "self_attn.k_norm.weight", [head]
    yield prefix + "self_attn.q_proj.weight", [queries, hidden]
    yield prefix + "self_attn.k_proj.weight", [keys, hidden]
    yield prefix + "self_attn.v_proj.weight", [keys, hidden]
    yield prefix + "self_attn.o_proj.weight", [hidden, queries]
    yield prefix + "mlp.gate.weight", [config["num_experts"], hidden]
    for expert in range(config["num_experts"]):
        name = f"{prefix}mlp.experts.{expert}."
        yield name + "gate_proj.weight", [width, hidden]
        yield name + "up_proj.weight", [width, hidden]
        yield name + "down_proj.weight", [hidden, width]


def write_checkpoint(folder: Path, config: dict[str, Any], device: str) -> int:
    """Write a config and random bfloat16 weights; returns the bytes of the weights."""
    import torch
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(config))
    hidden = config["hidden_size"]
    files = [list(layer_shapes(config, i)) for i in range(config["num_hidden_layers"])]
    outside = [("model.embed_tokens.weight", [config["vocab_size"], hidden])]
    files.append([*outside, ("model.norm.weight", [hidden])])
    generator = torch.Generator(device).manual_seed(0)
    where, total = {}, 0
    for number, shapes in enumerate(files):
        file = f"model-{number:05}.safetensors"
        tensors = {}
        for name, shape in shapes:
            made = torch.randn(
                shape, generator=generator, device=device, dtype=torch.bfloat16
            )
            tensors[name] = (made * SCALE + ("norm" in name)).cpu()
            where[name] = file
            total += tensors[name].nbytes
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def load(folder: Path, engine: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Load and serve once; what capped.py measures where it takes no memory."""
    result = folder / "result.json"
    job = {
        "model": str(folder),
        "free_bytes": None,
        "engine": {
            "skip_tokenizer_init": True,
            "max_model_len": 512,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 30,
        }
        | engine,
        "prompts": [[3 + i, 5, 7, 11, 13] for i in range(4)],
        "result": str(result),
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    if done.returncode:
        sys.exit((done.stdout + done.stderr)[-4000:])
    answer: dict[str, Any] = json.loads(result.read_text())
    print(f"{engine or 'resident'}: {answer['load_s']:.2f} s", flush=True)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="loads of each arm")
    parser.add_argument("--commit", default="", help="commit of the series")
    parser.add_argument("--limit-s", type=float, default=120, help="for one load")
    parser.add_argument(
        "--last-start-s",
        type=float,
        default=float("inf"),
        help="start no repeat later than this, but the first",
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    begin = time.monotonic()
    config = model_config(SHAPE, args.layers)
    experts = SHAPE["num_experts"]
    with tempfile.TemporaryDirectory(prefix="load-") as name:
        folder = Path(name)
        size = write_checkpoint(folder, config, "cuda")
        made = expert_map(SHAPE, args.layers, scattered(experts - HOT, experts, 5), HOT)
        path = folder / "map.json"
        path.write_text(json.dumps(made))
        pinned = {"expert_provider": "pinned_hot", "expert_map": str(path)}
        engines = {"resident": {}, "pinned_hot": pinned}
        # The first load of each arm also fills caches of kernels and, on a virtual
        # machine, has the host give it the memory that it pins; it is not counted.
        for engine in engines.values():
            load(folder, engine, args.limit_s)
        arms: dict[str, list[dict[str, Any]]] = {arm: [] for arm in engines}
        for number in range(args.repeats):
            if number and time.monotonic() - begin > args.last_start_s:
                print(f"{number} of {args.repeats} repeats: it is too late for more")
                break
            for arm, engine in engines.items():
                arms[arm].append(load(folder, engine, args.limit_s))
    tokens = [run.pop("tokens") for runs in arms.values() for run in runs]
    if any(other != tokens[0] for other in tokens):
        sys.exit("the arms gave different tokens")
    seconds = {
        arm: statistics.median(run["load_s"] for run in runs)
        for arm, runs in arms.items()
    }
    ratio = seconds["pinned_hot"] / seconds["resident"]
    receipt = {
        "date": datetime.date.today().isoformat(),
        "commit": args.commit,
        "command": " ".join(["python", "tests/bench/load.py", *sys.argv[1:]]),
        "hardware": hardware(),
        "config": config,
        "checkpoint_bytes": size,
        "arms": arms,
        "ratios": {"load_time_checkpoint_over_stock": round(ratio, 4)},
    }
    args.out.write_text(json.dumps(receipt, indent=1) + "\n")
    print(json.dumps(receipt["ratios"]))


if __name__ == "__main__":
    main()
