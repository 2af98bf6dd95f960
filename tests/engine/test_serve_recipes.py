"""The launch recipes are what `vllm serve` of the patched tree takes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recipe.paths import ROOT

from .conftest import environment

pytestmark = pytest.mark.cpu

RECIPES = sorted((ROOT / "recipe" / "serve").glob("*.yaml"))
# Reads the file as `vllm serve --config` does and says what it understood.
PARSE = """
import json, sys
from vllm.config.speculative import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

parser = make_arg_parser(FlexibleArgumentParser())
words = parser.load_config_file(sys.argv[1])
args = EngineArgs.from_cli_args(parser.parse_args(words))
draft = args.speculative_config
fields = set(SpeculativeConfig.__dataclass_fields__)
print(json.dumps({
    "expert": {k: v for k, v in vars(args).items() if k.startswith("expert_")},
    "max_model_len": args.max_model_len,
    "gpu_memory_utilization": args.gpu_memory_utilization,
    "unknown_draft_keys": sorted(set(draft) - fields),
    "schedule": validate_and_normalize_dynamic_sd_schedule(
        draft["num_speculative_tokens_per_batch_size"]
    ),
    "draft_tokens": draft["num_speculative_tokens"],
    "max_num_seqs": args.max_num_seqs,
}))
"""


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_key_is_an_argument_of_the_patched_server(
    path: Path, trees: Callable[..., Path]
) -> None:
    process = subprocess.run(
        [sys.executable, "-c", PARSE, str(path)],
        capture_output=True,
        text=True,
        env=environment(trees()),
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["expert"]["expert_provider"] == "pinned_hot"
    assert found["expert"]["expert_layout"] == "split"
    assert found["expert"]["expert_map"]
    assert found["unknown_draft_keys"] == []
    # Every number of streams has its draft tokens, and none more than the most.
    assert found["schedule"][-1][1] == found["max_num_seqs"]
    most = max(tokens for _, _, tokens in found["schedule"])
    assert most == found["draft_tokens"]
    assert found["max_model_len"] == 1 << 20
    assert found["gpu_memory_utilization"] == 0.97


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_whether_it_was_run(path: Path) -> None:
    text = path.read_text()
    assert "NOT RUN HERE" in text or "recipe/receipts/" in text
