# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The engine's writer: what is added when, merging of stages, and failures."""

import logging

import numpy as np
import pytest

from tests.kernels.moe.expert_provider_utils import (
    LAYER_NAMES,
    NUM_EXPERTS,
    TOP_K,
    engine_config,
    write_model,
)
from vllm.model_executor.layers.fused_moe.expert_profile.profile_file import (
    ExpertProfileError,
    read_profile,
)
from vllm.model_executor.layers.fused_moe.expert_profile.recorder import (
    RecordedRoutes,
    read_routes,
)
from vllm.v1.engine.expert_profile import create_expert_profile_writer, merge_stages


class Workers:
    """Ranks of an engine that have counted what a test says."""

    def __init__(self, num_ranks=1):
        self.tokens = [0, 0]
        self.counts = np.zeros((len(LAYER_NAMES), 2, NUM_EXPERTS), np.int64)
        self.num_ranks = num_ranks
        self.error = None
        self.timeouts = []

    def serve(self, prefill, decode, seed=0):
        rng = np.random.default_rng(seed)
        for phase, tokens in enumerate((prefill, decode)):
            self.tokens[phase] += tokens
            for layer in self.counts:
                for _ in range(tokens):
                    layer[phase, rng.choice(NUM_EXPERTS, TOP_K, replace=False)] += 1

    def collective_rpc(self, method, timeout=None):
        assert method is read_routes
        self.timeouts.append(timeout)
        if self.error:
            raise self.error
        parts = np.array_split(np.arange(len(LAYER_NAMES)), self.num_ranks)
        return [
            RecordedRoutes(
                tuple(LAYER_NAMES[i] for i in part),
                self.counts[part].copy(),
                tuple(self.tokens),
            )
            for part in parts
        ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "profile.safetensors"


@pytest.fixture
def log(caplog):
    """What vLLM's logger, which does not propagate, says."""
    logging.getLogger("vllm").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("vllm").removeHandler(caplog.handler)


def writer_of(workers, path, **options):
    config = engine_config(
        write_model(path.parent / "model"), expert_profile_out=str(path), **options
    )
    return create_expert_profile_writer(config, workers)


def test_without_a_path_there_is_no_writer(tmp_path):
    config = engine_config(write_model(tmp_path / "model"))
    assert create_expert_profile_writer(config, Workers()) is None


def test_each_write_adds_what_is_new(path):
    workers = Workers(num_ranks=2)
    writer = writer_of(workers, path, expert_profile_label="code")
    workers.serve(40, 3)
    assert writer.write() == {"tokens_prefill": 40, "tokens_decode": 3}
    assert read_profile(path).tokens == 43
    first = path.stat().st_mtime_ns
    assert writer.write() == {"tokens_prefill": 0, "tokens_decode": 0}
    assert path.stat().st_mtime_ns == first
    workers.serve(5, 6, seed=1)
    writer.close()
    read = read_profile(path)
    assert (read.tokens_prefill, read.tokens_decode) == (45, 9)
    assert np.array_equal(read.counts_prefill, workers.counts[:, 0])
    assert np.array_equal(read.counts_decode, workers.counts[:, 1])
    assert read.layer_names == LAYER_NAMES and read.labels == ("code",)
    assert read.fingerprint.num_moe_layers == 2 and read.top_k == TOP_K


# C5: some runners warm up with batches that look real.
def test_what_came_before_serving_is_not_written(path, log):
    workers = Workers()
    workers.serve(100, 100)
    writer = writer_of(workers, path)
    assert writer.write() == {"tokens_prefill": 0, "tokens_decode": 0}
    read = read_profile(path)
    assert read.tokens == 0 and read.counts.sum() == 0
    assert "No token has passed" in log.text


def test_two_engines_add_to_one_file(path):
    """C11: data-parallel engines give the sum."""
    workers = [Workers(), Workers()]
    writers = [writer_of(w, path) for w in workers]
    for seed, w in enumerate(workers):
        w.serve(10 + seed, 1, seed)
    for writer in writers:
        writer.close()
    expected = workers[0].counts + workers[1].counts
    read = read_profile(path)
    assert (read.tokens_prefill, read.tokens_decode) == (21, 2)
    assert np.array_equal(read.counts, expected.sum(axis=1))


def test_interval(path):
    workers = Workers()
    writer = writer_of(workers, path, expert_profile_interval=0.2)
    asked = len(workers.timeouts)
    for _ in range(50):
        writer.write_if_due()
    assert len(workers.timeouts) == asked
    workers.serve(1, 0)
    writer._due = 0.0
    for _ in range(50):
        writer.write_if_due()
    assert len(workers.timeouts) == asked + 1
    assert read_profile(path).tokens == 1


def test_failed_write_is_made_up_for(path, log):
    workers = Workers()
    writer = writer_of(workers, path)
    workers.serve(10, 0)
    path.mkdir()  # whatever makes writing impossible
    with pytest.raises(ExpertProfileError, match="cannot be"):
        writer.write()
    writer._due = 0.0
    writer.write_if_due()
    assert "may lack the traffic" in log.text
    path.rmdir()
    workers.serve(5, 0, seed=1)
    writer.close()
    assert read_profile(path).tokens == 15


def test_lost_selections_are_an_error(path):
    """C2: tokens that a layer did not select experts for."""
    workers = Workers()
    writer = writer_of(workers, path)
    workers.serve(10, 0)
    workers.counts[1, 0] = 0
    with pytest.raises(ExpertProfileError, match=f"{LAYER_NAMES[1]} has 0 selections"):
        writer.write()
    assert not path.exists()


def test_workers_that_are_gone_do_not_hold_up_the_end(path, log):
    workers = Workers()
    writer = writer_of(workers, path)
    workers.error = RuntimeError("Executor failed.")
    writer.begin_shutdown()
    writer.close()
    assert workers.timeouts[-2:] == [2.0, 2.0]
    assert log.text.count("Executor failed") == 2


def test_stages_must_have_passed_the_same_tokens():
    rank = Workers(num_ranks=2).collective_rpc(read_routes)
    later = RecordedRoutes(rank[1].layer_names, rank[1].counts, (7, 1))
    with pytest.raises(ValueError, match=r"\[\(0, 0\), \(7, 1\)\]"):
        merge_stages([rank[0], None, later, None])
    merged = merge_stages([rank[0], None, rank[1], None])
    assert merged.layer_names == LAYER_NAMES and merged.counts.shape == (2, 2, 8)
