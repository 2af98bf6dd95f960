# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Importing counts: exact sums, and one clear error for every damaged recording."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.kernels.moe.expert_profile_utils import (
    count_routes,
    draw_routes,
    layer_names,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponse,
    CompletionResponseChoice,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.model_executor.layers.fused_moe.expert_profile.errors import ExpertPlanError
from vllm.model_executor.layers.fused_moe.expert_profile.importers import (
    Layout,
    RecordingError,
    Request,
    count_loads,
    count_requests,
    layer_columns,
    layer_index,
    read_arrays,
    read_csv,
    read_requests,
)
from vllm.utils.serial_utils import numpy2base64

LAYERS, TOP_K = 3, 2


def layout(experts=16, layers=LAYERS, top_k=TOP_K):
    return Layout(experts, top_k, layer_names(layers), tuple(range(layers)))


def routes_of(experts=16, tokens=30, seed=0, dtype=np.uint8):
    return draw_routes(tokens, seed, LAYERS, experts, TOP_K, 1.0).astype(dtype)


def requests(*arrays, **known):
    return [Request("r", array, known.get("prompt_rows")) for array in arrays]


def response(array, prompt, completion, cached=None, choices=None):
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "choices": [
            {"routed_experts": numpy2base64(one)} for one in choices or [array]
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": details,
        },
    }


def write_jsonl(path, *responses):
    path.write_text("".join(json.dumps(one) + "\n" for one in responses))
    return path


@pytest.mark.parametrize("experts", (128, 255, 256, 257, 384, 512))
def test_c9_last_expert_survives_every_dtype(experts):
    dtype = np.uint8 if experts <= 256 else np.uint16
    routes = routes_of(experts, dtype=np.int64)
    routes[5] = [[experts - 1, 0]] * LAYERS
    found = count_requests(requests(routes.astype(dtype)), layout(experts), "decode")
    assert (found.decode == count_routes(routes, experts)).all()
    assert found.decode[:, experts - 1].min() >= 1
    assert found.padding == 0


def test_c9_dtypes_are_mixed():
    routes = routes_of(200, dtype=np.int64)
    parts = routes[:10].astype(np.uint8), routes[10:20].astype(np.uint16), routes[20:]
    found = count_requests(requests(*parts), layout(200), "decode")
    assert (found.decode == count_routes(routes, 200)).all()
    assert len(found.requests) == 3 and (sum(found.requests) == found.decode).all()


@pytest.mark.parametrize(
    "experts,dtype",
    (
        (16, torch.uint8),
        (256, torch.uint8),
        (257, torch.uint16),
        (384, torch.int32),
        (16, torch.int64),
    ),
)
def test_c4_padding_is_never_an_expert(experts, dtype):
    """As the capture does: -1 in an int32 buffer, then the narrowest dtype."""
    routes = routes_of(experts, dtype=np.int32)
    buffer = torch.full((35, LAYERS, TOP_K), -1, dtype=torch.int32)
    buffer[:30] = torch.tensor(routes)
    padded = buffer.to(dtype).numpy()
    found = count_requests(requests(padded), layout(experts), "prefill")
    assert (found.prefill == count_routes(routes, experts)).all()
    assert found.padding == 5


@pytest.mark.parametrize(
    "change,words",
    (
        (lambda r: r.__setitem__((4, 1, 0), 255), ["selects 255", "0 … 15"]),
        (lambda r: r.__setitem__((4, 1, 0), 16), ["selects 16"]),
        (lambda r: r.__setitem__((4, 1), [3, 3]), ["token 4", "[3, 3]", "twice"]),
        (lambda r: r.__setitem__((slice(None), 1), 0), ["every token", "expert 0"]),
    ),
    ids=("half_padding", "out_of_range", "duplicate", "c2_bypassed_layer"),
)
def test_c2_c4_damaged_routes(change, words):
    routes = routes_of()
    change(routes)
    with pytest.raises(RecordingError) as error:
        count_requests(requests(routes), layout(), "decode")
    for word in ["r: routed_experts", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "array", (np.zeros((4, 3), np.uint8), np.zeros((4, 3, 4), np.uint8),
              np.zeros((4, 3, 2), np.float32), np.zeros((4, 2, 2), np.uint8))
)  # fmt: skip
def test_wrong_shape_or_dtype(array):
    with pytest.raises(RecordingError):
        count_requests(requests(array), layout(), "decode")


