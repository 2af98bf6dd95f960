"""The goals of the series, and how its size is counted."""

from dataclasses import replace

import pytest

from recipe import stats
from recipe.pin import load_pins
from recipe.series import Sources, load_series
from recipe.stats import HOT_PATH, PatchStats, is_hot, measure
from recipe.wheel import WheelFiles, fetch_wheel
from tests.series.support import NEW_FILES


def test_the_series_meets_its_goals() -> None:
    sources = Sources()
    found = measure(load_series(sources), sources)
    assert found.missed() == []


def test_sizes_are_counted(sources: Sources) -> None:
    found = measure(load_series(sources), sources)
    assert [patch.changed for patch in found.patches] == [3, 4, 4]
    assert (found.changed, found.hot, found.files) == (11, 0, 4)
    assert (found.modules, found.module_lines) == (2, 1)
    assert (found.tests, found.test_lines) == (1, 2)
    assert len(NEW_FILES) == found.modules + found.tests


def test_lines_in_the_hot_path_are_counted(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "HOT_PATH", ("vllm/plain.py",))
    found = measure(load_series(sources), sources)
    assert [patch.hot for patch in found.patches] == [3, 0, 2]


@pytest.mark.parametrize(
    ("path", "hot"),
    [
        ("vllm/model_executor/layers/fused_moe/routed_experts.py", True),
        ("vllm/model_executor/layers/fused_moe/__init__.py", False),
        ("vllm/v1/worker/gpu/model_runner.py", True),
        ("vllm/model_executor/model_loader/utils.py", False),
        ("vllm/engine/arg_utils.py", False),
        ("vllm/config/offload.py", False),
    ],
)
def test_what_is_hot(path: str, hot: bool) -> None:
    assert is_hot(path) == hot


@pytest.mark.parametrize(
    ("count", "changed", "hot", "complaint"),
    [
        (12, 20, 20, []),
        (13, 1, 0, ["13 patches, the goal is 12"]),
        (2, 126, 0, ["252 changed lines in files of upstream, the goal is 250"]),
        (1, 100, 61, ["p.patch: 61 changed lines in the hot path, the goal is 60"]),
    ],
)
def test_missed_goals_are_told_with_a_cure(
    count: int, changed: int, hot: int, complaint: list[str], sources: Sources
) -> None:
    size = measure(load_series(sources), sources)
    size = replace(size, patches=(PatchStats("p.patch", changed, hot),) * count)
    missed = size.missed()
    assert [text.partition(";")[0] for text in missed] == complaint


@pytest.mark.cpu
@pytest.mark.parametrize("pin", load_pins(), ids=lambda pin: pin.name)
def test_every_place_of_the_hot_path_exists(pin) -> None:
    names = WheelFiles(fetch_wheel(pin.any_flavor)).names
    for place in HOT_PATH:
        assert any(name.startswith(place) for name in names), place
