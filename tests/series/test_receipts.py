"""Receipts are complete, and the pages show what they say."""

import json
from pathlib import Path

import pytest

from recipe.errors import RecipeError
from recipe.generated import replace_part
from recipe.receipts import HEADLINES, load_receipts, pages, render, render_speeds

GOOD = {
    "date": "2026-01-01",
    "commit": "abc",
    "command": "x",
    "hardware": {"name": "G"},
}


def write(folder: Path, **changes: object) -> Path:
    (folder / "one.json").write_text(json.dumps(GOOD | changes))
    return folder


def test_pages_are_generated_from_the_receipts() -> None:
    for path, text in pages().items():
        assert path.read_text() == text, f"{path}: run ./build.sh receipts"


@pytest.mark.parametrize("field", GOOD)
def test_missing_field_is_named(tmp_path: Path, field: str) -> None:
    (tmp_path / "one.json").write_text(
        json.dumps({key: value for key, value in GOOD.items() if key != field})
    )
    with pytest.raises(RecipeError, match=f"one.json: field '{field}'"):
        load_receipts(tmp_path)


def test_ratio_names_have_one_form(tmp_path: Path) -> None:
    write(tmp_path, ratios={"speedup": 2.0})
    with pytest.raises(RecipeError, match="'speedup' is not like"):
        load_receipts(tmp_path)


def test_tables(tmp_path: Path) -> None:
    write(
        tmp_path,
        ratios={"a_over_b_c1": 1.234, "a_over_b_c16": 0.5, "a_tax_c16": 0.0147},
        parity=[
            {"mode": "K", "tokens_equal": True},
            {"mode": "L", "runner": "V1", "tokens_equal": None},
            {"mode": "M", "differing_share": 0},
            {"mode": "N", "differing_share": 0.00012},
        ],
    )
    table = render(load_receipts(tmp_path))
    assert "| `a_over_b` | 1.23 | 0.50 |" in table
    assert "| `a_tax` | – | +1.5% |" in table
    assert "| K | equal |" in table and "| L, V1 | not shown |" in table
    assert "| M | equal |" in table
    assert "| N | 0.012% of the selections differ |" in table


def test_speeds_are_those_of_benchmarks(tmp_path: Path) -> None:
    shape = {
        "shape": "s",
        "layers": 3,
        "config": {"num_experts": 7},
        "engine": {"quantization": None},
    }
    ratios = {
        "matched_over_resident_c8": 0.777,
        "matched_over_resident_c1": 0.9,
        "foreign_over_positional_c8": 1.5,
        "matched_over_resident_prefill_512": 0.3,
        "resident_last_over_first_c8": 1.0,
    }
    write(tmp_path, **shape, ratios=ratios)
    (tmp_path / "two.json").write_text(json.dumps(GOOD | {"ratios": {"a_over_b": 2}}))
    link = "[3 layers of 7 experts, bfloat16](recipe/receipts/one.json)"
    assert render_speeds(load_receipts(tmp_path)).splitlines() == [
        f"| G, {link} | against | C1 | C8 |",
        "|---|---|---|---|",
        f"| {HEADLINES['matched_over_resident']} | 0.90 | 0.78 |",
        f"| {HEADLINES['foreign_over_positional']} | – | 1.50 |",
    ]


def test_markers_must_be_there(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# no markers\n")
    with pytest.raises(RecipeError, match="page.md: no <!-- part: begin -->"):
        replace_part(page, "part", "table")


def test_only_the_part_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- p: begin -->\nold\n<!-- p: end -->\nb\n")
    new = "a\n<!-- p: begin -->\nnew \\1\n<!-- p: end -->\nb\n"
    assert replace_part(page, "p", "new \\1") == new
