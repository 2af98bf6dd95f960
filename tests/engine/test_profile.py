"""--expert-profile-out in the real engine: exact totals, whatever the batches were."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from .conftest import MODEL, environment
from .test_serving import (
    LAYERS,
    NUM_EXPERTS,
    NUM_LAYERS,
    TOP_K,
    make_map,
    pinned,
    random_counts,
)

pytestmark = pytest.mark.cpu

# Prompts are cut into chunks and many are in one batch.
CHUNKED = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 32}
SECONDS = 240


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a profile with nothing but safetensors: its metadata and tensors."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as stream:
        metadata = json.loads(stream.metadata()["vllm_expert_profile"])
        return metadata, {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118


def assert_exact(path: Path, prefill: int, decode: int) -> dict[str, Any]:
    """Compare a profile's totals; every layer saw every token, top_k times."""
    metadata, counts = read(path)
    assert (metadata["tokens_prefill"], metadata["tokens_decode"]) == (prefill, decode)
    assert metadata["layer_names"] == LAYERS
    for name, tokens in (("counts_prefill", prefill), ("counts_decode", decode)):
        assert counts[name].shape == (NUM_LAYERS, NUM_EXPERTS)
        assert counts[name].sum(axis=1).tolist() == [tokens * TOP_K] * NUM_LAYERS
    return counts


def test_totals_are_exact(generate, trees, tmp_path):
    """C4, C5, C7, C8: chunked prefill, prefix cache, one-token answers, start-up."""
    path = tmp_path / "profile"
    steps = ["dump", "generate", "dump", "generate", "dump", "generate one", "dump"]
    ours = generate(trees(), *steps, expert_profile_out=str(path), **CHUNKED)
    first, again, one = ours["fed"]
    assert "No token has passed" in ours["log"]
    # Every token is fed but the last of each answer. Cached tokens are not fed.
    assert first["cached"] < again["cached"]
    assert again["cached"] > again["prompt"] // 2
    assert one["later"] == 0
    assert ours["dumps"] == [{"tokens_prefill": 0, "tokens_decode": 0}] + [
        {
            "tokens_prefill": fed["prompt"] - fed["cached"],
            "tokens_decode": fed["later"],
        }
        for fed in ours["fed"]
    ]
    fed = {key: sum(each[key] for each in ours["fed"]) for key in first}
    assert_exact(path, fed["prompt"] - fed["cached"], fed["later"])


def test_counts_are_stocks(generate, trees, tmp_path, prompts):
    """Per expert what stock's routers gave out: compiled, cached, two ranks.

    C11: two tensor-parallel ranks give what one gives, per phase too.
    """
    options = {"enable_prefix_caching": False, "ask": prompts[::4]}
    stock = generate(None, "count", "generate", **options)
    expected = [stock["counts"][name] for name in LAYERS]
    compiled = {"enforce_eager": False, "env": {"VLLM_CACHE_ROOT": str(tmp_path)}}
    two_ranks = {
        "tensor_parallel_size": 2,
        "env": {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|0",
        },
    }
    runs = {"compiled": compiled, "from_cache": compiled, "two_ranks": two_ranks}
    found = {}
    for name, changes in runs.items():
        path = tmp_path / name
        made = options | changes
        ours = generate(trees(), "generate", expert_profile_out=str(path), **made)
        assert ours["tokens"] == stock["tokens"]
        found[name] = assert_exact(
            path, ours["fed"][0]["prompt"], ours["fed"][0]["later"]
        )
        both = found[name]["counts_prefill"] + found[name]["counts_decode"]
        assert both.tolist() == expected
        for phase, counts in found[name].items():
            assert counts.tolist() == found["compiled"][phase].tolist()
    graphs = tmp_path / "torch_compile_cache" / "torch_aot_compile"
    assert len(list(graphs.iterdir())) == 1


def test_preempted_and_drafted_tokens_are_counted(generate, trees, tmp_path):
    """C10, with pinned_hot: recomputed and drafted tokens select experts, so count."""
    path = tmp_path / "profile"
    ours = generate(
        trees(),
        "watch",
        "generate",
        max_tokens=64,
        num_gpu_blocks_override=8,
        block_size=32,
        max_model_len=128,
        ask=[{"prompt_token_ids": [9 + i] * 60} for i in range(8)],
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
        expert_profile_out=str(path),
        enable_prefix_caching=False,
        **pinned(tmp_path, make_map(random_counts(), 16)),
    )
    fed = ours["fed"][0]
    rows = sum(ours["batches"])
    assert rows > fed["prompt"] + fed["later"]  # something was recomputed
    metadata, _ = read(path)
    prefill, decode = metadata["tokens_prefill"], metadata["tokens_decode"]
    assert prefill + decode == rows
    assert prefill > fed["prompt"] and decode >= fed["later"]
    assert_exact(path, prefill, decode)
    assert "80 rows hot: " in ours["log"]


class Server:
    """`vllm serve` over the patched tree, until the block ends."""

    def __init__(self, tree: Path, folder: Path, *flags: str):
        self.log = folder / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
        command += [str(MODEL), "--host=127.0.0.1", f"--port={port}", *flags]
        command += ["--served-model-name=tiny", "--enforce-eager", "--dtype=float32"]
        settings = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }
        self.process = subprocess.Popen(
            command,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment(tree) | settings,
            cwd=folder,
        )

    def __enter__(self) -> "Server":
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5)
                return self
            except OSError:
                gone = self.process.poll() is not None
                if gone or time.monotonic() > deadline:
                    self.process.kill()
                    pytest.fail(self.log.read_text()[-8000:])
                time.sleep(0.2)

    def __exit__(self, *error: object) -> None:
        """Stop it as `docker stop` does, with one SIGTERM to its first process."""
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(60) == 0
        finally:
            self.process.kill()

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return json.load(answer)

    def complete(self, prompt: str) -> tuple[int, int]:
        """Let it answer; return the tokens that it had to be fed, by phase."""
        usage = self.post(
            "/v1/completions",
            model="tiny",
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            ignore_eos=True,
        )["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"] - 1


def test_server_writes_on_demand_at_an_interval_and_when_stopped(
    trees, tmp_path, prompts
):
    path = tmp_path / "profile"
    flags = [f"--expert-profile-out={path}", "--expert-profile-label=code"]
    flags += ["--expert-profile-interval=3", "--no-enable-prefix-caching"]
    with Server(trees(), tmp_path, *flags) as server:
        fed = [server.complete(prompt) for prompt in prompts[:2]]
        answer = server.post("/expert_profile/dump")
        prefill, decode = (sum(column) for column in zip(*fed, strict=True))
        assert answer["path"] == str(path)
        assert_exact(path, prefill, decode)
        before = path.stat().st_mtime_ns
        time.sleep(3)
        fed.append(server.complete(prompts[2]))
        assert path.stat().st_mtime_ns > before  # an interval had passed
        fed.append(server.complete(prompts[3]))
        # What makes a dump impossible is told to the one who asked.
        saved = path.rename(tmp_path / "saved")
        path.mkdir()
        with pytest.raises(urllib.error.HTTPError) as error:
            server.post("/expert_profile/dump")
        assert error.value.code == 500
        assert str(path) in json.load(error.value)["error"]
        path.rmdir()
        saved.rename(path)
    prefill, decode = (sum(column) for column in zip(*fed, strict=True))
    assert_exact(path, prefill, decode)
    assert read(path)[0]["labels"] == ["code"]
