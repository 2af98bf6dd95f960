# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The expert provider flags: defaults, values, and flags without effect."""

from dataclasses import fields

import pytest

from tests.kernels.moe.expert_provider_utils import engine_config, write_model
from vllm.config.expert_provider import ExpertProviderConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
    ResidentProvider,
    register_expert_provider,
)
from vllm.utils.argparse_utils import FlexibleArgumentParser

FLAGS = tuple(field.name for field in fields(ExpertProviderConfig))


@pytest.fixture
def parser():
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


def test_defaults_are_stock(parser):
    args = EngineArgs.from_cli_args(parser.parse_args([]))
    assert {name: getattr(args, name) for name in FLAGS} == {
        "expert_provider": "resident",
        "expert_map": None,
        "expert_layout": "auto",
        "expert_split_mode": "auto",
        "expert_hbm_gib": None,
        "expert_keep_kv_tokens": None,
        "expert_cold_tier": "host",
        "expert_cold_dir": None,
    }


def test_flags_reach_the_arguments(parser):
    argv = ["--expert-provider", "pinned_hot", "--expert-map", "/m.json"]
    argv += ["--expert-layout", "split", "--expert-split-mode", "staged"]
    argv += ["--expert-hbm-gib", "auto"]
    argv += ["--expert-keep-kv-tokens", "4096", "--expert-cold-tier", "peer:1"]
    argv += ["--expert-cold-dir", "/cold"]
    args = EngineArgs.from_cli_args(parser.parse_args(argv))
    assert [str(getattr(args, name)) for name in FLAGS] == argv[1::2]


@pytest.mark.parametrize(
    "option,value",
    [
        ("expert_hbm_gib", "much"),
        ("expert_hbm_gib", "-1"),
        ("expert_hbm_gib", "inf"),
        ("expert_hbm_gib", "nan"),
        ("expert_keep_kv_tokens", 0),
        ("expert_cold_tier", "disk"),
        ("expert_cold_tier", "peer:x"),
    ],
)
def test_value_that_means_nothing_is_an_error(tmp_path, option, value):
    flag = "--" + option.replace("_", "-")
    with pytest.raises(ValueError, match=f"{flag} {value}: n"):
        engine_config(write_model(tmp_path / "model"), **{option: value})


def test_size_may_be_a_number():
    assert ExpertProviderConfig(expert_hbm_gib=1.5).expert_hbm_gib == "1.5"


def test_layout_is_a_closed_list(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--expert-layout", "rows"])
    assert "range" in capsys.readouterr().err


def test_default_engine_config_has_the_default_provider(tmp_path):
    config = engine_config(write_model(tmp_path / "model"))
    assert config.offload_config.experts == ExpertProviderConfig()


@pytest.mark.parametrize(
    "option,value",
    [
        ("expert_map", "/m.json"),
        ("expert_layout", "range"),
        ("expert_hbm_gib", "1"),
        ("expert_keep_kv_tokens", 16),
        ("expert_cold_tier", "peer:1"),
        ("expert_cold_dir", "/cold"),
    ],
)
def test_option_without_effect_is_an_error(tmp_path, option, value):
    flag = "--" + option.replace("_", "-")
    with pytest.raises(ValueError, match=f"{flag} has no effect") as error:
        engine_config(write_model(tmp_path / "model"), **{option: value})
    assert "--expert-provider pinned_hot" in str(error.value)


class RefusingProvider(ResidentProvider):
    """A plugin's provider that has an opinion about the whole configuration."""

    name = "refusing"

    @classmethod
    def validate(cls, vllm_config):
        raise ValueError(f"no map for {vllm_config.model_config.model}")


def test_plugin_provider_is_chosen_by_the_flag(tmp_path):
    register_expert_provider("refusing", RefusingProvider)
    model = write_model(tmp_path / "model")
    with pytest.raises(ValueError, match=f"no map for {model}"):
        engine_config(model, expert_provider="refusing")
