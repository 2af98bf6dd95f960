# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The expert profile file: round trip, merging, writers, and one clear error each."""

import json
import multiprocessing
import os
import time
from dataclasses import fields, replace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from vllm.model_executor.layers.fused_moe.expert_profile.profile_file import (
    METADATA_KEY,
    ExpertProfile,
    ExpertProfileError,
    add_to_profile,
    check_writable,
    merge_profiles,
    read_profile,
    write_profile,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import Fingerprint

NAMES = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
TOP_K = 2
NUM_WRITERS = 8


def draw(num_tokens, num_experts, rng):
    """Counts `(layers, num_experts)` of tokens that select different experts each."""
    counts = np.zeros((len(NAMES), num_experts), np.int64)
    for layer in counts:
        for _ in range(num_tokens):
            layer[rng.choice(num_experts, TOP_K, replace=False)] += 1
    return counts


def make_profile(num_experts=8, seed=0, **changes):
    rng = np.random.default_rng(seed)
    profile = ExpertProfile(
        fingerprint=Fingerprint(
            architecture="Qwen3MoeForCausalLM",
            num_experts=num_experts,
            top_k=TOP_K,
            hidden_size=64,
            moe_intermediate_size=96,
            num_moe_layers=len(NAMES),
            quantization=None,
        ),
        layer_names=NAMES,
        counts_prefill=draw(50, num_experts, rng),
        counts_decode=draw(7, num_experts, rng),
        tokens_prefill=50,
        tokens_decode=7,
        vllm_version="1.0",
        start="2026-01-01T00:00:00+00:00",
        end="2026-01-01T01:00:00+00:00",
        labels=("code",),
    )
    return replace(profile, **changes)


def assert_equal(a, b):
    for field in fields(ExpertProfile):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype == np.int64
            assert np.array_equal(left, right), field.name
        else:
            assert left == right, field.name


def save_changed(path, edit=lambda metadata: None, **tensors):
    """Write a valid profile's file with other metadata or tensors (None: left out)."""
    write_profile(make_profile(), path)
    with safe_open(path, framework="numpy") as stream:
        kept = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        metadata = json.loads(stream.metadata()[METADATA_KEY])
    edit(metadata)
    kept = {k: v for k, v in (kept | tensors).items() if v is not None}
    save_file(kept, path, metadata={METADATA_KEY: json.dumps(metadata)})


# C9: ids beyond a byte, and the last expert, survive.
@pytest.mark.parametrize("num_experts", [4, 128, 255, 256, 257, 384, 512])
@pytest.mark.parametrize("with_requests", [False, True])
def test_round_trip(tmp_path, num_experts, with_requests):
    profile = make_profile(num_experts)
    profile.counts_decode[:, num_experts - 1] += profile.counts_decode[:, 0]
    profile.counts_decode[:, 0] = 0
    if with_requests:
        split = np.stack([profile.counts_prefill, profile.counts_decode])
        profile = replace(profile, counts_request=split)
    path = tmp_path / "a.safetensors"
    write_profile(profile, path)
    read = read_profile(path)
    assert_equal(read, profile)
    assert read.tokens == 57 and read.counts.sum() == 57 * TOP_K * len(NAMES)
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_same_profile_same_bytes(tmp_path):
    for name in "ab":
        write_profile(make_profile(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_counts_beyond_32_bits(tmp_path):
    big = 1 << 40
    counts = np.full((2, 8), big, np.int64)
    profile = make_profile(counts_prefill=counts, tokens_prefill=4 * big)
    write_profile(profile, tmp_path / "a")
    add_to_profile(profile, tmp_path / "a")
    assert read_profile(tmp_path / "a").counts_prefill[1, 7] == 2 * big


def test_zero_traffic_is_a_valid_profile(tmp_path):
    zeros = np.zeros((2, 8), np.int64)
    empty = make_profile(
        counts_prefill=zeros, counts_decode=zeros, tokens_prefill=0, tokens_decode=0
    )
    write_profile(empty, tmp_path / "a")
    assert read_profile(tmp_path / "a").tokens == 0


def with_entry(value, index=(0, 0)):
    counts = make_profile().counts_prefill
    counts[index] = value
    return counts


def set_top(field, value):
    return lambda metadata: metadata.__setitem__(field, value)


def set_model(field, value):
    return lambda metadata: metadata["fingerprint"].__setitem__(field, value)


def one_expert():
    counts = np.zeros((2, 8), np.int64)
    counts[:, 3] = 50 * TOP_K
    return counts


# Each case: metadata edit, tensors, and what the message must name.
BAD = {
    "negative": (None, {"counts_prefill": with_entry(-1)}, ["[0, 0]", "-1", "below 0"]),
    "float": (
        None,
        {"counts_prefill": make_profile().counts_prefill.astype(np.float64)},
        ["counts_prefill", "F64", "int64"],
    ),
    "uint8": (
        None,
        {"counts_decode": make_profile().counts_decode.astype(np.uint8)},
        ["counts_decode", "U8", "int64"],
    ),
    "shape": (
        None,
        {"counts_decode": np.zeros((2, 7), np.int64)},
        ["counts_decode", "(2, 7)", "(2, 8)"],
    ),
    "one_dimension": (
        None,
        {"counts_decode": np.zeros(16, np.int64)},
        ["counts_decode", "(16,)", "(2, 8)"],
    ),
    "layer_lost": (
        None,
        {"counts_prefill": make_profile().counts_prefill[:1]},
        ["counts_prefill", "(1, 8)"],
    ),
    "lost_selections": (
        None,
        {"counts_prefill": with_entry(0, (1, 2))},
        ["counts_prefill", NAMES[1], "50 tokens × top_k 2 are 100"],
    ),
    "one_expert": (
        None,
        {"counts_prefill": one_expert()},
        [NAMES[0], "expert 3", "different ones"],
    ),
    "requests_differ": (
        None,
        {"counts_request": make_profile().counts_prefill[None]},
        ["counts_request", "the counts say"],
    ),
    "no_tensor": (None, {"counts_decode": None}, ["counts_decode", "missing"]),
    "extra_tensor": (
        None,
        {"counts_other": np.zeros(1, np.int64)},
        ["counts_other", "unknown"],
    ),
    "other_version": (set_top("version", 2), {}, ["version", "2 is not 1"]),
    "bool_version": (set_top("version", True), {}, ["version", "True is not 1"]),
    "no_version": (lambda m: m.pop("version"), {}, ["version", "required"]),
    "extra_field": (set_top("model", "x"), {}, ["model", "Extra"]),
    "no_fingerprint": (lambda m: m.pop("fingerprint"), {}, ["fingerprint"]),
    "no_layers": (set_top("layer_names", []), {}, ["layer_names"]),
    "layer_twice": (set_top("layer_names", NAMES[:1] * 2), {}, [NAMES[0], "twice"]),
    "layers_differ": (set_top("layer_names", NAMES[:1]), {}, ["1 layers", "is 2"]),
    "other_experts": (set_model("num_experts", 9), {}, ["(2, 8)", "(2, 9)"]),
    "other_top_k": (set_model("top_k", 3), {}, ["50 tokens × top_k 3 are 150"]),
    "no_experts": (set_model("num_experts", 0), {}, ["num_experts"]),
    "float_tokens": (set_top("tokens_decode", 7.0), {}, ["tokens_decode", "7.0"]),
    "bool_tokens": (set_top("tokens_decode", True), {}, ["tokens_decode", "True"]),
    "negative_tokens": (set_top("tokens_decode", -7), {}, ["tokens_decode", "-7"]),
    "no_time": (set_top("start", "yesterday"), {}, ["start", "'yesterday'"]),
    "local_time": (set_top("end", "2026-01-01T01:00:00"), {}, ["end", "UTC"]),
    "backwards": (set_top("end", "2025-01-01T00:00:00+00:00"), {}, ["end", "before"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_profile_is_one_clear_error(tmp_path, case):
    edit, tensors, named = BAD[case]
    path = tmp_path / "bad.safetensors"
    save_changed(path, edit or (lambda metadata: None), **tensors)
    with pytest.raises(ExpertProfileError) as error:
        read_profile(path)
    message = str(error.value)
    for word in [str(path), *named]:
        assert word in message
    assert "\n" not in message


def test_truncated_at_any_byte(tmp_path):
    path = tmp_path / "a"
    write_profile(make_profile(), path)
    whole = path.read_bytes()
    for size in [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ExpertProfileError, match="cannot be read as safetensors"):
            read_profile(path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ExpertProfileError, match="cannot be read"):
        read_profile(tmp_path / "absent")
    with pytest.raises(ExpertProfileError, match="cannot be read"):
        read_profile(tmp_path)
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "weights")
    with pytest.raises(ExpertProfileError, match="another kind of safetensors"):
        read_profile(tmp_path / "weights")
    for text in ["", "{", "[]", "3", '{"a": 1, "a": 2}', "null"]:
        save_file({"w": np.zeros(3)}, tmp_path / "b", metadata={METADATA_KEY: text})
        with pytest.raises(ExpertProfileError, match=METADATA_KEY):
            read_profile(tmp_path / "b")


def test_nothing_contradictory_is_written(tmp_path):
    with pytest.raises(ExpertProfileError, match="51 tokens"):
        write_profile(make_profile(tokens_prefill=51), tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_profile_of_another_model_names_the_field():
    other = make_profile().fingerprint.model_copy(update={"hidden_size": 128})
    with pytest.raises(ExpertProfileError, match="hidden_size is 64 in the profile"):
        make_profile().check_model(other, "some/path")
    make_profile().check_model(make_profile().fingerprint, "some/path")


def test_merge():
    a = make_profile(seed=1, overlay="x")
    b = make_profile(
        seed=2,
        layer_names=NAMES[::-1],
        labels=("prose", "code"),
        vllm_version="2.0",
        start="2025-12-31T23:00:00+00:00",
        end="2025-12-31T23:30:00+00:00",
    )
    merged = merge_profiles([a, b], ["a", "b"])
    merged.check("merged")
    assert np.array_equal(
        merged.counts_prefill, a.counts_prefill + b.counts_prefill[::-1]
    )
    assert np.array_equal(merged.counts_decode, a.counts_decode + b.counts_decode[::-1])
    assert (merged.tokens_prefill, merged.tokens_decode) == (100, 14)
    assert merged.layer_names == NAMES and merged.labels == ("code", "prose")
    assert (merged.start, merged.end) == (b.start, a.end)
    assert merged.vllm_version == "1.0, 2.0" and merged.overlay == "x"
    assert np.array_equal(a.counts_prefill, make_profile(seed=1).counts_prefill)


def test_merge_keeps_requests_only_if_all_have_them():
    a = make_profile(seed=1)
    a = replace(a, counts_request=np.stack([a.counts_prefill, a.counts_decode]))
    both = merge_profiles([a, a], ["a", "a"])
    both.check("merged")
    assert both.counts_request.shape == (4, 2, 8)
    one = merge_profiles([a, make_profile()], ["a", "b"])
    one.check("merged")
    assert one.counts_request is None


@pytest.mark.parametrize(
    "other,named",
    [
        (make_profile(num_experts=9), "num_experts is 9"),
        (make_profile(layer_names=("x", NAMES[1])), "'x'"),
    ],
)
def test_merge_refuses_another_model(other, named):
    with pytest.raises(ExpertProfileError, match=f"profile b: .*{named}"):
        merge_profiles([make_profile(), other], ["a", "b"])


def test_unwritable_paths(tmp_path):
    for path in [tmp_path / "absent" / "a", tmp_path / ("n" * 300), tmp_path]:
        with pytest.raises(ExpertProfileError) as error:
            check_writable(path)
        assert str(path) in str(error.value)
    check_writable(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "text").write_text("not a profile")
    with pytest.raises(ExpertProfileError, match="cannot be read"):
        check_writable(tmp_path / "text")


def test_adding_to_another_models_file_leaves_it(tmp_path):
    path = tmp_path / "a"
    write_profile(make_profile(num_experts=9), path)
    before = path.read_bytes()
    with pytest.raises(ExpertProfileError, match="num_experts"):
        add_to_profile(make_profile(), path)
    assert path.read_bytes() == before


def add_often(path, times, start, added):
    start.wait()
    for _ in range(times):
        add_to_profile(make_profile(), path)
        added.value += 1


def start_writers(path, count, times):
    context = multiprocessing.get_context("fork")
    start, added = context.Event(), context.RawValue("q", 0)
    writers = [
        context.Process(target=add_often, args=(path, times, start, added))
        for _ in range(count)
    ]
    for writer in writers:
        writer.start()
    start.set()
    return writers, added


# C14: 8 processes lose nothing.
def test_many_writers_lose_nothing(tmp_path):
    path, times = tmp_path / "a.safetensors", 5
    writers, _ = start_writers(path, NUM_WRITERS, times)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    read = read_profile(path)
    assert read.tokens_prefill == 50 * NUM_WRITERS * times
    expected = make_profile().counts_prefill * NUM_WRITERS * times
    assert np.array_equal(read.counts_prefill, expected)


# C14: a writer killed at any moment leaves a whole file, and the next one goes on.
def test_killed_writer_leaves_a_whole_file(tmp_path):
    path = tmp_path / "a.safetensors"
    before = 0
    for delay in (0, 0.001, 0.003, 0.01, 0.02):
        [writer], added = start_writers(path, 1, 10**6)
        while not added.value:
            time.sleep(0.0005)
        time.sleep(delay)
        writer.kill()
        writer.join()
        # What was reported is in; what was under way is in wholly or not at all.
        now = read_profile(path).tokens_prefill // 50
        assert before + added.value <= now <= before + added.value + 1
        before = now
    add_to_profile(make_profile(), path)
    assert read_profile(path).tokens_prefill == 50 * (before + 1)
