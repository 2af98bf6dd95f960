# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The expert profile flags: values, and what is refused before weights load."""

from types import SimpleNamespace

import pytest

from tests.kernels.moe.expert_provider_utils import engine_config, write_model
from tests.kernels.moe.test_expert_profile_file import make_profile
from vllm.config.expert_profile import ExpertProfileConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.expert_profile.admission import admit_engine
from vllm.model_executor.layers.fused_moe.expert_profile.profile_file import (
    write_profile,
)
from vllm.utils.argparse_utils import FlexibleArgumentParser

FLAGS = ("expert_profile_out", "expert_profile_interval", "expert_profile_label")


@pytest.fixture
def parser():
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


def test_defaults_are_stock(parser, tmp_path):
    args = EngineArgs.from_cli_args(parser.parse_args([]))
    assert [getattr(args, name) for name in FLAGS] == [None, 60.0, None]
    config = engine_config(write_model(tmp_path / "model"))
    assert config.observability_config.expert_profile == ExpertProfileConfig()
    assert config.shutdown_timeout == 0


def test_flags_reach_the_config(parser, tmp_path):
    out = str(tmp_path / "a")
    argv = ["--expert-profile-out", out, "--expert-profile-interval", "2.5"]
    argv += ["--expert-profile-label", "code"]
    args = EngineArgs.from_cli_args(parser.parse_args(argv))
    values = {name: getattr(args, name) for name in FLAGS}
    assert list(values.values()) == [out, 2.5, "code"]
    config = engine_config(write_model(tmp_path / "model"), **values)
    profile = config.observability_config.expert_profile
    assert [getattr(profile, name) for name in FLAGS] == [out, 2.5, "code"]
    # A server that is told to stop must have the time to write.
    assert config.shutdown_timeout == 5


def test_shutdown_timeout_of_the_user_is_kept(tmp_path):
    config = engine_config(
        write_model(tmp_path / "model"),
        expert_profile_out=str(tmp_path / "a"),
        shutdown_timeout=90,
    )
    assert config.shutdown_timeout == 90


# C13
def test_model_without_experts_is_refused(tmp_path):
    dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    model = write_model(tmp_path / "model", num_experts=0, **dense)
    with pytest.raises(ValueError, match="no MoE layers. Drop the flag"):
        engine_config(model, expert_profile_out=str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()


def set_in(group, field, value):
    def change(config):
        setattr(getattr(config, group) if group else config, field, value)

    return change


REFUSED = {
    "--enable-sleep-mode": set_in("model_config", "enable_sleep_mode", True),
    "--enable-return-routed-experts": set_in(
        "aux_output_config", "enable_return_routed_experts", True
    ),
    "--enable-dbo": set_in("parallel_config", "enable_dbo", True),
    "--ubatch-size": set_in("parallel_config", "ubatch_size", 2),
    "context-parallel": set_in("parallel_config", "prefill_context_parallel_size", 2),
    "--enable-elastic-ep": set_in("parallel_config", "enable_elastic_ep", True),
    "--kv-sharing-fast-prefill": set_in(
        "cache_config", "kv_sharing_fast_prefill", True
    ),
}


@pytest.mark.parametrize("named", REFUSED)
def test_engine_that_cannot_be_counted(tmp_path, named):
    config = engine_config(write_model(tmp_path / "model"))
    admit_engine(str(tmp_path / "a"), config)
    REFUSED[named](config)
    with pytest.raises(ValueError, match=f"--expert-profile-out: .*{named}"):
        admit_engine(str(tmp_path / "a"), config)


def test_adaptive_verification_is_refused(tmp_path):
    config = engine_config(write_model(tmp_path / "model"))
    config.speculative_config = SimpleNamespace(enable_adaptive_verification=True)
    with pytest.raises(ValueError, match="--speculative-config"):
        admit_engine(str(tmp_path / "a"), config)


def test_sequence_parallel_experts_are_refused(tmp_path):
    config = engine_config(write_model(tmp_path / "model"))
    config.parallel_config.enable_expert_parallel = True
    config.parallel_config.tensor_parallel_size = 2
    config.parallel_config.data_parallel_size = 2
    assert config.parallel_config.use_sequence_parallel_moe
    with pytest.raises(ValueError, match="sequence-parallel"):
        admit_engine(str(tmp_path / "a"), config)


def test_unwritable_path_is_refused(tmp_path):
    model = write_model(tmp_path / "model")
    for path in [tmp_path / "absent" / "a", tmp_path]:
        with pytest.raises(ValueError, match=f"expert profile {path}: file"):
            engine_config(model, expert_profile_out=str(path))


# C14: a file of another model is not added to, and not overwritten.
def test_profile_of_another_model_is_refused(tmp_path):
    model = write_model(tmp_path / "model")
    path = tmp_path / "a"
    write_profile(make_profile(), path)
    engine_config(model, expert_profile_out=str(path))
    write_profile(make_profile(num_experts=9), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="num_experts is 9 in the profile and 8"):
        engine_config(model, expert_profile_out=str(path))
    assert path.read_bytes() == before


# A16
def test_compile_cache_key_of_an_engine(tmp_path):
    model = write_model(tmp_path / "model")
    off = engine_config(model).compute_hash()
    one, two = (
        engine_config(model, expert_profile_out=str(tmp_path / name)).compute_hash()
        for name in ("one", "two")
    )
    assert off != one == two
