"""Receipts are complete, and the README shows what they say."""

import json
from pathlib import Path

import pytest

from recipe.errors import RecipeError
from recipe.receipts import README, fill, load_receipts, render

GOOD = {
    "date": "2026-01-01",
    "commit": "abc",
    "command": "x",
    "hardware": {"name": "G"},
}


def write(folder: Path, **changes: object) -> Path:
    (folder / "one.json").write_text(json.dumps(GOOD | changes))
    return folder


def test_readme_is_generated_from_the_receipts() -> None:
    text = README.read_text()
    assert fill(text, render(load_receipts())) == text


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
        ratios={"a_over_b_c1": 1.234, "a_over_b_c16": 0.5},
        parity=[
            {"mode": "K", "tokens_equal": True},
            {"mode": "L", "runner": "V1", "tokens_equal": None},
        ],
    )
    table = render(load_receipts(tmp_path))
    assert "| `a_over_b` | 1.23 | 0.50 |" in table
    assert "| K | equal |" in table and "| L, V1 | not shown |" in table


def test_markers_must_be_there() -> None:
    with pytest.raises(RecipeError, match="markers"):
        fill("# no markers\n", "table")
