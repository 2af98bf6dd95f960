"""Draw a map and two profiles with the patched vLLM, in one process.

A script: ``python draw.py FOLDER`` writes the profiles, the map, ``page.html``,
``again.html`` and ``page.png`` there. One profile's label is hostile on purpose.
"""

import os
import sys
from importlib import import_module

import numpy as np

PACKAGE = "vllm.model_executor.layers.fused_moe"
LAYERS, EXPERTS, TOP_K, TOKENS = 12, 64, 4, 1500
HOSTILE = '</script><script>document.title="taken"</script><b>$x^{$'


def write_profile(seed: int, label: str, path: str) -> None:
    """Write a profile of random traffic, some experts far more used than others."""
    profile_file = import_module(f"{PACKAGE}.expert_profile.profile_file")
    map_file = import_module(f"{PACKAGE}.pinned_hot.map_file")
    random = np.random.default_rng(seed)
    counts = np.zeros((LAYERS, EXPERTS), np.int64)
    for layer in counts:
        heat = -1.2 * np.log1p(random.permutation(EXPERTS))
        noise = random.gumbel(size=(TOKENS, EXPERTS))
        chosen = np.argpartition(-(heat + noise), TOP_K, axis=1)[:, :TOP_K]
        layer += np.bincount(chosen.ravel(), minlength=EXPERTS)
    profile = profile_file.ExpertProfile(
        fingerprint=map_file.Fingerprint(
            architecture="Qwen3MoeForCausalLM",
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden_size=2048,
            moe_intermediate_size=768,
            num_moe_layers=LAYERS,
            quantization="mxfp4",
        ),
        layer_names=tuple(f"model.layers.{i}.mlp.experts" for i in range(LAYERS)),
        counts_prefill=counts,
        counts_decode=np.zeros_like(counts),
        tokens_prefill=TOKENS,
        tokens_decode=0,
        vllm_version="test",
        start="2026-01-01T00:00:00Z",
        end="2026-01-01T01:00:00Z",
        labels=(label,),
    )
    profile_file.write_profile(profile, path)


def vllm(*words: str) -> None:
    """Call the vllm program; leave if it fails."""
    sys.argv = ["vllm", *words]
    try:
        import_module("vllm.entrypoints.cli.main").main()
    except SystemExit as left:
        if left.code:
            raise


def main() -> None:
    """Write everything."""
    os.chdir(sys.argv[1])
    write_profile(1, "code", "code.safetensors")
    write_profile(2, HOSTILE, "hostile.safetensors")
    shown = ("map.json", "code.safetensors", "hostile.safetensors")
    vllm("expert-map", "plan", "code.safetensors", "--hot-rows=40", "--out=map.json")
    vllm("expert-map", "show", *shown, "--html=page.html", "--png=page.png")
    vllm("expert-map", "show", *shown, "--html=again.html")


if __name__ == "__main__":
    main()
