"""The overlay on the real CPU base: imported by its Python, and serving a model."""

import http.client
import json
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from recipe.apply import sha256
from recipe.image import Result, run_command
from recipe.paths import ROOT
from recipe.stamp import overlay_id
from tests.image.support import CPU, Workshop

pytestmark = pytest.mark.image

# Where people start it; the image's own working directory comes on top.
DIRECTORIES = ("/", "/workspace", "/vllm-workspace")
MODEL = ROOT / "fixtures" / "tiny-moe"
CONFIG: dict[str, Any] = json.loads((MODEL / "config.json").read_text())
HOT_EXPERTS = 20
PROMPT = "def main(argv):\n"
START_LIMIT_S = 400.0
ANSWER_LIMIT_S = 120.0

IMPORT = """
import hashlib, importlib, json, os, sys
answer = {}
for path in json.load(sys.stdin):
    name = path[:-3].replace("/", ".").removesuffix(".__init__")
    with open(importlib.import_module(name).__file__, "rb") as stream:
        answer[path] = hashlib.sha256(stream.read()).hexdigest()
print("ANSWER", json.dumps([os.getcwd(), answer]))
"""


def imported(workshop: Workshop, result: Result, folder: str) -> dict[str, str]:
    """Import each overlaid module in ``folder``; return its file's hash."""
    modules = [path for path in result.overlay.files if path.endswith(".py")]
    script = (
        f"mkdir -p {folder} && cd {folder} && exec python3 -c {shlex.quote(IMPORT)}"
    )
    shown = workshop.shell(result.tag, script, json.dumps(modules).encode())
    (line,) = [text for text in shown.splitlines() if text.startswith("ANSWER ")]
    where, answer = json.loads(line.removeprefix("ANSWER "))
    assert where == folder
    assert set(answer) == set(modules)
    hashes: dict[str, str] = answer
    return hashes


@pytest.mark.parametrize("folder", DIRECTORIES)
def test_f1_f2_f3_every_module_is_imported_as_overlaid(
    workshop: Workshop, served: Result, folder: str
) -> None:
    for path, found in imported(workshop, served, folder).items():
        assert found == sha256(served.overlay.files[path]), path


def test_f2_working_directory_is_among_them(served: Result) -> None:
    assert served.image.config["WorkingDir"] in DIRECTORIES


def test_cpu_base_keeps_nothing_of_its_making(workshop: Workshop, base: str) -> None:
    script = "ls -A /workspace /tmp ~/.cache 2>/dev/null; find / -xdev -name '*.whl'"
    shown = workshop.shell(base, script)
    assert [line for line in shown.split() if not line.endswith(":")] == []


def test_cpu_base_launches_like_upstream(workshop: Workshop, base: str) -> None:
    image = workshop.engine.inspect(base)
    assert image is not None
    assert image.config["Entrypoint"] == ["vllm", "serve"]
    assert not image.config.get("Cmd")


def write_map(path: Path, hot: int) -> None:
    """Write an expert map for :data:`MODEL` that knows no traffic."""
    config = CONFIG
    experts, layers = config["num_experts"], config["num_hidden_layers"]
    layer = {
        "ranking": list(range(experts)),
        "share": [1 / experts] * experts,
        "hot": hot,
    }
    table = {
        "format": "vllm-expert-map",
        "version": 1,
        "fingerprint": {
            "architecture": config["architectures"][0],
            "num_experts": experts,
            "top_k": config["num_experts_per_tok"],
            "hidden_size": config["hidden_size"],
            "moe_intermediate_size": config["moe_intermediate_size"],
            "num_moe_layers": layers,
            "quantization": None,
        },
        "layers": {f"model.layers.{n}.mlp.experts": layer for n in range(layers)},
        "profiles": [],
        "expected_cold_share": 1 - hot / experts,
    }
    path.write_text(json.dumps(table))


@contextmanager
def serving(workshop: Workshop, tag: str, expert_map: Path, log: Path) -> Iterator[str]:
    """Run the command that ``image`` prints, on a free port; yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    name = f"pinned-hot-test-{port}"
    given = {
        "--publish=8000:8000": f"--publish=127.0.0.1:{port}:8000",
        "--volume=MODEL:/model:ro": f"--volume={MODEL}:/model:ro",
        "--volume=MAP.json:/map.json:ro": f"--volume={expert_map}:/map.json:ro",
    }
    words = shlex.split(run_command(workshop.engine, CPU, tag))
    assert set(given) < set(words)
    command = [given.get(word, word) for word in words]
    options = [f"--name={name}", "--env=VLLM_CPU_KVCACHE_SPACE=1"]
    options.append("--env=HF_HUB_OFFLINE=1")
    command[command.index(tag) : command.index(tag)] = options
    # Compiling for the tiny model would take longer than all the rest.
    command.append("--enforce-eager")
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until_up(address, process, log)
            yield address
        finally:
            subprocess.run([words[0], "rm", "--force", name], stdout=subprocess.DEVNULL)
            process.wait(timeout=60)


def wait_until_up(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the server answers ``/health``; fail with its log if it ends."""
    limit = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit:
        assert process.poll() is None, log.read_text()[-5000:]
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, http.client.HTTPException, OSError):
            time.sleep(1)
    pytest.fail(f"no answer in {START_LIMIT_S} s: {log.read_text()[-5000:]}")


def complete(address: str) -> dict[str, Any]:
    """Return the server's answer to :data:`PROMPT`."""
    body = {"model": "/model", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def gauge(address: str, name: str, memory: str) -> float:
    """Return the value of a gauge of :data:`MODEL`'s only engine in ``/metrics``."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    (line,) = [x for x in lines if x.startswith(name) and f'memory="{memory}"' in x]
    return float(line.rsplit(" ", 1)[1])


def test_container_serves_pinned_hot(
    workshop: Workshop, served: Result, tmp_path: Path
) -> None:
    if workshop.engine.name == "buildah":
        pytest.skip("buildah runs no services; podman serves from the same store")
    expert_map, log = tmp_path / "map.json", tmp_path / "serve.log"
    write_map(expert_map, HOT_EXPERTS)
    with serving(workshop, served.tag, expert_map, log) as address:
        answer = complete(address)
        hot, cold = (gauge(address, "vllm:expert_rows", x) for x in ("hot", "cold"))
    assert hot + cold == CONFIG["num_experts"] * CONFIG["num_hidden_layers"]
    assert hot >= HOT_EXPERTS * CONFIG["num_hidden_layers"] and cold > 0
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["text"].strip()
    shown = log.read_text()
    assert f"overlay {overlay_id(served.overlay.digest)}" in shown
    assert "Expert weights: " in shown
