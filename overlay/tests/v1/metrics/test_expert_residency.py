# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The gauges of where expert rows lie, from the worker to the registry."""

from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from torch import nn

from tests.kernels.moe.expert_provider_utils import engine_config, write_model
from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
    ExpertResidency,
)
from vllm.v1.metrics import expert_residency
from vllm.v1.metrics.prometheus import unregister_vllm_metrics


class ServedLayer(nn.Module):
    """A MoE layer as the loader leaves it."""

    def __init__(self, name: str, residency: ExpertResidency | None):
        super().__init__()
        self.layer_name = name
        self.expert_provider = SimpleNamespace(residency=lambda: residency)


class OneWorker:
    """An executor whose worker holds a model of two served layers and one other."""

    def __init__(self):
        layers = [
            ServedLayer("a", ExpertResidency(3, 5, 300, 500, expected_cold_bytes=7.0)),
            ServedLayer("b", ExpertResidency(4, 4, 400, 400, expected_cold_bytes=9.0)),
            ServedLayer("c", None),
        ]
        self.worker = SimpleNamespace(get_model=lambda: nn.ModuleList(layers))
        self.asked = 0

    def collective_rpc(self, method):
        self.asked += 1
        return [method(self.worker)]


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch):
    monkeypatch.setattr(expert_residency, "_BY_ENGINE", {})
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


@pytest.fixture
def config(tmp_path):
    return engine_config(write_model(tmp_path / "model"))


def value(name, memory, model_name, engine="0"):
    labels = {"model_name": model_name, "engine": engine, "memory": memory}
    return REGISTRY.get_sample_value(name, labels)


def test_sums_over_layers_reach_the_registry(config):
    config.offload_config.experts.expert_provider = "pinned_hot"
    found = expert_residency.collect_expert_residency(config, OneWorker())
    expert_residency.remember_expert_residency(0, found)
    expert_residency.export_expert_residency(config)
    name = config.model_config.served_model_name
    assert value("vllm:expert_rows", "hot", name) == 7
    assert value("vllm:expert_rows", "cold", name) == 9
    assert value("vllm:expert_bytes", "hot", name) == 700
    assert value("vllm:expert_bytes", "cold", name) == 900
    assert value("vllm:expert_expected_cold_bytes", "cold", name) == 16


def test_stock_placement_asks_nobody_and_exports_nothing(config):
    executor = OneWorker()
    found = expert_residency.collect_expert_residency(config, executor)
    expert_residency.remember_expert_residency(0, found)
    expert_residency.export_expert_residency(config)
    assert found is None and executor.asked == 0
    assert not any("expert" in metric.name for metric in REGISTRY.collect())


def test_every_engine_has_its_own_sample(config):
    for engine in (0, 1):
        numbers = dict.fromkeys(("hot_rows", "cold_rows"), 1.0 + engine)
        numbers |= dict.fromkeys(
            ("hot_bytes", "cold_bytes", "expected_cold_bytes"), 0.0
        )
        expert_residency.remember_expert_residency(engine, numbers)
    expert_residency.export_expert_residency(config)
    name = config.model_config.served_model_name
    assert value("vllm:expert_rows", "hot", name, "0") == 1
    assert value("vllm:expert_rows", "hot", name, "1") == 2
