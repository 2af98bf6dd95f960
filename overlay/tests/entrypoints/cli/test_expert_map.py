# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm expert-map` as its users call it: answers, files, errors and exit status."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.kernels.moe.expert_profile_utils import (
    EXPERTS,
    LAYERS,
    TOP_K,
    draw_routes,
    make_profile,
)
from vllm.entrypoints.cli import main as cli
from vllm.model_executor.layers.fused_moe.expert_profile.profile_file import (
    read_profile,
    write_profile,
)
from vllm.model_executor.layers.fused_moe.expert_profile.verbs import VERBS
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import load_expert_map

BOTH = ("code.safetensors", "prose.safetensors")
BANDWIDTHS = ("--hbm-gbps", "3850", "--host-gbps", "51.2")


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    """Profiles of two classes of traffic, one with its requests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLLM_LOGGING_STREAM", raising=False)
    write_profile(make_profile(seed=1, labels=("code",)), "code.safetensors")
    write_profile(
        make_profile(seed=2, requests=8, labels=("prose",)), "prose.safetensors"
    )


@pytest.fixture
def vllm(monkeypatch, capsys):
    """Call the vllm program in this process; returns status, stdout and stderr."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["vllm", "expert-map", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def answer(vllm):
    """Call a verb that is done, with --json; returns the parsed answer."""

    def call(verb, *words):
        status, out, err = vllm(verb, "--json", *words)
        assert status == 0, err
        return json.loads(out)

    return call


def plan(answer, out="map.json", profiles=("code.safetensors",), hot_rows=8):
    return answer("plan", *profiles, "-o", out, "--hot-rows", hot_rows)


