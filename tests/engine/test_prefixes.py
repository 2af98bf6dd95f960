"""Every prefix of the series imports, and without the flag it is stock."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.series import load_series

from .conftest import NUM_PATCHES, environment

pytestmark = pytest.mark.cpu

# Import order matters here: each of these is where some process of vLLM starts.
ENTRIES = (
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.layers.fused_moe",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.mixtral",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.worker.cpu_worker",
)
# Each group of modules in a process of its own, but torch is imported once.
IMPORT_EACH = """
import importlib, json, os, sys, traceback
import torch, transformers
failed = {}
for names in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            for name in names:
                importlib.import_module(name)
        except BaseException:
            os.write(write, traceback.format_exc()[-2000:].encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        if text := pipe.read():
            failed[", ".join(names)] = text
    os.wait()
print(json.dumps(failed))
"""
STOCK: dict[str, object] = {}


def import_each(tree: Path | None, groups: list[list[str]]) -> dict[str, str]:
    process = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, json.dumps(groups)],
        capture_output=True,
        text=True,
        env=environment(tree),
        timeout=900,
    )
    assert process.returncode == 0, process.stderr
    failed: dict[str, str] = json.loads(process.stdout.splitlines()[-1])
    return failed


@pytest.mark.parametrize("patches", range(1, NUM_PATCHES + 1))
def test_prefix_imports_and_serves_stock_bits(patches, trees, generate):
    tree = trees(patches)
    packages: dict[str, list[str]] = {}
    for path in load_series()[patches - 1].adds:
        if path.startswith("vllm/"):
            name = path.removesuffix("/__init__.py").removesuffix(".py")
            packages.setdefault(str(Path(path).parent), []).append(
                name.replace("/", ".")
            )
    entries = [[name] for name in ENTRIES]
    assert import_each(tree, [*entries, *packages.values()]) == {}
    if "tokens" not in STOCK:
        STOCK.update(generate(None))
    ours = generate(tree)
    assert ours["vllm"].startswith(str(tree))
    assert ours["tokens"] == STOCK["tokens"]


def test_stock_imports_the_same_modules():
    """What cannot be imported from the wheel would make the test above useless."""
    assert import_each(None, [[name] for name in ENTRIES]) == {}
