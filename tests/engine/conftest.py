"""Real engines on the CPU: stock, patched, and every prefix of the series."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipe.paths import ROOT
from recipe.series import load_series
from recipe.tree import build_tree

MODEL = ROOT / "fixtures" / "tiny-moe"
SCRIPT = Path(__file__).with_name("generate.py")
NUM_PATCHES = len(load_series())

Engine = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """Finished process of an engine that was expected to refuse."""

    status: int
    output: str


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Make the tree of a prefix of the series; 0 patches is the installed wheel."""
    made: dict[int, Path] = {}

    def tree(patches: int = NUM_PATCHES) -> Path:
        if patches not in made:
            path = tmp_path_factory.mktemp("trees") / str(patches)
            build_tree("cpu", path, upto=patches)
            made[patches] = path
        return made[patches]

    return tree


def environment(tree: Path | None) -> dict[str, str]:
    """Environment of a process that imports vLLM from a tree, or as installed."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return env if tree is None else env | {"PYTHONPATH": str(tree)}


@pytest.fixture
def prompts() -> list[str]:
    """The held-out prompts of all four domains."""
    domains = json.loads((MODEL / "prompts.json").read_text())["prompts"]
    return [prompt for name in domains for prompt in domains[name]]


@pytest.fixture
def generate(tmp_path: Path, prompts: list[str]) -> Iterator[Engine]:
    """Run an engine in its own process and return what it wrote down."""

    def run(
        tree: Path | None,
        *steps: str,
        model: Path = MODEL,
        ask: list[Any] | None = None,
        max_tokens: int = 24,
        refused: bool = False,
        preexec: Callable[[], None] | None = None,
        env: dict[str, str] | None = None,
        **engine: Any,
    ) -> Any:
        result = tmp_path / "result.json"
        defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}
        job = {
            "model": str(model),
            "engine": defaults | engine,
            "prompts": prompts if ask is None else ask,
            "max_tokens": max_tokens,
            "steps": list(steps) or ["generate"],
            "result": str(result),
        }
        process = subprocess.run(
            [sys.executable, str(SCRIPT)],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            env=environment(tree) | (env or {}),
            cwd=tmp_path,
            timeout=900,
            preexec_fn=preexec,
        )
        output = process.stdout + process.stderr
        if refused:
            return Run(process.returncode, output)
        assert process.returncode == 0, output[-12000:]
        answer = json.loads(result.read_text())
        result.unlink()
        return answer | {"log": output}

    yield run