def test_a_process_prints_json_and_nothing_else_to_stdout(tmp_path):
    words = ["expert-map", "plan", "code.safetensors", "--json", "--hot-rows", "8"]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *words]
    done = subprocess.run(
        [*command, "-o", "map.json"], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["hot_rows"] == 8 * LAYERS
    assert load_expert_map(tmp_path / "map.json").budget.asked == "--hot-rows 8"


def test_file_that_cannot_be_written_is_an_error(vllm):
    words = ["plan", "code.safetensors", "--hot-rows", 8, "-o", "absent/map.json"]
    status, out, err = vllm(*words)
    assert (status, out) == (1, "")
    assert "absent/map.json: cannot be written" in err


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb(vllm, verb):
    status, out, _ = vllm(verb, "--help")
    assert status == 0
    assert out.startswith(f"usage: vllm expert-map {verb} ")
    assert "Exit status: 0 done; 1" in out


def test_no_verb_is_a_usage_error(vllm):
    assert vllm()[0] == 2
    assert vllm("plan")[0] == 2
    assert vllm("replan")[0] == 2


def test_plan_writes_the_map_that_it_describes(answer):
    data = plan(answer)
    made = load_expert_map("map.json")
    profile = read_profile("code.safetensors")
    assert sum(layer.hot for layer in made.layers.values()) == data["hot_rows"]
    assert made.profiles[0].label == "code"
    assert made.profiles[0].tokens == profile.tokens == data["profiles"][0]["tokens"]
    cold = sum(
        profile.counts[i, list(layer.ranking[layer.hot :])].sum()
        for i, layer in enumerate(made.layers.values())
    )
    assert data["cold_share"] == pytest.approx(cold / profile.counts.sum())
    assert made.budget.hot_bytes == data["hot_bytes"]


def test_plans_are_the_same_byte_for_byte(answer):
    for name in ("a.json", "b.json"):
        plan(answer, name, BOTH, 7)
    with open("a.json", "rb") as one, open("b.json", "rb") as other:
        assert one.read() == other.read()


def test_plan_with_every_budget_and_weights(answer):
    profiles = ["code.safetensors=3", "prose.safetensors=1"]
    for budget in (["--hot-rows", 9], ["--cold-fraction", 0.25]):
        data = answer("plan", *profiles, "-o", "m.json", *budget, "--cut", "uniform")
        assert (
            data["hot_rows_min"] == data["hot_rows_max"] == (9 if 9 in budget else 12)
        )
        assert [one["weight"] for one in data["profiles"]] == [3, 1]
    size = data["row_bytes"] * 30 / 2**30
    data = answer(
        "plan", *profiles, "-o", "m.json", "--hot-gib", size, "--page-bytes", 4096
    )
    assert data["hot_bytes"] <= size * 2**30 and 20 < data["hot_rows"] <= 30


def test_b20_plan_says_when_nothing_is_cold_or_nothing_hot(vllm):
    status, _, err = vllm("plan", "code.safetensors", "-o", "m.json", "--hot-rows", 16)
    assert status == 0 and "nothing is cold" in err and "resident" in err
    words = ["plan", "code.safetensors", "-o", "m.json", "--hot-rows", 0]
    status, _, err = vllm(*words, "--cut", "uniform")
    assert status == 0 and "every selection is read from host memory" in err


@pytest.mark.parametrize(
    "words,named",
    (
        (["plan", "absent.safetensors", "--hot-rows", 8], ["absent.safetensors"]),
        (["plan", "code.safetensors", "--hot-rows", 99], ["--hot-rows 99", "0 … 16"]),
        (["plan", "code.safetensors=x", "--hot-rows", 8], ["'x' is no number"]),
        (
            ["plan", "code.safetensors", "prose.safetensors=2", "--hot-rows", 8],
            ["'code' has no weight"],
        ),
        (
            ["plan", "code.safetensors", "code.safetensors", "--hot-rows", 8],
            ["count twice"],
        ),
        (
            ["plan", "code.safetensors", "--hot-rows", 8, "--row-bytes", 0],
            ["--row-bytes 0"],
        ),
        (
            ["plan", "code.safetensors", "--hot-rows", 8, "--row-bytes", 9]
            + ["--weight-bits", 4],
            ["--weight-bits has no effect"],
        ),
    ),
)
def test_plan_errors_name_the_cure(vllm, words, named):
    status, out, err = vllm(*words, "-o", "m.json")
    assert (status, out) == (1, "") and not os.path.exists("m.json")
    message = [line for line in err.splitlines() if "error:" in line]
    assert len(message) == 1 and message[0].startswith("vllm expert-map plan: error: ")
    for word in named:
        assert word in message[0]


def test_c14_profile_of_another_model_is_refused(vllm, answer):
    write_profile(make_profile(experts=32), "other.safetensors")
    plan(answer)
    for words in (
        ["plan", "code.safetensors", "other.safetensors", "-o", "m", "--hot-rows", 8],
        ["score", "map.json", "other.safetensors"],
        ["predict", "map.json", "other.safetensors", *BANDWIDTHS],
        ["diff", "code.safetensors", "other.safetensors"],
        ["merge", "code.safetensors", "other.safetensors", "-o", "m"],
        ["show", "map.json", "other.safetensors"],
    ):
        status, _, err = vllm(*words)
        assert status == 1 and "num_experts is" in err, words


def test_c16_score_flags_the_planning_profile(vllm, answer):
    plan(answer)
    scores = answer("score", "map.json", "code.safetensors", "prose.safetensors")
    code, prose = scores["scores"]
    assert code["planned_from_this_profile"] and code["overlap"] == 1
    assert code["cold_share"] == code["best_cold_share"]
    assert not prose["planned_from_this_profile"]
    assert prose["cold_share"] > code["cold_share"]
    assert prose["cold_share_low"] < prose["cold_share"] < prose["cold_share_high"]
    assert prose["folds"] == 8 and prose["held_out_cold_share"] is not None
    assert prose["held_out_cold_share"] > prose["best_cold_share"]
    assert len(prose["layers"]) == LAYERS
    assert len(scores["warnings"]) == 1
    _, out, err = vllm("score", "map.json", "code.safetensors", "--layers")
    assert "too good" in out and "warning: map.json was planned from" in err
    assert "model.layers.2.mlp.experts" in out


def test_score_of_a_blend_flags_each_of_its_profiles(answer):
    plan(answer, "map.json", BOTH)
    scores = answer("score", "map.json", "code.safetensors", "prose.safetensors")
    assert all(one["planned_from_this_profile"] for one in scores["scores"])


def test_score_limit_sets_the_exit_status(vllm, answer):
    plan(answer)
    words = ["score", "map.json", "prose.safetensors", "--max-cold"]
    assert vllm(*words, 0.9)[0] == 0
    assert vllm(*words, 0.01)[0] == 3
    assert vllm(*words, 9)[0] == 1


def test_folds_without_requests_are_an_error(vllm, answer):
    plan(answer)
    status, _, err = vllm("score", "map.json", "code.safetensors", "--folds", 4)
    assert status == 1 and "--folds has no effect on code.safetensors" in err
    status, _, err = vllm("score", "map.json", "prose.safetensors", "--folds", 9)
    assert status == 1 and "--folds 9 is outside 2 … 8" in err
    scored = answer("score", "map.json", "prose.safetensors", "--folds", 4)
    assert scored["scores"][0]["folds"] == 4


def test_predict_compares_with_resident_and_positional(answer):
    plan(answer)
    words = ["predict", "map.json", "prose.safetensors", "-c", 1, 8, *BANDWIDTHS]
    small = ("--page-bytes", 4096)
    one, eight = answer(*words, *small)["predictions"]
    for entry in (one, eight):
        assert entry["resident"]["step_ms"] <= entry["map"]["step_ms"]
        assert entry["map"]["fetch_tax"] >= 0
        assert entry["map"]["cold_experts"] < entry["unique_experts"]
        assert entry["map"]["host_bytes"] > 0
    assert eight["unique_experts"] > one["unique_experts"]
    measured = answer(*words, *small, "--resident-ms", "8=3.5")["predictions"]
    assert measured[1]["resident"]["step_ms"] == 3.5
    assert measured[0] == one
    drafted = answer(*words, *small, "--draft-tokens", 3, "--accepted", 2)
    assert drafted["predictions"][0]["tokens"] == 4


@pytest.mark.parametrize(
    "words,named",
    (
        ([], ["--hbm-gbps and --host-gbps missing"]),
        (["--hbm-gbps", 3850], ["--host-gbps missing"]),
        ([*BANDWIDTHS, "--host-gbps", 0], ["--host-gbps 0 is not above 0"]),
        ([*BANDWIDTHS, "--draft-tokens", 2], ["--accepted"]),
        ([*BANDWIDTHS, "--draft-tokens", 2, "--accepted", 3], ["outside 0 … 2"]),
        ([*BANDWIDTHS, "--resident-ms", "8"], ["'8' is not STREAMS=MS"]),
        ([*BANDWIDTHS, "--resident-ms", "4=3"], ["4=… has no effect"]),
        ([*BANDWIDTHS, "-c", 0], ["0 streams"]),
    ),
)
def test_predict_errors(vllm, answer, words, named):
    plan(answer)
    status, _, err = vllm("predict", "map.json", "prose.safetensors", *words)
    assert status == 1
    for word in named:
        assert word in err


def test_advise_answers_the_three_questions(vllm, answer):
    plan(answer, "old.json", hot_rows=6)
    words = ["code.safetensors=1", "prose.safetensors=1", *BANDWIDTHS]
    words += ["--census", "1=20", "8=80", "--page-bytes", 4096, "--layer-us", 1]
    # Rows as large as the link and HBM are felt.
    words += ["--row-bytes", 3_000_000]
    data = answer("advise", *words, "--hot-rows", 6)
    assert data["advice"]["worth_it"]["answer"] == "yes"
    assert data["advice"]["maps"]["answer"] == "several"
    assert "new_map" not in data["advice"]
    code, prose = data["classes"]["code"], data["classes"]["prose"]
    assert (code["held_out"], prose["held_out"]) == (False, True)
    assert code["foreign"]["prose"]["cold_share"] > code["own"]["cold_share"]
    assert code["blend"]["cold_share"] > code["own"]["cold_share"]
    moved = ["advise", "prose.safetensors", *words[2:], "--current", "old.json"]
    data = answer(*moved)
    assert data["advice"]["new_map"]["answer"] == "renew"
    assert data["hot_rows"] == 6 * LAYERS
    assert vllm(*moved, "--exit-code")[0] == 3
    kept = ["advise", "code.safetensors", *words[2:], "--current", "old.json"]
    status, out, _ = vllm(*kept, "--exit-code")
    assert status == 0 and "Keep the map" in out


@pytest.mark.parametrize(
    "words,named",
    (
        ([], "no budget"),
        (["--hot-rows", 8, "--census", "x"], "'x' is not STREAMS=SHARE"),
        (["--hot-rows", 8, "--census", "8=-1"], "'8=-1' is not STREAMS=SHARE"),
        (["--hot-rows", 8, "--exit-code"], "--exit-code has no effect"),
    ),
)
def test_advise_errors(vllm, words, named):
    status, _, err = vllm("advise", "code.safetensors", *BANDWIDTHS, *words)
    assert status == 1 and named in err


def test_diff_of_maps_and_of_profiles(vllm, answer):
    plan(answer, "one.json")
    plan(answer, "other.json", BOTH[1:])
    assert vllm("diff", "one.json", "one.json", "--exit-code")[0] == 0
    assert vllm("diff", "one.json", "other.json", "--exit-code", "--layers")[0] == 3
    data = answer("diff", "one.json", "other.json")
    one, other = load_expert_map("one.json"), load_expert_map("other.json")
    enter = sum(
        len(set(other.layers[name].hot_rows) - set(one.layers[name].hot_rows))
        for name in one.layers
    )
    assert data["enter"] == data["leave"] == enter > 0 and not data["same"]
    same = answer("diff", "code.safetensors", "code.safetensors")
    assert same["same"] and same["overlap"] == same["spearman"] == 1
    assert same["traffic_moved"] == 0
    moved = answer("diff", "code.safetensors", "prose.safetensors", "--hot-rows", 4)
    assert 0 < moved["traffic_moved"] < 1 and moved["overlap"] < 1
    status, _, err = vllm("diff", "one.json", "code.safetensors")
    assert status == 1 and "one.json is a map and code.safetensors is a profile" in err


def test_merge_of_profiles_adds_up(answer, vllm):
    data = answer("merge", "code.safetensors", "prose.safetensors", "-o", "both")
    parts = [read_profile(f"{name}.safetensors") for name in ("code", "prose")]
    merged = read_profile("both")
    assert (merged.counts == parts[0].counts + parts[1].counts).all()
    assert data["labels"] == ["code", "prose"] and data["requests"] is None
    status, _, err = vllm("merge", "code.safetensors", "code.safetensors", "-o", "m")
    assert status == 1 and "count twice" in err
    status, _, err = vllm("merge", "code.safetensors=2", "-o", "m")
    assert status == 1 and "a weight has no effect" in err


def test_merge_of_maps_blends_their_shares(answer, vllm):
    plan(answer, "one.json")
    plan(answer, "other.json", BOTH[1:])
    answer("merge", "one.json=1", "other.json=1", "-o", "blend.json")
    weighted = ["code.safetensors=1", "prose.safetensors=1"]
    answer("plan", *weighted, "-o", "planned.json", "--hot-rows", 8)
    blend, planned = load_expert_map("blend.json"), load_expert_map("planned.json")
    for name, layer in planned.layers.items():
        assert set(blend.layers[name].hot_rows) == set(layer.hot_rows)
        assert blend.layers[name].share == pytest.approx(layer.share)
    assert len(blend.profiles) == 2
    plan(answer, "small.json", hot_rows=4)
    status, _, err = vllm("merge", "one.json", "small.json", "-o", "m")
    assert status == 1 and "[12, 24] rows hot" in err and "--hot-rows" in err
    status, _, err = vllm("merge", "one.json", "code.safetensors", "-o", "m")
    assert status == 1 and "maps and profiles" in err


def test_index_of_a_folder_and_scores_of_all_its_maps(answer, vllm):
    os.mkdir("maps")
    assert vllm("index", "maps")[0] == 1
    plan(answer, "maps/code.json")
    plan(answer, "maps/prose.json", BOTH[1:])
    assert vllm("index", "maps", "--check")[0] == 3
    made = answer("index", "maps")
    assert list(made["maps"]) == ["code", "prose"]
    assert vllm("index", "maps", "--check")[0] == 0
    with open("maps/index.json") as file:
        assert json.load(file)["maps"]["prose"]["profiles"] == ["prose"]
    scores = answer("score", "maps", "code.safetensors")["scores"]
    assert [one["map"] for one in scores] == ["maps/code.json", "maps/prose.json"]
    assert scores[0]["cold_share"] < scores[1]["cold_share"]
    plan(answer, "maps/code.json", hot_rows=9)
    assert vllm("index", "maps", "--check")[0] == 3


def test_show_text_of_maps_and_profiles(vllm, answer):
    plan(answer)
    status, out, _ = vllm("show", "map.json", "prose.safetensors", "--layers")
    assert status == 0
    for word in ("planned from code", "--hot-rows 8, optimal cut", "prose", "expert "):
        assert word in out
    data = answer("show", "prose.safetensors")
    (one,) = data["profiles"]
    assert one["requests"] == 8
    counts = np.sort(read_profile("prose.safetensors").counts, axis=None)[::-1]
    fewest = one["rows_to_cover"]["0.9"]
    assert counts[:fewest].sum() >= 0.9 * counts.sum() > counts[: fewest - 1].sum()
    status, _, err = vllm("show", "map.json", "map.json")
    assert status == 1 and "two maps" in err


def test_pictures_need_a_library_and_say_which(vllm, monkeypatch):
    for option, library in (("--html", "plotly"), ("--png", "matplotlib")):
        for module in [name for name in sys.modules if name.startswith(library)]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, library, None)
        status, out, err = vllm("show", "code.safetensors", option, "picture")
        assert (status, out) == (1, "") and not os.path.exists("picture")
        assert f"{option} needs {library}" in err and f"pip install {library}" in err


