"""pinned_hot in the real engine on trained weights: tokens, placement, refusals."""

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from .conftest import MODEL
from .limits import memory_limit

pytestmark = pytest.mark.cpu

DTYPES = ("float32", "bfloat16")
CONFIG = json.loads((MODEL / "config.json").read_text())
NUM_EXPERTS = CONFIG["num_experts"]
NUM_LAYERS = CONFIG["num_hidden_layers"]
TOP_K = CONFIG["num_experts_per_tok"]
LAYERS = [f"model.layers.{index}.mlp.experts" for index in range(NUM_LAYERS)]


def make_map(
    counts: dict[str, list[int]], hot: int, config: dict[str, Any] = CONFIG
) -> dict[str, Any]:
    """Write the map format by hand, independently of the code under test."""
    layers, cold = {}, []
    for name, layer in counts.items():
        ranking = sorted(range(len(layer)), key=lambda e: (-layer[e], e))
        share = [layer[e] / sum(layer) for e in ranking]
        layers[name] = {"ranking": ranking, "share": share, "hot": hot}
        cold.append(sum(share[hot:]))
    return {
        "format": "vllm-expert-map",
        "version": 1,
        "fingerprint": {
            "architecture": config["architectures"][0],
            "num_experts": config["num_experts"],
            "top_k": config["num_experts_per_tok"],
            "hidden_size": config["hidden_size"],
            "moe_intermediate_size": config["moe_intermediate_size"],
            "num_moe_layers": config["num_hidden_layers"],
            "quantization": None,
        },
        "layers": layers,
        "profiles": [],
        "expected_cold_share": min(1.0, sum(cold) / len(cold)),
    }


def random_counts(seed: int = 0) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {name: [rng.randint(1, 99) for _ in range(NUM_EXPERTS)] for name in LAYERS}


