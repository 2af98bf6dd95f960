"""Predicted steps beside every measured one of the receipts.

A script for a Python that imports the patched vLLM:

    PYTHONPATH=TREE python tests/bench/predictions.py            prints the table
    PYTHONPATH=TREE python tests/bench/predictions.py --write    puts it into docs/

Takes every receipt of `arms.py`: the arms' own resident steps are what the others are
predicted from, bandwidths are those measured on the hardware, and the placement is
rebuilt from the map that the arm was given and the hot bytes that it reported. Nothing
is fitted here.
"""

import importlib.util
import json
import math
import statistics
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RECEIPTS = ROOT / "recipe" / "receipts"
PAGE = ROOT / "docs" / "predictions.md"
PART = "predictions"
NEEDED = ("shape", "layers", "config", "engine", "cold_share_of_traffic", "arms")
WITHIN = 0.15
PACKAGE = "vllm.model_executor.layers.fused_moe"
ARMS = ("all_hot", "matched", "split", "foreign", "positional")
# What the others are predicted from, recording, which places nothing, and what the
# model leaves out: another GPU's memory, and copies before the kernel.
UNPREDICTED = ("resident", "counting", "peer", "staged")

MISSES: dict[tuple[str, str, int], str] = {
    ("h200-ancestor-layouts", "matched", 1): (
        "The host bounds one stream of 8 layers: a step took 1.5 to 2.3 ms over the "
        "nine repeats of that arm, in no order, and 1.5 to 1.9 ms resident."
    ),
}
"""Why a prediction is off, by receipt, arm and streams."""


@dataclass(frozen=True)
class Row:
    """One measured step and its prediction, in milliseconds."""

    receipt: str
    arm: str
    streams: int
    resident_ms: float
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_ms / self.measured_ms - 1


