"""Make an expert map from counted selections, with the patched vLLM's own planner.

Reads ``{"model": PATH, "counts": {LAYER: […]}, "hot": N, "profiles": […]}`` as JSON
from stdin and writes the map's text to stdout.
"""

import json
import sys
from importlib import import_module

PINNED_HOT = "vllm.model_executor.layers.fused_moe.pinned_hot"


def main() -> None:
    """Make one map."""
    config = import_module("vllm.config")
    planner = import_module(f"{PINNED_HOT}.map_file")
    provider = import_module(f"{PINNED_HOT}.provider")
    question = json.load(sys.stdin)
    counts = question["counts"]
    fingerprint = provider.model_fingerprint(
        config.ModelConfig(model=question["model"]), len(counts)
    )
    profiles = [planner.Profile(**profile) for profile in question["profiles"]]
    expert_map = planner.expert_map_from_counts(
        counts, question["hot"], fingerprint, profiles
    )
    sys.stdout.write(expert_map.to_json())


if __name__ == "__main__":
    main()