def test_c3_empty_recording_is_an_error():
    for routes in (np.zeros((0, LAYERS, TOP_K), np.uint8), routes_of()[:0]):
        with pytest.raises(RecordingError, match="no token was routed"):
            count_requests(requests(routes), layout(), "decode")
    with pytest.raises(RecordingError, match="no token was routed"):
        count_requests([], layout(), "decode")


def test_c3_response_without_routes_is_an_error(tmp_path):
    good, bad = response(routes_of(), 10, 21), response(routes_of(), 10, 21)
    bad["choices"][0]["routed_experts"] = None
    path = write_jsonl(tmp_path / "r.jsonl", good, bad)
    with pytest.raises(RecordingError) as error:
        count_requests(read_requests(path), layout(), "decode")
    assert f"{path}:2" in str(error.value)
    assert "--enable-return-routed-experts" in str(error.value)


def test_c8_rows_of_a_response_are_divided_at_the_prompt(tmp_path):
    """The last token has no row; max_tokens=1 has prompt rows only."""
    one, two = routes_of(tokens=30), routes_of(tokens=12, seed=1)
    path = write_jsonl(
        tmp_path / "r.jsonl", response(one, 10, 21), response(two, 12, 1)
    )
    found = count_requests(read_requests(path), layout(), "decode")
    prompts = np.concatenate([one[:10], two])
    assert (found.prefill == count_routes(prompts, 16)).all()
    assert (found.decode == count_routes(one[10:], 16)).all()


def test_response_of_the_api_server_is_read(tmp_path):
    """Built from the server's own classes, for completions and for chat."""
    routes = routes_of(tokens=30)
    usage = UsageInfo(prompt_tokens=10, completion_tokens=21, total_tokens=31)
    encoded = numpy2base64(routes)
    completion = CompletionResponse(
        model="m",
        choices=[CompletionResponseChoice(index=0, text="", routed_experts=encoded)],
        usage=usage,
    )
    chat = ChatCompletionResponse(
        model="m",
        choices=[
            ChatCompletionResponseChoice(
                index=0,
                message=ChatMessage(role="assistant", content=""),
                routed_experts=encoded,
            )
        ],
        usage=usage,
    )
    path = tmp_path / "r.jsonl"
    path.write_text(f"{completion.model_dump_json()}\n{chat.model_dump_json()}\n")
    found = count_requests(read_requests(path), layout(), "decode")
    assert (found.prefill == 2 * count_routes(routes[:10], 16)).all()
    assert (found.decode == 2 * count_routes(routes[10:], 16)).all()


def test_c7_cached_prompt_tokens_read_no_experts(tmp_path):
    routes = routes_of(tokens=30)
    path = write_jsonl(tmp_path / "r.jsonl", response(routes, 20, 11, cached=16))
    found = count_requests(read_requests(path), layout(), "decode")
    assert (found.prefill == count_routes(routes[16:20], 16)).all()
    assert (found.decode == count_routes(routes[20:], 16)).all()
    assert found.cached == 16


def test_prompt_start_leaves_rows_out(tmp_path):
    routes = routes_of(tokens=30)
    path = write_jsonl(tmp_path / "r.jsonl", response(routes[8:], 20, 11))
    found = count_requests(read_requests(path), layout(), "decode")
    assert (found.prefill == count_routes(routes[8:20], 16)).all()
    assert (found.decode == count_routes(routes[20:], 16)).all()


