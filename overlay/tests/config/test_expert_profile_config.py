# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Options of expert profiles: defaults, compile-cache keys, options without effect."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from vllm.config import ObservabilityConfig, VllmConfig
from vllm.config.expert_profile import ExpertProfileConfig


def hashed(**options):
    profile = ExpertProfileConfig(**options)
    return ObservabilityConfig(expert_profile=profile).compute_hash()


def test_default_records_nothing():
    assert ObservabilityConfig().expert_profile == ExpertProfileConfig()
    assert ExpertProfileConfig().expert_profile_out is None


# A16: counting is in the graph, where the counts go is not.
def test_compile_cache_key_follows_what_can_change_a_graph():
    off = hashed()
    on = hashed(expert_profile_out="/a")
    assert off == ObservabilityConfig().compute_hash() != on
    assert on == hashed(expert_profile_out="/b", expert_profile_label="x")
    assert on == hashed(expert_profile_out="/a", expert_profile_interval=1)


@pytest.mark.parametrize("interval", [0, -1, "soon"])
def test_interval_must_be_positive(interval):
    with pytest.raises(ValidationError, match="expert_profile_interval"):
        ExpertProfileConfig(expert_profile_interval=interval)


@pytest.mark.parametrize(
    "option,value", [("expert_profile_interval", 5), ("expert_profile_label", "code")]
)
def test_option_without_effect_is_an_error(option, value):
    config = ExpertProfileConfig(**{option: value})
    flag = "--" + option.replace("_", "-")
    with pytest.raises(ValueError, match=f"{flag} has no effect") as error:
        config.validate_engine(VllmConfig())
    assert "--expert-profile-out PATH" in str(error.value)


def test_default_imports_nothing():
    code = (
        "import sys; import vllm.model_executor.expert_routes as routes;"
        "from vllm.config import VllmConfig; c = VllmConfig();"
        "p = c.observability_config.expert_profile; p.validate_engine(c);"
        "routes.bind_route_recorder(None, c, None); routes.begin_routes(*[None] * 4);"
        "routes.end_routes(None);"
        "print([m for m in sys.modules if 'fused_moe.expert_profile' in m])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