def pinned(tmp_path: Path, made: dict[str, Any]) -> dict[str, str]:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(made))
    return {
        "expert_provider": "pinned_hot",
        "expert_map": str(path),
        "expert_cold_dir": str(tmp_path),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_equal_stock(dtype, generate, trees, tmp_path, prompts):
    """Maps made from the traffic and against it; full greedy id lists.

    A reload in place is compared with stock's own: on this backend stock answers
    differently after one, and so does pinned_hot.
    """
    assert len(prompts) >= 24
    steps = ("residency", "count", "generate", "reload", "generate")
    stock = generate(None, *steps, dtype=dtype)
    assert len(stock["counts"]) == NUM_LAYERS
    assert stock["residency"] == []
    served = {sum(layer) for layer in stock["counts"].values()}
    fed = sum(len(tokens) for tokens in stock["tokens"][0])
    assert len(served) == 1 and served.pop() >= TOP_K * fed
    inverted = {n: [1 + max(c) - x for x in c] for n, c in stock["counts"].items()}
    for hot, counts in (
        (NUM_EXPERTS * 3 // 4, stock["counts"]),
        (NUM_EXPERTS // 2, inverted),
        (0, stock["counts"]),
    ):
        made = make_map(counts, hot)
        ours = generate(
            trees(),
            *steps,
            dtype=dtype,
            **pinned(tmp_path, made),
        )
        assert ours["tokens"] == stock["tokens"]
        assert ours["dtype"] == f"torch.{dtype}"
        assert [entry["layer"] for entry in ours["residency"]] == LAYERS
        cold_served = hot_served = 0
        for entry in ours["residency"]:
            layer = made["layers"][entry["layer"]]
            assert entry["hot_rows"] == hot
            assert entry["cold_rows"] == NUM_EXPERTS - hot
            seen = ours["counts"][entry["layer"]]
            hot_served += sum(seen[e] for e in layer["ranking"][:hot])
            cold_served += sum(seen[e] for e in layer["ranking"][hot:])
        # The path under test really ran, on both kinds of rows.
        assert cold_served > 0 and (hot_served > 0) == (hot > 0)
    assert "Expert weights: 5 layers" in ours["log"]
    assert "0 rows hot: 0.00 MiB in locked memory" in ours["log"]


def test_layout_split_gives_stocks_tokens(generate, trees, tmp_path, prompts):
    """Float32, the dtype that layout split serves on this backend."""
    stock = generate(None, "count", "generate", dtype="float32")
    hot = NUM_EXPERTS * 3 // 4
    made = make_map(stock["counts"], hot)
    split = pinned(tmp_path, made) | {"expert_layout": "split", "dtype": "float32"}
    ours = generate(trees(), "residency", "count", "generate", **split)
    assert ours["tokens"] == stock["tokens"]
    assert "Expert weights: 5 layers, layout split, two_calls" in ours["log"]
    cold_served = 0
    for entry in ours["residency"]:
        assert (entry["hot_rows"], entry["cold_rows"]) == (hot, NUM_EXPERTS - hot)
        ranking = made["layers"][entry["layer"]]["ranking"]
        cold_served += sum(ours["counts"][entry["layer"]][e] for e in ranking[hot:])
    assert cold_served > 0


def test_layout_split_compiles_for_each_map(generate, trees, tmp_path):
    """A16: on this backend what runs a layer is compiled, and the maps share a key."""
    compiled = {"enforce_eager": False, "env": {"VLLM_CACHE_ROOT": str(tmp_path)}}
    compiled["dtype"] = "float32"
    stock = generate(None, "generate", **compiled)
    for seed, hot in ((0, 20), (1, 8)):
        flags = pinned(tmp_path, make_map(random_counts(seed), hot)) | compiled
        ours = generate(trees(), "generate", **flags, expert_layout="split")
        assert ours["tokens"] == stock["tokens"]


def test_two_ranks_give_what_stocks_two_ranks_give(generate, trees, tmp_path):
    """Tensor parallelism: every rank places its part of each row."""
    two_ranks = {
        "dtype": "float32",
        "tensor_parallel_size": 2,
        "env": {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|0",
        },
    }
    stock = generate(None, "generate", **two_ranks)
    flags = pinned(tmp_path, make_map(random_counts(), 20)) | two_ranks
    for layout in ("range", "split"):
        ours = generate(trees(), "residency", "generate", **flags, expert_layout=layout)
        assert ours["tokens"] == stock["tokens"]
        for entry in ours["residency"]:
            assert (entry["hot_rows"], entry["cold_rows"]) == (20, NUM_EXPERTS - 20)


# B11
@pytest.mark.parametrize("named", [False, True])
def test_draft_layers_are_resident_unless_named(generate, trees, tmp_path, named):
    """Speculative decoding with a draft model: its layers have maps of their own."""
    drafting = {
        "dtype": "float32",
        "speculative_config": {
            "model": str(MODEL),
            "method": "draft_model",
            "num_speculative_tokens": 2,
        },
    }
    stock = generate(None, "generate", **drafting)
    made = make_map(random_counts(), 20)
    if named:
        entries = make_map(random_counts(1), 8)["layers"]
        made["draft_layers"] = {f"draft_model.{x}": y for x, y in entries.items()}
    ours = generate(trees(), "generate", **drafting, **pinned(tmp_path, made))
    assert ours["tokens"] == stock["tokens"]
    assert ours["log"].count("Expert weights: 5 layers") == 1 + named
    assert ("40 rows hot" in ours["log"]) == named


def test_compile_cache_keys(generate, trees, tmp_path):
    """Stock, overlay off and pinned_hot never share a key; two maps do."""
    stock = generate(None, "key")["key"]
    off = generate(trees(), "key")["key"]
    flags = pinned(tmp_path, make_map(random_counts(), 8))
    one = generate(trees(), "key", **flags)["key"]
    flags = pinned(tmp_path, make_map(random_counts(1), 24))
    two = generate(trees(), "key", **flags)["key"]
    assert len({stock, off, one}) == 3
    assert one == two


def test_compiled_model_reuses_its_cache_with_another_map(generate, trees, tmp_path):
    """torch.compile on: same tokens as stock, whatever map comes second."""
    compiled = {"enforce_eager": False, "env": {"VLLM_CACHE_ROOT": str(tmp_path)}}
    cached = tmp_path / "torch_compile_cache" / "torch_aot_compile"
    stock = generate(None, "generate", **compiled)
    assert len(list(cached.iterdir())) == 1
    for seed, hot in ((0, 8), (1, 24)):
        flags = pinned(tmp_path, make_map(random_counts(seed), hot))
        ours = generate(trees(), "generate", **compiled, **flags)
        assert ours["tokens"] == stock["tokens"]
        assert len(list(cached.iterdir())) == 2


@pytest.mark.parametrize(
    "change,named",
    [
        ("duplicate", ["map.json", "ranking", "stands at entries 0 and 1"]),
        ("foreign names", ["map.json", "model.layers.0.mlp.experts", "language_model"]),
    ],
)
def test_bad_map_stops_before_weights_load(change, named, generate, trees, tmp_path):
    made = make_map(random_counts(), 8)
    layer = made["layers"][LAYERS[0]]
    if change == "duplicate":
        layer["ranking"][0] = layer["ranking"][1]
    else:
        made["layers"] = {
            "language_model." + name: entry for name, entry in made["layers"].items()
        }
    run = generate(trees(), refused=True, **pinned(tmp_path, made))
    assert run.status != 0
    for word in named:
        assert word in run.output
    assert "Loading weights took" not in run.output


def big_model(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write the config of a model with about 1.5 GiB of expert weights."""
    config = CONFIG | {
        "num_hidden_layers": 8,
        "hidden_size": 1024,
        "moe_intermediate_size": 1024,
        "num_experts": 32,
        "num_attention_heads": 8,
        "head_dim": 32,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder, config


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Write random weights for a config, one file, in Hugging Face's names."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).to(torch.bfloat16)

    hidden, head = config["hidden_size"], config["head_dim"]
    inner, experts = config["moe_intermediate_size"], config["num_experts"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    tensors = {"model.embed_tokens.weight": random(config["vocab_size"], hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for name, shape in {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate": (experts, hidden),
        }.items():
            tensors[f"{layer}{name}.weight"] = random(*shape)
        for name, size in {
            "input_layernorm": hidden,
            "post_attention_layernorm": hidden,
            "self_attn.q_norm": head,
            "self_attn.k_norm": head,
        }.items():
            tensors[f"{layer}{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for expert in range(experts):
            prefix = f"{layer}mlp.experts.{expert}."
            tensors[f"{prefix}gate_proj.weight"] = random(inner, hidden)
            tensors[f"{prefix}up_proj.weight"] = random(inner, hidden)
            tensors[f"{prefix}down_proj.weight"] = random(hidden, inner)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_checkpoint_larger_than_its_control_group_serves(generate, trees, tmp_path):
    """A real checkpoint under the limit of a container: stock is killed."""
    model, config = big_model(tmp_path / "big")
    write_checkpoint(model, config)
    names = [f"model.layers.{i}.mlp.experts" for i in range(8)]
    made = make_map({name: [100] * 4 + [1] * 28 for name in names}, 4, config=config)
    big = {
        "model": model,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_tokens": 8,
        "ask": [{"prompt_token_ids": [i, 2, 3]} for i in range(4)],
    }
    stock = generate(None, "generate", **big)
    # What the engine takes without these experts, and five eighths of them.
    expert_bytes = 8 * 32 * 3 * 1024 * 1024 * 2
    base = generate(None, "generate", max_tokens=1, ask=big["ask"])["anon_bytes"]
    assert stock["anon_bytes"] > base + expert_bytes * 7 // 8
    limit = base + expert_bytes * 5 // 8
    with memory_limit(limit) as enter:
        killed = generate(None, refused=True, preexec=enter, **big)
        assert killed.status == -signal.SIGKILL
    with memory_limit(limit) as enter:
        flags = pinned(tmp_path, made)
        ours = generate(trees(), "residency", "generate", preexec=enter, **big, **flags)
    assert ours["tokens"] == stock["tokens"]
    assert sum(entry["cold_rows"] for entry in ours["residency"]) == 8 * 28