def test_answers_that_share_a_prompt_count_it_once(tmp_path):
    prompt = routes_of(tokens=8)
    answers = [np.concatenate([prompt, routes_of(tokens=t, seed=t)]) for t in (4, 7)]
    path = write_jsonl(tmp_path / "r.jsonl", response(None, 8, 13, choices=answers))
    found = count_requests(read_requests(path), layout(), "decode")
    assert (found.prefill == count_routes(prompt, 16)).all()
    decoded = np.concatenate([one[8:] for one in answers])
    assert (found.decode == count_routes(decoded, 16)).all()


@pytest.mark.parametrize(
    "text,word",
    (
        ("{", "not valid JSON"),
        ('{"choices": []}', "choices"),
        ("3", "choices"),
        ('{"choices": [{"routed_experts": "%%"}]}', "base64"),
    ),
)
def test_damaged_responses(tmp_path, text, word):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(RecordingError) as error:
        count_requests(read_requests(path), layout(), "decode")
    assert word in str(error.value) and f"{path}:1" in str(error.value)


def test_too_many_rows_for_the_usage(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", response(routes_of(tokens=30), 10, 5))
    with pytest.raises(RecordingError, match="30 rows"):
        count_requests(read_requests(path), layout(), "decode")


def test_dense_layers_in_front_are_left_out():
    """Hidden layers 0 and 1 have no experts; their rows were never written."""
    routes = np.zeros((30, 5, TOP_K), np.uint8)
    routes[:, 2:] = routes_of()
    names = tuple(f"model.layers.{i}.mlp.experts" for i in (2, 3, 4))
    hybrid = Layout(16, TOP_K, names, tuple(map(layer_index, names)))
    found = count_requests(requests(routes), hybrid, "decode")
    assert (found.decode == count_routes(routes[:, 2:], 16)).all()
    with pytest.raises(RecordingError, match="name the MoE layers"):
        count_requests(requests(routes[:, :3]), layout(), "decode")


def test_recording_of_another_model():
    with pytest.raises(RecordingError, match="it has 2 layers"):
        layer_columns(layout(), 2, "r")


@pytest.mark.parametrize("name", ("experts", "model.layers.1.blocks.2.experts"))
def test_layer_without_one_number(name):
    with pytest.raises(ExpertPlanError, match="number"):
        layer_index(name)


@pytest.mark.parametrize("suffix", ("npy", "npz", "safetensors", "pt", "json"))
def test_arrays_of_every_kind_of_file(tmp_path, suffix):
    path, load = tmp_path / f"load.{suffix}", np.arange(48).reshape(3, 16)
    if suffix == "npy":
        np.save(path, load)
    elif suffix == "npz":
        np.savez(path, logical_count=load)
    elif suffix == "safetensors":
        save_file({"logical_count": load}, path)
    elif suffix == "pt":
        torch.save({"logical_count": torch.tensor(load), "note": "x"}, path)
    else:
        path.write_text(json.dumps({"logical_count": load.tolist()}))
    got = count_loads(read_arrays(path), layout(), True, path)
    assert got.dtype == np.int64 and (got == load).all()


@pytest.mark.parametrize(
    "name,data",
    (
        ("a.npy", b"\x93NUMPY"),
        ("a.npz", b"PK"),
        ("a.safetensors", b"\xff" * 20),
        ("a.pt", b"xx"),
        ("a.json", b"{"),
        ("a.bin", b""),
        ("a.npy", None),
    ),
)
def test_unreadable_arrays(tmp_path, name, data):
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(RecordingError, match="a\\."):
        read_arrays(path)


def test_pickled_objects_are_not_loaded(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(RecordingError, match="allow_pickle"):
        read_arrays(path)


def test_c1_physical_loads_are_put_back_to_logical_experts():
    """Slots 4 and 5 replicate experts 0 and 2; slots 0 … 3 are moved."""
    small = layout(4, 3)
    mapping = np.array([[3, 1, 0, 2, 0, 2], [0, 1, 2, 3, -1, 1], [0, 1, 2, 3, 0, 0]])
    load = np.array([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 0, 5], [0, 0, 0, 0, 1, 2]])
    arrays = {"expert_load": load, "physical_to_logical_map": mapping}
    got = count_loads(arrays, small, False, "d")
    assert got.tolist() == [[8, 2, 10, 1], [1, 7, 3, 4], [3, 0, 0, 0]]
    steps = {"expert_load_window": np.stack([load, load])} | {
        "physical_to_logical_map": mapping
    }
    assert (count_loads(steps, small, False, "d") == 2 * got).all()


@pytest.mark.parametrize(
    "arrays,word",
    (
        ({"expert_load": np.ones((3, 4), np.int64)}, "physical_to_logical_map"),
        ({"expert_load": np.full((3, 4), 0.5)}, "whole numbers"),
        ({"expert_load": -np.ones((3, 4), np.int64)}, "below 0"),
        ({"expert_load": np.ones(4, np.int64)}, "(layers, experts)"),
        ({"other": np.ones((3, 4), np.int64)}, "it has other"),
        ({"logical_count": np.ones((3, 5), np.int64)}, "it has 5 experts"),
        (
            {
                "expert_load": np.ones((3, 4), np.int64),
                "physical_to_logical_map": np.full((3, 4), 4),
            },
            "names expert 4",
        ),
        (
            {
                "expert_load": np.ones((3, 4), np.int64),
                "physical_to_logical_map": np.full((3, 4), -1),
            },
            "holds no expert",
        ),
        (
            {
                "expert_load": np.ones((3, 4), np.int64),
                "physical_to_logical_map": np.zeros((3, 5), np.int64),
            },
            "shape",
        ),
    ),
)
def test_c1_loads_that_cannot_be_used(arrays, word):
    with pytest.raises(RecordingError) as error:
        count_loads(arrays, layout(4, 3), False, "dump.pt")
    assert word in str(error.value) and "dump.pt" in str(error.value)


CSV = "layer,expert,count\n"


def test_csv_by_name_and_number_with_phases_and_requests(tmp_path):
    path = tmp_path / "c.csv"
    path.write_text(
        "\ufefflayer,expert,count,phase,request\r\n"
        "model.layers.0.mlp.experts,3,5,prefill,a\r\n"
        "0,3,2,decode,a\r\n"
        "2,15,7,decode,b\r\n"
    )
    found = read_csv(path, layout(), "decode")
    assert found.prefill[0, 3] == 5 and found.prefill.sum() == 5
    assert found.decode[0, 3] == 2 and found.decode[2, 15] == 7
    assert [int(one.sum()) for one in found.requests] == [7, 7]
    path.write_text(CSV + "1,2,9\n")
    found = read_csv(path, layout(), "prefill")
    assert found.prefill[1, 2] == 9 and found.requests is None


@pytest.mark.parametrize(
    "text,words",
    (
        ("layer,expert\n0,1\n", ["header", "'count'"]),
        ("", ["header"]),
        (CSV + "9,1,1\n", [":2", "layer", "'9'"]),
        (CSV + "0,16,1\n", [":2", "expert", "'16'", "15"]),
        (CSV + "0,-1,1\n", ["expert", "'-1'"]),
        (CSV + "0,1,1.5\n", ["count", "'1.5'"]),
        (CSV + "0,1,-4\n", ["count", "'-4'"]),
        (CSV + "0,1,\n", ["count", "''"]),
        (CSV + "0,1\n", ["count"]),
        (CSV + "0,1,2\n0,1,3\n", [":3", "line 2"]),
        ("layer,expert,count,phase\n0,1,2,warmup\n", ["phase", "'warmup'"]),
    ),
)
def test_damaged_csv(tmp_path, text, words):
    path = tmp_path / "c.csv"
    path.write_text(text)
    with pytest.raises(RecordingError) as error:
        read_csv(path, layout(), "decode")
    for word in [str(path), *words]:
        assert word in str(error.value)
