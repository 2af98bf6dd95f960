# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Options of the expert providers: defaults and compile-cache keys."""

from vllm.config import OffloadConfig
from vllm.config.expert_provider import ExpertProviderConfig


def test_default_is_resident():
    assert OffloadConfig().experts == ExpertProviderConfig()
    assert ExpertProviderConfig().expert_provider == "resident"
    assert ExpertProviderConfig().given_options() == []


def test_given_options_are_named_as_flags():
    config = ExpertProviderConfig(expert_map="/m.json", expert_layout="range")
    assert config.given_options() == ["--expert-map", "--expert-layout"]


def hashed(**options):
    return OffloadConfig(experts=ExpertProviderConfig(**options)).compute_hash()


def test_compile_cache_key_follows_what_can_change_a_graph():
    off = hashed()
    hot = hashed(expert_provider="pinned_hot", expert_map="/a.json")
    assert off != hot
    assert hot != hashed(
        expert_provider="pinned_hot", expert_map="/a.json", expert_layout="split"
    )
    # Another map or directory changes the memory behind the same tensors only.
    assert hot == hashed(
        expert_provider="pinned_hot", expert_map="/b.json", expert_cold_dir="/c"
    )
