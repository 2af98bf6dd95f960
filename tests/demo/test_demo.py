"""The demo's own arithmetic and its handling of servers, without the engine."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from recipe import demo
from recipe.demo import Answer, Row
from recipe.errors import RecipeError
from recipe.paths import ROOT

ANSWERS = (Answer(3, (7, 8)), Answer(2, (9,)))
ROW = Row("code", prompts=2, tokens=3, equal=2, hot=20, cold=4)


def test_compare_counts_equal_answers_and_rows() -> None:
    """One differing token makes an answer differ; 6 tokens were fed to the layers."""
    other = (ANSWERS[0], Answer(2, (10,)))
    assert demo.compare("code", ANSWERS, ANSWERS, 1 / 6, 4) == ROW
    assert demo.compare("code", other, ANSWERS, 1 / 6, 4) == replace(ROW, equal=1)


def test_compare_refuses_a_missing_answer() -> None:
    """A server that answered fewer prompts is not equal by omission."""
    with pytest.raises(ValueError, match="shorter|longer"):
        demo.compare("code", ANSWERS, ANSWERS[:1], 0.5, 4)


def test_counts_of_the_served_tokens_pass() -> None:
    """3 + 2 prompt tokens, and 1 + 0 that were generated and fed again."""
    demo.check_all_counted(ANSWERS, {"tokens_prefill": 5, "tokens_decode": 1})


@pytest.mark.parametrize(
    ("prefill", "decode"), [(4, 1), (6, 1), (5, 0), (5, 2), (0, 0)]
)
def test_other_counts_are_refused(prefill: int, decode: int) -> None:
    """One token too many or too few, in either phase."""
    counted = {"tokens_prefill": prefill, "tokens_decode": decode}
    with pytest.raises(RecipeError, match="not to be trusted"):
        demo.check_all_counted(ANSWERS, counted)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([ROW], None),
        ([ROW, replace(ROW, cold=0)], None),
        ([ROW, replace(ROW, equal=1)], "1 of 4 answers differ"),
        ([replace(ROW, cold=0)], "0 cold rows"),
        ([replace(ROW, hot=0)], "0 hot and 4 cold"),
        ([], "no token"),
    ],
)
def test_verdict(rows: list[Row], problem: str | None) -> None:
    """Success takes equal answers, and rows of both kinds."""
    found = demo.verdict(rows)
    assert found is None if problem is None else problem in str(found)


def test_table_has_a_line_for_each_domain_and_the_sum() -> None:
    """Columns are aligned and the sum is the last line."""
    lines = demo.format_table([ROW, replace(ROW, domain="german", cold=20)]).split("\n")
    assert [line.split()[0] for line in lines] == ["domain", "code", "german", "all"]
    assert lines[1].endswith("16.7%") and lines[2].endswith("50.0%")
    assert "4 of 4" in lines[3] and lines[3].endswith("37.5%")
    assert len({len(line) for line in lines[1:]}) == 1


def test_a_patched_reference_is_refused() -> None:
    """An environment that was patched in place cannot be the reference."""
    demo.check_stock({"vllm": "/site/vllm", "providers": [None]})
    with pytest.raises(RecipeError, match="is patched"):
        demo.check_stock({"vllm": "/site/vllm", "providers": ["resident"]})


@pytest.mark.parametrize(
    ("providers", "hot_rows", "problem"),
    [
        (["pinned_hot"], 3, None),
        (["pinned_hot"], 4, "layer a: 4 rows are hot"),
        (["resident"], 3, "not pinned_hot"),
        ([None], 3, "not pinned_hot"),
    ],
)
def test_rows_must_lie_where_the_map_says(
    providers: list[str | None], hot_rows: int, problem: str | None
) -> None:
    """The provider must serve every layer, with the map's cut."""
    where = {"hot_rows": hot_rows, "cold_rows": 4 - hot_rows}
    description = {"vllm": "v", "providers": providers, "residency": {"a": where}}
    if problem is None:
        demo.check_patched(description, hot=3, experts=4)
        return
    with pytest.raises(RecipeError, match=problem):
        demo.check_patched(description, hot=3, experts=4)


def test_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    """The tooling's own Python has no vLLM; its message must reach the user."""
    log = tmp_path / "server.log"
    empty = tmp_path / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", empty], check=True)
    with (
        pytest.raises(RecipeError, match="ended with status 1") as caught,
        demo.serve("stock", empty / "bin" / "python", log),
    ):
        pytest.fail("the block must not run")
    assert "No module named 'vllm'" in str(caught.value)
    assert str(log) in str(caught.value)


def test_stopping_ends_the_children_too(tmp_path: Path) -> None:
    """A server's engine is a process of its own; none may be left."""
    pid_file = tmp_path / "pid"
    process = subprocess.Popen(
        ["sh", "-c", f"sleep 600 & echo $! >{pid_file}; wait"], start_new_session=True
    )
    while not (pid_file.exists() and pid_file.read_text().strip()):
        time.sleep(0.01)
    demo._stop(process)
    assert process.returncode == -signal.SIGTERM
    child = Path("/proc", pid_file.read_text().strip(), "stat")
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the child is still alive"
        time.sleep(0.01)


def test_patched_tree_comes_before_what_is_installed() -> None:
    """And a PYTHONPATH of the caller's does not get between."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", "/somewhere")
        stock = demo.server_environment(None)["PYTHONPATH"]
        patched = demo.server_environment(Path("/tree"))["PYTHONPATH"]
    assert stock == str(ROOT)
    assert patched == os.pathsep.join(["/tree", str(ROOT)])