def test_import_of_returned_routes_scores_held_out(answer, vllm):
    plan(answer)
    routes = [draw_routes(20, i, LAYERS, EXPERTS, TOP_K, 1.0) for i in range(3)]
    np.savez("routes.npz", *[one.astype(np.uint8) for one in routes])
    words = ["import", "--from", "routes", "routes.npz", "-o", "r", "--label", "x"]
    data = answer(*words, "--like", "map.json")
    assert (data["tokens_decode"], data["requests"]) == (60, 3)
    again = answer(*words, "--like", "code.safetensors", "--phase", "prefill")
    assert again["tokens_prefill"] == 60
    profile = read_profile("r")
    assert profile.counts.sum() == 60 * LAYERS * TOP_K and profile.labels == ("x",)
    assert answer("score", "map.json", "r")["scores"][0]["folds"] == 3
    status, _, err = vllm(*words, "--like", "map.json", "--logical")
    assert status == 1 and "--logical has no effect" in err
    status, _, err = vllm(*words, "--like", "map.json", "--moe-layers", "0")
    assert status == 1 and "--moe-layers has no effect" in err


def test_import_of_loads_and_csv_equals_the_profile(answer, vllm):
    profile = read_profile("code.safetensors")
    np.savez("loads.npz", logical_count=profile.counts)
    with open("counts.csv", "w") as file:
        file.write("layer,expert,count,phase\n")
        for phase in ("prefill", "decode"):
            counts = getattr(profile, f"counts_{phase}")
            for (layer, expert), count in np.ndenumerate(counts):
                file.write(f"{layer},{expert},{count},{phase}\n")
    answer(
        "import", "--from", "csv", "counts.csv", "-o", "c", "--like", "code.safetensors"
    )
    made = read_profile("c")
    assert (made.counts_prefill == profile.counts_prefill).all()
    assert (made.counts_decode == profile.counts_decode).all()
    answer("import", "--from", "eplb", "loads.npz", "-o", "e", "--like", "c")
    assert (read_profile("e").counts_decode == profile.counts).all()
    loads = profile.counts.copy()
    loads[1] += 1
    np.savez("loads.npz", logical_count=loads)
    words = ["import", "--from", "eplb", "loads.npz", "-o", "n", "--like", "c"]
    status, _, err = vllm(*words)
    assert status == 1 and "whole tokens" in err and "model.layers.1" in err
    assert not os.path.exists("n")
