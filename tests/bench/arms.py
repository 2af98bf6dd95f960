"""Serving speed of pinned_hot against resident and positional placement, A/B/A.

    python tests/bench/arms.py --shape ancestor --layers 10 --out receipt.json

Every arm has its own process, the same commit, the same KV pool, the same routes and
full CUDA graphs. Resident runs first and last; `counting` is resident with recording
on, `peer` is matched with its cold rows in a second GPU's memory. The receipt has the
arms with their bytes and counts, the spread, and flat ratios; above 1 is better, except
for taxes.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ARM = Path(__file__).with_name("arm.py")
# Expert geometry, attention and routing of the shapes; weights are random.
SHAPES: dict[str, dict[str, Any]] = {
    "ancestor": {
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
        "num_experts": 384,
        "num_experts_per_tok": 6,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "quantization": "mxfp4",
        "hot": 295,
        "layers": 10,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "quantization": None,
        "hot": 98,
        "layers": 48,
    },
}
STREAMS = (1, 8, 16)
COLD_SHARE = 0.0175
FOREIGN_SHARE = 0.11
TOKENS = (16, 112)
# Steps of these arms are many times longer, and vary less.
SLOW = ("positional", "foreign")
SLOW_TOKENS = (16, 48)
SLOW_REPEATS = 2
# Options of the arms of pinned_hot; all but two have the matched map.
PINNED: dict[str, dict[str, str]] = {
    "all_hot": {},
    "matched": {},
    "peer": {"expert_cold_tier": "peer:1"},
    "split": {"expert_layout": "split"},
    "staged": {"expert_layout": "split", "expert_split_mode": "staged"},
    "foreign": {},
}
# Those that read cold rows.
COLD = tuple(arm for arm in PINNED if arm != "all_hot")
KV_BYTES = 2 << 30
# Prompts that are each one batch.
PREFILL_TOKENS = (512, 2048, 8192)
MAX_TOKENS = PREFILL_TOKENS[-1] + 256


def model_config(shape: dict[str, Any], layers: int) -> dict[str, Any]:
    """HF config of a Qwen3-MoE of the given shape."""
    names = (
        "hidden_size",
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "num_attention_heads",
        "num_key_value_heads",
    )
    return {name: shape[name] for name in names} | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "vocab_size": 1024,
        "intermediate_size": 1024,
        "head_dim": 128,
        "num_hidden_layers": layers,
        "norm_topk_prob": True,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": True,
    }


def scattered(count: int, experts: int, offset: int) -> list[int]:
    """Pick distinct expert ids that are no run of neighbours."""
    stride = next(s for s in (61, 53, 47, 43) if experts % s)
    return sorted((offset + stride * i) % experts for i in range(count))


def expert_map(
    shape: dict[str, Any], layers: int, cold: list[int], hot: int
) -> dict[str, Any]:
    """A map that ranks the given experts last."""
    experts = shape["num_experts"]
    ranking = [e for e in range(experts) if e not in set(cold)] + cold
    kept = experts - len(cold)
    share = [(1 - COLD_SHARE) / kept] * kept + [COLD_SHARE / len(cold)] * len(cold)
    entry = {"ranking": ranking, "share": share, "hot": hot}
    return {
        "format": "vllm-expert-map",
        "version": 1,
        "fingerprint": {
            "architecture": "Qwen3MoeForCausalLM",
            "num_experts": experts,
            "top_k": shape["num_experts_per_tok"],
            "hidden_size": shape["hidden_size"],
            "moe_intermediate_size": shape["moe_intermediate_size"],
            "num_moe_layers": layers,
            "quantization": shape["quantization"],
        },
        "layers": {f"model.layers.{i}.mlp.experts": entry for i in range(layers)},
        "profiles": [],
        "expected_cold_share": COLD_SHARE,
    }


def run_arm(job: dict[str, Any], folder: Path, limit_s: float) -> dict[str, Any]:
    """Run one arm and return its result."""
    job = job | {"result": str(folder / "result.json")}
    log = folder / f"{job['arm']}.log"
    begin = time.monotonic()
    with log.open("a") as file:
        status = subprocess.run(
            [sys.executable, str(ARM)],
            input=json.dumps(job),
            text=True,
            stdout=file,
            stderr=file,
            timeout=limit_s,
        ).returncode
    if status:
        sys.exit(f"arm {job['arm']} failed:\n{log.read_text()[-4000:]}")
    result: dict[str, Any] = json.loads(Path(job["result"]).read_text())
    print(
        f"{job['arm']:>10}: load {result['load_s']:.0f} s "
        f"of {time.monotonic() - begin:.0f} s, "
        + ", ".join(
            f"C{c} {step['median']:.3f} ms" for c, step in result["steps_ms"].items()
        )
        + f", hot {result['hot_bytes'] / 2**30:.1f} GiB, "
        f"cold {result['cold_bytes'] / 2**30:.1f} GiB",
        flush=True,
    )
    return result


def ratios(arms: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Speed ratios of arms, what_over_what_cN; empty without a resident arm."""

    def step(arm: str, streams: int) -> float:
        runs = [run["steps_ms"][str(streams)]["median"] for run in arms[arm]]
        return statistics.mean(runs)

    def kernels(arm: str, streams: int) -> float:
        runs = [run["experts_us_per_layer"][str(streams)] for run in arms[arm]]
        return statistics.mean(runs)

    found: dict[str, float] = {}
    if "resident" not in arms:
        return found
    for streams in STREAMS:
        resident = step("resident", streams)
        if "all_hot" in arms:
            # One stream's step is bound by the host; its kernels are not.
            name = f"all_hot_over_resident_kernels_c{streams}"
            found[name] = kernels("resident", streams) / kernels("all_hot", streams)
        for arm in (*PINNED, "positional"):
            if arm in arms:
                name = f"{arm}_over_resident_c{streams}"
                found[name] = resident / step(arm, streams)
        if "counting" in arms:
            found[f"counting_tax_c{streams}"] = step("counting", streams) / resident - 1
        for arm in COLD:
            if arm in arms and "positional" in arms:
                name = f"{arm}_over_positional_c{streams}"
                found[name] = step("positional", streams) / step(arm, streams)
        first, last = arms["resident"][0], arms["resident"][-1]
        found[f"resident_last_over_first_c{streams}"] = (
            first["steps_ms"][str(streams)]["median"]
            / last["steps_ms"][str(streams)]["median"]
        )
    for arm in (*PINNED, "positional"):
        if arm in arms:
            stock, other = arms["resident"][0], arms[arm][0]
            for tokens, took in other["prefill_ms"].items():
                name = f"{arm}_over_resident_prefill_{tokens}"
                found[name] = stock["prefill_ms"][tokens] / took
    if "matched" in arms:
        matched = arms["matched"][0]
        layers = matched["layers"]
        budget = time_budget(arms["resident"][0], matched, layers)
        for streams, entry in budget.items():
            found[f"fraction_of_bound_c{streams}"] = entry["fraction_of_bound"]
    return {name: round(value, 4) for name, value in found.items()}


