"""Two GPUs: cold rows in the other one's memory, and two ranks of one engine."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .conftest import GENERATE, Script, at_once
from .test_engine import (
    HOT_PAGES,
    PAGE_BYTES,
    RUNNERS,
    equal_to_stock,
    job,
    pinned,
)
from .test_profile import DIFFERING_ROUTES, exact
from .test_profile import job as recorded

pytestmark = pytest.mark.gpu

STEPS = ["generate", "reload", "generate"]
# One batch: ranks of several engines that share the GPUs wait for each other's turn.
BATCH = {"max_num_seqs": 32}
TWO_RANKS = BATCH | {"tensor_parallel_size": 2}
CASES = [
    ("eager", "v2"),
    ("full_decode_graphs", "v2"),
    ("full_decode_graphs", "v1"),
    ("compiled_full_and_piecewise", "v1"),
]


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def ranks_equal_stock(
    script: Script, folder: Path, case: tuple[str, str], options: dict[str, Any]
) -> dict[str, Any]:
    """Compare pinned_hot with stock on as many ranks, and return the former's run."""
    mode, runner = case
    ranks = {name: value for name, value in options.items() if "expert" not in name}
    [ours] = equal_to_stock(
        script,
        folder,
        {"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner]},
        job(mode, ranks, STEPS),
        job(mode, pinned(folder) | options, ["places", *STEPS]),
    )
    return ours


@pytest.mark.parametrize("case", CASES[:3], ids="-".join)
def test_cold_rows_in_the_memory_of_a_peer(
    case: tuple[str, str], script: Script, tmp_path: Path
) -> None:
    """Tokens equal the resident model's, and no page lies in host memory."""
    import torch

    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("GPU 0 cannot read the memory of GPU 1")
    peer = BATCH | {"expert_cold_tier": "peer:1"}
    ours = ranks_equal_stock(script, tmp_path, case, peer)
    [rank] = ours["places"]
    assert rank["bytes"].keys() == {"GPU 0", "GPU 1"}
    assert rank["bytes"]["GPU 0"] == HOT_PAGES * PAGE_BYTES
    speed = re.search(r"reads memory of GPU 1 in a range at ([\d.]+) GB/s", ours["log"])
    assert speed is not None
    print(json.dumps({"peer_gb_per_s": float(speed[1]), "places": ours["places"]}))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_two_ranks_equal_stock(
    case: tuple[str, str], script: Script, tmp_path: Path
) -> None:
    """Tokens equal those of stock's two ranks; each rank's hot rows are on its GPU."""
    ours = ranks_equal_stock(script, tmp_path, case, TWO_RANKS)
    assert [rank["device"] for rank in ours["places"]] == [0, 1]
    for rank in ours["places"]:
        gpu = f"GPU {rank['device']}"
        assert rank["bytes"].keys() == {gpu, "host"}
        assert rank["bytes"][gpu] == HOT_PAGES * PAGE_BYTES
    print(json.dumps(ours["places"]))


@pytest.mark.parametrize("runner", RUNNERS)
def test_two_ranks_record_what_one_does(
    runner: str, script: Script, tmp_path: Path
) -> None:
    """A token that both ranks route is counted once."""
    from safetensors.numpy import load_file

    env = {"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner]}
    asked = {
        "one": recorded(tmp_path / "one", "eager"),
        "two": recorded(tmp_path / "two", "eager"),
        "graphs": recorded(tmp_path / "graphs", "full"),
    }
    for name in ("two", "graphs"):
        asked[name]["engine"]["tensor_parallel_size"] = 2
    found = at_once(script, [(GENERATE, wanted, env) for wanted in asked.values()])
    counts = []
    for name, result in zip(asked, found, strict=True):
        assert result["status"] == 0, result["log"][-6000:]
        counts.append(exact(result, load_file(tmp_path / name)))
    one, *others = counts
    shares = []
    for other in others:
        for phase, expected in one.items():
            shares.append(abs(other[phase] - expected).sum() / 2 / expected.sum())
    print(json.dumps({"runner": runner, "differing": shares}))
    assert found[0]["dumps"] == found[1]["dumps"] == found[2]["dumps"]
    assert max(shares) <= DIFFERING_ROUTES
