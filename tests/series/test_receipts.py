"""Receipts are complete, and the README shows what they say."""

import json
from pathlib import Path

import pytest

from recipe.errors import RecipeError
from recipe.generated import replace_part
from recipe.receipts import load_receipts, pages, render

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