def time_budget(
    resident: dict[str, Any], arm: dict[str, Any], layers: int
) -> dict[str, dict[str, float]]:
    """What of an arm's step the link must take, per number of streams.

    A layer's cold bytes can be read beside the layer's own expert kernels and not
    beside anything else, since its routes are known no earlier. So a step takes at
    least stock's own time and, for every layer, what reading the cold experts it
    needs takes longer than those kernels.
    """
    row_bytes = arm["cold_bytes"] / arm["cold_rows"]
    row_us = row_bytes / arm["cold_bytes_per_s"] * 1e6
    found = {}
    for streams, shares in arm["distinct_cold"].items():
        kernels_us = resident["experts_us_per_layer"][streams]
        stock_ms = resident["steps_ms"][streams]["median"]
        reads = [count * row_us for count in range(len(shares))]
        link = sum(x * share for x, share in zip(reads, shares, strict=True))
        beyond = sum(
            max(0.0, x - kernels_us) * share
            for x, share in zip(reads, shares, strict=True)
        )
        bound_ms = stock_ms + layers * beyond / 1e3
        found[streams] = {
            "stock_us_per_layer": round(stock_ms * 1e3 / layers, 1),
            "expert_kernels_us_per_layer": kernels_us,
            "cold_experts_per_layer": round(
                sum(n * share for n, share in enumerate(shares)), 4
            ),
            "link_us_per_layer": round(link, 1),
            "link_beyond_kernels_us_per_layer": round(beyond, 1),
            "bound_ms": round(bound_ms, 4),
            "fraction_of_bound": round(
                bound_ms / arm["steps_ms"][streams]["median"], 4
            ),
        }
    return found


def check_path_ran(arms: dict[str, list[dict[str, Any]]]) -> None:
    """Refuse a measurement in which the arms did not differ."""
    for run in arms.get("counting", ()):
        if not all(counts["tokens_decode"] for counts in run["recorded"].values()):
            sys.exit(f"counting: {run['recorded']} tokens were recorded")
    for run in (run for arm in COLD for run in arms.get(arm, ())):
        for streams, served in run["served"].items():
            if not served["hot"] or not served["cold"]:
                sys.exit(f"{run['arm']}, C{streams}: {served} rows served")
        if not run["hot_bytes"] or not run["cold_bytes"]:
            sys.exit(f"{run['arm']}: one kind of memory is empty")
    for run in (*arms["resident"], *arms.get("all_hot", ())):
        if run["cold_bytes"]:
            sys.exit(f"{run['arm']}, which should be resident, has cold bytes")


