# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The provider seam: registry, the default provider, and where it is called."""

import pytest

from tests.kernels.moe.expert_provider_utils import (
    LAYER_NAMES,
    build_layer,
    engine_config,
    single_rank,
    write_model,
)
from vllm.config.expert_provider import ExpertProviderConfig
from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
    ExpertResidency,
    ExpertWeightProvider,
    ResidentProvider,
    create_expert_provider,
    describe_residency,
    expert_provider_class,
    format_bytes,
    register_expert_provider,
)

THIS = "tests.kernels.moe.test_expert_weight_provider"


class StagingProvider(ExpertWeightProvider):
    """What a third party ships: a class, and one call to register it."""

    name = "staging"
    staged: list[str] = []

    def stage(self, layer):
        # The parameters exist; none of them holds a weight yet.
        assert layer.w13_weight.shape[0] == layer.local_num_experts
        self.staged.append(self.layer_name)

    def check(self, layer):
        return None

    def attach(self, layer):
        return None

    def residency(self):
        return None


def test_registered_provider_stages_the_layers_it_is_chosen_for(tmp_path):
    register_expert_provider("staging", f"{THIS}:StagingProvider")
    # By name, since the runner may have imported this file under another one.
    cls = expert_provider_class("staging")
    cls.staged.clear()
    config = engine_config(write_model(tmp_path / "model"))
    config.offload_config.experts = ExpertProviderConfig(expert_provider="staging")
    with single_rank(config, tmp_path):
        layers = [build_layer(name) for name in LAYER_NAMES]
    assert cls.staged == list(LAYER_NAMES)
    assert all(isinstance(layer.expert_provider, cls) for layer in layers)


def test_unknown_provider_lists_the_known_ones():
    with pytest.raises(ValueError, match="'pined_hot' is unknown.*resident"):
        expert_provider_class("pined_hot")


def test_name_cannot_be_taken_twice():
    register_expert_provider("staging", f"{THIS}:StagingProvider")
    register_expert_provider("staging", f"{THIS}:StagingProvider")
    with pytest.raises(ValueError, match="registered already"):
        register_expert_provider("staging", "elsewhere:Provider")
    with pytest.raises(ValueError, match="registered already"):
        register_expert_provider("resident", StagingProvider)


def test_default_provider_is_resident(tmp_path):
    config = engine_config(write_model(tmp_path / "model"))
    with single_rank(config, tmp_path):
        layer = build_layer()
    assert type(layer.expert_provider) is ResidentProvider
    assert layer.expert_provider.residency() is None


def test_layer_outside_an_engine_is_resident():
    assert type(create_expert_provider("x")) is ResidentProvider


def test_residency_of_a_model():
    there = {
        "layout": "layout range",
        "memories": ("HBM", "host memory"),
        "cold_bytes_per_s": 50e9,
    }
    layers = [
        ExpertResidency(24, 8, 3 << 30, 1 << 20, 1 << 20, 0.01, 1e6, **there),
        ExpertResidency(24, 8, 1 << 30, 1 << 20, 1 << 20, 0.03, 4e6, **there),
    ]
    assert describe_residency(layers).split("\n    ") == [
        "2 layers, layout range",
        "48 rows hot: 4.00 GiB in HBM, 2.00 MiB of them parts of cold rows",
        "16 rows cold: 2.00 MiB in host memory",
        (
            "2.00% of the profiled selections are cold, 4.77 MiB a token or 0.10 ms at "
            "50.0 GB/s"
        ),
    ]


def test_residency_without_a_profile():
    assert describe_residency([ExpertResidency(1, 0, 1 << 20, 0)]).split("\n    ") == [
        "1 layers",
        "1 rows hot: 1.00 MiB in fast memory",
        "0 rows cold: 0.00 MiB in slower memory",
    ]


@pytest.mark.parametrize(
    "num_bytes,text",
    [(0, "0.00 MiB"), (1 << 19, "0.50 MiB"), (3 << 29, "1.50 GiB")],
)
def test_sizes_for_people(num_bytes, text):
    assert format_bytes(num_bytes) == text
