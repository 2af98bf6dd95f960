"""The demo with real servers, in the precision that is not the verb's default."""

import sys
from pathlib import Path
from typing import Any

import pytest

from recipe.demo import (
    FIXTURE,
    MAX_TOKENS,
    Row,
    load_prompts,
    patched_tree,
    run_demo,
    total,
    verdict,
)
from tests.demo.support import repeat_period

pytestmark = pytest.mark.cpu

DTYPE = "float32"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run both servers once."""
    work = tmp_path_factory.mktemp("demo")
    return run_demo(Path(sys.executable), patched_tree("cpu"), work, DTYPE)


def test_every_answer_equals_stock(result: dict[str, Any]) -> None:
    """All tokens of all prompts, with hot and with cold rows in use."""
    rows: list[Row] = result["rows"]
    prompts = load_prompts()["prompts"]
    assert verdict(rows) is None
    assert total(rows).prompts == sum(map(len, prompts.values()))
    assert total(rows).tokens == MAX_TOKENS * total(rows).prompts


def test_map_serves_its_own_domain_best(result: dict[str, Any]) -> None:
    """The map is made of code: code leaves the least cold, Japanese far more."""
    shares = {row.domain: row.cold_share for row in result["rows"]}
    assert min(shares, key=shares.__getitem__) == "code"
    assert shares["japanese"] > 2 * shares["code"]


def test_bytes_are_where_the_map_puts_them(result: dict[str, Any]) -> None:
    """A quarter of the rows is cold, and together they are all expert weights."""
    assert result["hot_bytes"] == 3 * result["cold_bytes"]
    weights = (FIXTURE / "model.safetensors").stat().st_size
    expert_bytes = result["hot_bytes"] + result["cold_bytes"]
    assert expert_bytes > 0.9 * 2 * weights  # float32 from a bf16 checkpoint


def test_greedy_text_is_not_a_loop(result: dict[str, Any]) -> None:
    """Seen anew, from the stock server."""
    period = repeat_period()
    loops = {
        (domain, index): period(answer.token_ids)
        for domain, answers in result["stock"].items()
        for index, answer in enumerate(answers)
    }
    looping = {key: value for key, value in loops.items() if value is not None}
    assert not looping