def hardware() -> dict[str, str]:
    """The GPU, its driver and its link, as nvidia-smi names them."""
    names = ("name", "driver_version", "pcie.link.gen.max", "pcie.link.width.max")
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    line = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0]
    name, driver, generation, width = (x.strip() for x in line.split(","))
    link = f"PCIe gen {generation} x{width}"
    return {"name": name, "driver_version": driver, "link": link}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument(
        "--arms", default="resident,counting,all_hot,matched,positional,foreign"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", default="", help="commit of the series")
    parser.add_argument("--limit-s", type=float, default=300, help="for one arm")
    parser.add_argument(
        "--last-start-s",
        type=float,
        default=float("inf"),
        help="start no arm later than this, but the last resident one",
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    begin = time.monotonic()
    shape = SHAPES[args.shape]
    layers = args.layers or shape["layers"]
    experts, hot = shape["num_experts"], shape["hot"]
    config = model_config(shape, layers)
    traffic_cold = scattered(experts - hot, experts, 5)
    used = [e for e in range(experts) if e not in set(traffic_cold)]
    # A map of other traffic keeps some experts cold that this traffic uses.
    wrong = round(FOREIGN_SHARE * hot)
    foreign_cold = sorted(traffic_cold[wrong:] + used[:: hot // wrong][:wrong])
    engine = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": MAX_TOKENS,
        "max_num_batched_tokens": MAX_TOKENS,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": KV_BYTES,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": False,
        "quantization": shape["quantization"],
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(STREAMS),
        },
    }
    arms: dict[str, list[dict[str, Any]]] = {}
    receipt: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": args.commit,
        "command": " ".join(["python", "tests/bench/arms.py", *sys.argv[1:]]),
        "hardware": hardware(),
        "shape": args.shape,
        "layers": layers,
        "config": config,
        "engine": engine,
        "cold_share_of_traffic": COLD_SHARE,
    }
    with tempfile.TemporaryDirectory(prefix="arms-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model/config.json").write_text(json.dumps(config))
        wanted = args.arms.split(",")
        again = ["resident"] if "resident" in wanted else []
        for number, arm in enumerate([*wanted, *again]):
            late = time.monotonic() - begin > args.last_start_s
            if late and number < len(wanted):
                print(f"{arm:>10}: left out, it is too late")
                continue
            job = {
                "arm": arm,
                "model": str(folder / "model"),
                "config": config,
                "engine": dict(engine),
                "traffic_cold": traffic_cold,
                "map_cold": foreign_cold if arm == "foreign" else traffic_cold,
                "cold_share": COLD_SHARE,
                # What `matched`, which runs first, had no HBM for.
                "positional_bytes": sum(
                    run["cold_bytes"] for run in arms.get("matched", [])
                ),
                "streams": STREAMS,
                "prefill_tokens": PREFILL_TOKENS,
                "tokens": SLOW_TOKENS if arm in SLOW else TOKENS,
                "repeats": min(args.repeats, SLOW_REPEATS)
                if arm in SLOW
                else args.repeats,
            }
            if arm in PINNED:
                cut = experts if arm == "all_hot" else hot
                path = folder / f"{arm}.json"
                made = expert_map(shape, layers, job["map_cold"], cut)
                path.write_text(json.dumps(made))
                job["engine"] |= {
                    "expert_provider": "pinned_hot",
                    "expert_map": str(path),
                    **PINNED[arm],
                }
            elif arm == "counting":
                job["engine"]["expert_profile_out"] = str(folder / "profile")
            elif arm == "positional":
                if "matched" not in arms:
                    sys.exit("positional needs matched before it, to match its bytes")
                job["engine"]["expert_provider"] = "positional"
            ran = run_arm(job, folder, args.limit_s)
            receipt["versions"] = {"vllm": "the pin"} | ran.pop("versions")
            arms.setdefault(arm, []).append(ran | {"layers": layers})
            # After every arm, so that what was measured survives a time limit.
            receipt |= {"arms": arms, "ratios": ratios(arms)}
            for name in set(COLD) & arms.keys():
                budget = time_budget(arms["resident"][0], arms[name][0], layers)
                receipt["time_budget"] = receipt.get("time_budget", {}) | {name: budget}
            args.out.write_text(json.dumps(receipt, indent=1) + "\n")
    print(json.dumps(receipt["ratios"], indent=1))
    if {"matched", "resident"} <= arms.keys():
        check_path_ran(arms)


if __name__ == "__main__":
    main()