def bench() -> Any:
    """The module `arms.py`, which lies beside this file."""
    path = Path(__file__).with_name("arms.py")
    spec = importlib.util.spec_from_file_location("arms", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def usable() -> dict[str, dict[str, Any]]:
    """Receipts that have what a prediction needs."""
    found = {}
    for path in sorted(RECEIPTS.glob("*.json")):
        receipt = json.loads(path.read_text())
        if all(field in receipt for field in NEEDED) and "resident" in receipt["arms"]:
            found[path.stem] = receipt
    return found


def stages(receipt: dict[str, Any], arm: str) -> bool:
    """Whether an arm's layers copied cold rows before the kernel ran."""
    return str(receipt["arms"][arm][0].get("layout")).endswith("staged")


def step_ms(runs: list[dict[str, Any]], streams: str) -> float:
    """Mean over the runs of an arm."""
    return statistics.mean(run["steps_ms"][streams]["median"] for run in runs)


def hardware_of(receipt: dict[str, Any]) -> Any:
    """The measured bandwidths of the receipt's hardware.

    Raises:
        KeyError: None were measured on it.
    """
    measured = import_module(f"{PACKAGE}.expert_profile.predict").MEASURED
    name = receipt["hardware"]["name"].split()[-1].lower()
    return measured[name]


def fingerprint_of(receipt: dict[str, Any]) -> Any:
    """The model of a receipt."""
    config = receipt["config"]
    return import_module(f"{PACKAGE}.pinned_hot.map_file").Fingerprint(
        architecture=config["architectures"][0],
        num_experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        hidden_size=config["hidden_size"],
        moe_intermediate_size=config["moe_intermediate_size"],
        num_moe_layers=receipt["layers"],
        quantization=receipt["engine"]["quantization"],
    )


def wrong_experts(served: dict[str, int], share: float, hot: int, cold: int) -> int:
    """How many experts that the traffic uses a foreign map keeps cold.

    Every used expert has (1 - share) / hot of the selections and every other one
    share / cold, so the cold selections that were served tell.
    """
    found = served["cold"] / sum(served.values())
    return round((found - share) / ((1 - share) / hot - share / cold))


def host_bytes_of(
    receipt: dict[str, Any], arm: str, row: Any, cold: list[int]
) -> np.ndarray:
    """What an arm left outside HBM, `(layers, 2, experts)`."""
    prediction = import_module(f"{PACKAGE}.expert_profile.predict")
    layers, experts = receipt["layers"], receipt["config"]["num_experts"]
    run = receipt["arms"][arm][0]
    if arm == "positional":
        return prediction.positional_host_bytes(layers, experts, row, run["cold_bytes"])
    row_bytes = import_module(f"{PACKAGE}.expert_profile.row_bytes")
    kept = [e for e in range(experts) if arm == "all_hot" or e not in set(cold)]
    page_bytes = row_bytes.DEVICE_PAGE_BYTES
    if arm == "split":  # where rows share no page
        page_bytes = math.gcd(row.w13, row.w2)
    layer = row_bytes.host_bytes(row, experts, kept, page_bytes)
    return np.stack([layer] * layers)


def compare(name: str, receipt: dict[str, Any]) -> list[Row]:
    """Predict every arm of a receipt from its resident arm."""
    prediction = import_module(f"{PACKAGE}.expert_profile.predict")
    row_bytes = import_module(f"{PACKAGE}.expert_profile.row_bytes")
    arms = bench()
    shape, config = arms.SHAPES[receipt["shape"]], receipt["config"]
    experts, hot = config["num_experts"], shape["hot"]
    row = row_bytes.expert_row(fingerprint_of(receipt))
    traffic_cold = arms.scattered(experts - hot, experts, 5)
    used = [e for e in range(experts) if e not in set(traffic_cold)]
    share = receipt["cold_share_of_traffic"]
    weight = np.ones(experts)
    weight[traffic_cold] = share * hot / (len(traffic_cold) * (1 - share))
    counts = np.tile(weight, (receipt["layers"], 1))
    rows = []
    for arm in ARMS:
        if arm not in receipt["arms"] or stages(receipt, arm):
            continue
        for streams in receipt["arms"]["resident"][0]["steps_ms"]:
            cold = traffic_cold
            if arm == "foreign":
                served = receipt["arms"][arm][0]["served"][streams]
                wrong = wrong_experts(served, share, hot, experts - hot)
                foreign = used[:: max(hot // wrong, 1)][:wrong]
                cold = sorted(traffic_cold[wrong:] + foreign)
            resident = step_ms(receipt["arms"]["resident"], streams)
            predicted = prediction.predict(
                counts,
                host_bytes_of(receipt, arm, row, cold),
                config["num_experts_per_tok"],
                row,
                prediction.Step(int(streams)),
                hardware_of(receipt),
                resident,
            )
            measured = step_ms(receipt["arms"][arm], streams)
            rows.append(
                Row(name, arm, int(streams), resident, predicted.step_ms, measured)
            )
    return rows


def markdown(rows: list[Row]) -> str:
    """The table, with what is off explained below it."""
    lines = [
        "| receipt | arm | C | resident ms | predicted ms | measured ms | error |",
        "|---|---|---|---|---|---|---|",
    ]
    notes = []
    for row in rows:
        mark = ""
        if abs(row.error) > WITHIN:
            reason = MISSES.get((row.receipt, row.arm, row.streams))
            notes.append(f"{len(notes) + 1}. {reason or 'not explained'}")
            mark = f" ({len(notes)})"
        lines.append(
            f"| {row.receipt} | {row.arm} | {row.streams} | {row.resident_ms:.2f} | "
            f"{row.predicted_ms:.2f} | {row.measured_ms:.2f} | {row.error:+.0%}{mark} |"
        )
    within = sum(abs(row.error) <= WITHIN for row in rows)
    lines += ["", f"{within} of {len(rows)} are within {WITHIN:.0%}."]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def main() -> None:
    """Print or write the table, and what a test wants to know as the last line."""
    rows = [row for name, receipt in usable().items() for row in compare(name, receipt)]
    table = markdown(rows)
    if sys.argv[1:] == ["--write"]:
        # The script runs in the patched vLLM's Python, beside the tooling.
        sys.path.append(str(ROOT))
        replace_part = import_module("recipe.generated").replace_part
        PAGE.write_text(replace_part(PAGE, PART, table))
    elif sys.argv[1:] == ["--json"]:
        found = [vars(row) | {"error": row.error} for row in rows]
        print(json.dumps({"rows": found, "table": table}))
    else:
        print(table)


if __name__ == "__main__":
    main()
