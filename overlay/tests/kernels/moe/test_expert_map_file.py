# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The expert map file: round trip, and one clear error for everything else."""

import json

import pytest

from tests.kernels.moe.expert_provider_utils import LAYER_NAMES, NUM_EXPERTS
from tests.kernels.moe.pinned_hot_utils import COUNTS, FINGERPRINT, make_map
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import (
    ExpertMapError,
    load_expert_map,
    parse_expert_map,
    rank_experts,
)

NAME = LAYER_NAMES[0]
PATH = "some/map.json"


def changed(edit):
    data = json.loads(make_map().to_json())
    edit(data)
    return json.dumps(data)


def set_layer(field, value):
    return lambda data: data["layers"][NAME].__setitem__(field, value)


def set_ranking(index, value):
    return lambda data: data["layers"][NAME]["ranking"].__setitem__(index, value)


def set_top(field, value):
    return lambda data: data.__setitem__(field, value)


def drop(field):
    return lambda data: data.pop(field)


def test_round_trip():
    assert parse_expert_map(make_map().to_json(), PATH) == make_map()


# Each case: what is wrong, and what the message must name.
BAD = {
    "duplicate": (set_ranking(1, 5), ["ranking", "expert 5", "entries 0 and 1"]),
    "gap": (set_ranking(7, 5), ["ranking", "expert 5", "is missing"]),
    "too_large": (set_ranking(0, 8), ["ranking", "expert 8", "0 … 7"]),
    "negative": (set_ranking(0, -1), ["ranking", "expert -1"]),
    "float_id": (set_ranking(0, 5.0), ["ranking", "5.0"]),
    "bool_id": (set_ranking(0, True), ["ranking", "True"]),
    "string_id": (set_ranking(0, "5"), ["ranking", "'5'"]),
    "ranking_no_list": (set_layer("ranking", 3), ["ranking", "list"]),
    "short_share": (set_layer("share", [1.0]), ["share has 1", "ranking has 8"]),
    "rising_share": (
        set_layer("share", [0.1, 0.9] + [0.0] * 6),
        ["share rises", "entry 0 to 1"],
    ),
    "share_sum": (set_layer("share", [0.5] + [0.0] * 7), ["sums to 0.5"]),
    "share_negative": (set_layer("share", [1.0] + [0.0] * 6 + [-0.1]), ["negative"]),
    "share_nan": (set_layer("share", [float("nan")] * 8), ["non-finite"]),
    "hot_too_large": (set_layer("hot", 9), ["hot is 9", "0 … 8"]),
    "hot_negative": (set_layer("hot", -1), ["hot is -1"]),
    "hot_float": (set_layer("hot", 2.5), ["hot", "2.5"]),
    "hot_bool": (set_layer("hot", True), ["hot", "True"]),
    "fewer_experts": (
        lambda data: data["layers"][NAME].update(
            ranking=list(range(7)), share=[0.0] * 7, hot=1
        ),
        [NAME, "ranks 7", "num_experts is 8"],
    ),
    "layer_missing": (
        lambda data: data["layers"].pop(NAME),
        ["layers has 1", "num_moe_layers is 2"],
    ),
    "no_layers": (set_top("layers", {}), ["layers"]),
    "wrong_format": (set_top("format", "something"), ["format", "'something'"]),
    "no_format": (drop("format"), ["format", "required"]),
    "future_version": (set_top("version", 2), ["version", "2 is not 1"]),
    "bool_version": (set_top("version", True), ["version", "True is not 1"]),
    "no_fingerprint": (drop("fingerprint"), ["fingerprint", "required"]),
    "extra_field": (set_top("colour", 3), ["colour", "Extra"]),
    "bad_budget": (set_top("budget", {"asked": 3}), ["budget.asked", "3"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_map_is_one_clear_error(case):
    edit, named = BAD[case]
    with pytest.raises(ExpertMapError) as error:
        parse_expert_map(changed(edit), PATH)
    message = str(error.value)
    for word in [PATH, *named]:
        assert word in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"a": 1, "a": 2}', "null", '{"format": 1}']
)
def test_not_a_map_at_all(text):
    with pytest.raises(ExpertMapError, match="some/map.json"):
        parse_expert_map(text, PATH)


def test_repeated_layer_name_is_refused():
    text = make_map().to_json().replace(LAYER_NAMES[1], LAYER_NAMES[0])
    with pytest.raises(ExpertMapError, match="stands twice"):
        parse_expert_map(text, PATH)


def test_unreadable_file(tmp_path):
    with pytest.raises(ExpertMapError, match="Check --expert-map"):
        load_expert_map(tmp_path / "absent.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ExpertMapError, match="cannot be read"):
        load_expert_map(tmp_path / "binary.json")


@pytest.mark.parametrize(
    "field,value",
    [
        ("architecture", "MixtralForCausalLM"),
        ("num_experts", 16),
        ("top_k", 4),
        ("hidden_size", 128),
        ("moe_intermediate_size", None),
        ("num_moe_layers", 3),
        ("quantization", "fp8"),
    ],
)
def test_map_of_another_model_names_the_field(field, value):
    other = FINGERPRINT.model_copy(update={field: value})
    with pytest.raises(ExpertMapError) as error:
        make_map().check_model(other, PATH)
    assert f"{field} is" in str(error.value) and repr(value) in str(error.value)
    make_map().check_model(FINGERPRINT, PATH)


@pytest.mark.parametrize(
    "names,named",
    [
        (["layers.0.mlp.experts", LAYER_NAMES[1]], "layers.0.mlp.experts"),
        (["language_model." + n for n in LAYER_NAMES], "language_model.model"),
        ([LAYER_NAMES[0]], LAYER_NAMES[1]),
        ([*LAYER_NAMES, "model.layers.9.mlp.experts"], "model.layers.9"),
        ([], LAYER_NAMES[0]),
    ],
)
def test_layers_must_match_exactly(names, named):
    with pytest.raises(ExpertMapError) as error:
        make_map().check_layers(dict.fromkeys(names, NUM_EXPERTS), PATH)
    assert named in str(error.value) and PATH in str(error.value)


def test_layer_with_other_number_of_experts():
    with pytest.raises(ExpertMapError, match="8 experts are ranked, the layer has 9"):
        make_map().check_layers(dict.fromkeys(LAYER_NAMES, 9), PATH)


def test_ranking_ties_go_to_the_lowest_id():
    ranked = rank_experts([5, 7, 5, 7], hot=2)
    assert ranked.ranking == (1, 3, 0, 2)
    assert ranked.expected_cold_share == pytest.approx(10 / 24)


def test_layer_without_traffic_has_no_nan():
    ranked = rank_experts([0, 0, 0], hot=1)
    assert ranked.ranking == (0, 1, 2) and ranked.share == (0.0, 0.0, 0.0)
    assert ranked.expected_cold_share == 0


@pytest.mark.parametrize("hot", (0, 1, 3, NUM_EXPERTS - 1, NUM_EXPERTS))
def test_every_layer_is_a_permutation_at_every_cut(hot):
    made = make_map(hot)
    for layer in made.layers.values():
        assert sorted(layer.ranking) == list(range(NUM_EXPERTS))
        assert sum(COUNTS[e] for e in layer.ranking[hot:]) / sum(
            COUNTS
        ) == pytest.approx(layer.expected_cold_share)
