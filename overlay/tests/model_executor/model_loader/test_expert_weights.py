# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The loader calls expert providers at the right moments, the default at none."""

import pytest
import torch

from tests.kernels.moe.expert_provider_utils import (
    LAYER_NAMES,
    build_layer,
    engine_config,
    fill,
    single_rank,
    write_model,
)
from vllm.config.expert_provider import ExpertProviderConfig
from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
    ExpertResidency,
    ExpertWeightProvider,
    expert_provider_class,
    register_expert_provider,
)
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.expert_weights import (
    attach_expert_weights,
    bind_expert_providers,
)

THIS = "tests.model_executor.model_loader.test_expert_weights"


class RecordingProvider(ExpertWeightProvider):
    """Writes down what it is asked."""

    name = "recording"
    calls: list[tuple[str, str]] = []
    refuse: str | None = None

    def stage(self, layer):
        # The parameters exist; none of them holds a weight yet.
        assert layer.w13_weight.shape[0] == layer.local_num_experts
        self.calls.append(("stage", self.layer_name))

    def check(self, layer):
        self.calls.append(("check", self.layer_name))
        return self.refuse

    def attach(self, layer):
        # Post-processing is over: the kernel exists.
        assert layer.quant_method.moe_kernel is not None
        self.calls.append(("attach", self.layer_name))

    def residency(self):
        return ExpertResidency(hot_rows=1, cold_rows=2, hot_bytes=3, cold_bytes=4)


@pytest.fixture
def recording(monkeypatch):
    register_expert_provider("recording", f"{THIS}:RecordingProvider")
    # By name, since the runner may have imported this file under another one.
    cls = expert_provider_class("recording")
    monkeypatch.setattr(cls, "calls", [])
    # The CPU worker does the same: there is no allocator to empty.
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    return cls


def recording_config(tmp_path):
    config = engine_config(write_model(tmp_path / "model"))
    config.offload_config.experts = ExpertProviderConfig(expert_provider="recording")
    return config


def test_every_layer_is_bound_before_and_attached_after_its_weights(
    recording, tmp_path
):
    config = recording_config(tmp_path)
    with single_rank(config, tmp_path):
        get_model(vllm_config=config)
    assert recording.calls == [
        (step, name) for step in ("stage", "check", "attach") for name in LAYER_NAMES
    ]


def test_refused_layer_is_an_error_that_names_it(recording, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "refuse", "its rows are round")
    config = recording_config(tmp_path)
    with (
        single_rank(config, tmp_path),
        pytest.raises(ValueError, match="recording cannot serve layer") as error,
    ):
        get_model(vllm_config=config)
    assert LAYER_NAMES[0] in str(error.value)
    assert "its rows are round" in str(error.value)
    assert ("attach", LAYER_NAMES[0]) not in recording.calls


def test_default_touches_nothing(tmp_path):
    config = engine_config(write_model(tmp_path / "model"))
    with single_rank(config, tmp_path):
        layer = build_layer()
        fill(layer)
        layer.quant_method.process_weights_after_loading(layer)
        before = {n: (p, p.data_ptr()) for n, p in layer.named_parameters()}
        model = torch.nn.ModuleList([layer])
        bind_expert_providers(model, config, config.model_config)
        attach_expert_weights(layer)
        after = {n: (p, p.data_ptr()) for n, p in layer.named_parameters()}
    assert before.keys() == after.keys()
    for name, (parameter, pointer) in before.items():
        assert after[name][0] is parameter and after[name][1] == pointer


def test_modules_without_provider_are_left_alone():
    attach_expert_weights(torch.nn.Linear(2, 2))
