"""Tables of measurements in README.md and docs, generated from ``recipe/receipts``."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from recipe import kernels
from recipe.errors import RecipeError
from recipe.generated import replace_part
from recipe.paths import ROOT
from recipe.pin import load_pin
from recipe.wheel import WheelFiles, fetch_wheel

RECEIPTS = ROOT / "recipe" / "receipts"
README = ROOT / "README.md"
MEASUREMENTS = ROOT / "docs" / "measurements.md"
RATIO = re.compile(r"(\w+?_over_\w+?|\w+?_of_bound|\w+?_tax)(?:_c(\d+))?")
CASE_FIELDS = ("mode", "runner")
REQUIRED = ("date", "commit", "command", "hardware")
# What the README says of a benchmark, by the ratio that says it: what was served and
# what it is compared with.
HEADLINES = {
    "matched_over_resident": "a map of the same traffic | all experts in HBM",
    "split_over_resident": "… in layout `split` | all experts in HBM",
    "peer_over_resident": "… cold rows in a second GPU's memory | all experts in HBM",
    "matched_over_positional": "a map of the same traffic | offloading by position",
    "foreign_over_positional": "a map of other traffic | offloading by position",
}


def load_receipts(folder: Path = RECEIPTS) -> dict[str, dict[str, Any]]:
    """Read every receipt.

    Raises:
        RecipeError: One is no JSON object or lacks a required field.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            receipt = json.loads(path.read_text())
        except ValueError as error:
            raise RecipeError(
                f"{path}: not valid JSON: {error}; write it again"
            ) from None
        missing = [field for field in REQUIRED if field not in receipt]
        if missing:
            raise RecipeError(f"{path}: field {missing[0]!r} is missing; add it")
        for name in receipt.get("ratios", {}):
            if not RATIO.fullmatch(name):
                raise RecipeError(
                    f"{path}: ratios: {name!r} is not like "
                    "what_over_what or what_over_what_cN; rename it"
                )
        found[path.stem] = receipt
    return found


def _shape(receipt: dict[str, Any]) -> str:
    experts = receipt["config"]["num_experts"]
    quantization = receipt["engine"]["quantization"] or "bfloat16"
    return f"{receipt['layers']} layers of {experts} experts, {quantization}"


def _title(name: str, receipt: dict[str, Any]) -> str:
    title = f"[{name}](../recipe/receipts/{name}.json), {receipt['hardware']['name']}"
    return f"{title}, {_shape(receipt)}" if "shape" in receipt else title


def _by_streams(ratios: dict[str, float]) -> dict[str, dict[int, float]]:
    """Ratios by what is compared and the number of streams, 0 without one."""
    cells: dict[str, dict[int, float]] = {}
    for name, value in ratios.items():
        what, streams = RATIO.fullmatch(name).groups()  # type: ignore[union-attr]
        cells.setdefault(what, {})[int(streams or 0)] = value
    return cells


def _ratio_table(
    titles: list[str], labels: dict[str, str], cells: dict[str, dict[int, float]]
) -> list[str]:
    """One row for what is compared, one column for each number of streams.

    Args:
        titles: Heads of the columns that the labels fill.
        labels: First cells of the rows, by what is compared.
        cells: What `_by_streams` gives.
    """
    rows = {what: cells[what] for what in labels if what in cells}
    columns = sorted({streams for row in rows.values() for streams in row})
    heads = [*titles, *(f"C{c}" if c else "–" for c in columns)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for what, row in rows.items():
        # A tax is a small share of a step.
        form = "{:+.1%}" if what.endswith("_tax") else "{:.2f}"
        values = (form.format(row[c]) if c in row else "–" for c in columns)
        lines.append(f"| {labels[what]} | " + " | ".join(values) + " |")
    return lines


def _parity_table(cases: list[dict[str, Any]]) -> list[str]:
    lines = ["| case | result |", "|---|---|"]
    for case in cases:
        words = [str(case[key]) for key in CASE_FIELDS if case.get(key)]
        if "differing_share" in case:
            share = case["differing_share"]
            shown = f"{share:.3%} of the selections differ" if share else "equal"
        else:
            verdict = case["tokens_equal"]
            shown = {True: "equal", False: "differs", None: "not shown"}[verdict]
        lines.append(f"| {', '.join(words)} | {shown} |")
    return lines


def render(receipts: dict[str, dict[str, Any]]) -> str:
    """Render one table a receipt; layer parity has a page of its own."""
    blocks = []
    for name, receipt in receipts.items():
        if any("method" in case for case in receipt.get("parity", ())):
            continue
        lines = [f"**{_title(name, receipt)}**", ""]
        if "note" in receipt:
            lines += [receipt["note"], ""]
        if receipt.get("ratios"):
            cells = _by_streams(receipt["ratios"])
            lines += _ratio_table(["ratio"], {x: f"`{x}`" for x in cells}, cells)
        if cases := [x for x in receipt.get("parity", ()) if "method" not in x]:
            lines += _parity_table(cases)
        blocks.append("\n".join(lines).rstrip())
    return "\n\n".join(blocks)


def render_speeds(receipts: dict[str, dict[str, Any]]) -> str:
    """Render the ratios of all benchmarks that `HEADLINES` has words for."""
    blocks = []
    for name, receipt in receipts.items():
        if "shape" not in receipt:
            continue
        link = f"[{_shape(receipt)}](recipe/receipts/{name}.json)"
        titles = [f"{receipt['hardware']['name']}, {link}", "against"]
        lines = _ratio_table(titles, HEADLINES, _by_streams(receipt["ratios"]))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def pages() -> dict[Path, str]:
    """The pages with generated parts, as they should be."""
    receipts = load_receipts()
    wheel = WheelFiles(fetch_wheel(load_pin().flavor("cpu")))
    table = kernels.generate(receipts, wheel)
    return {
        README: replace_part(README, "speeds", render_speeds(receipts)),
        MEASUREMENTS: replace_part(MEASUREMENTS, "receipts", render(receipts)),
        kernels.PAGE: replace_part(kernels.PAGE, "kernels", table),
    }


def _run(args: argparse.Namespace) -> int:
    for path, text in pages().items():
        if args.check and path.read_text() != text:
            raise RecipeError(
                f"{path.name} is behind its receipts; run ./build.sh receipts"
            )
        if not args.check:
            path.write_text(text)
    return 0


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Add the verb ``receipts``."""
    parser = subparsers.add_parser("receipts", help="write the tables of measurements")
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.set_defaults(run=_run)
