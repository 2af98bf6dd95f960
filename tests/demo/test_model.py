"""The tiny model is what the demo and the engine tests need it to be."""

import hashlib
import json
from itertools import combinations, permutations

import pytest

from recipe.demo import FIXTURE, HOT_EXPERTS, MAX_TOKENS, load_prompts
from tests.demo.support import measured, repeat_period

DOMAINS = ("code", "english", "japanese", "german")
MAX_CHECKPOINT_BYTES = 10_000_000
MIN_PROMPTS = 6
MAX_PROMPT_BYTES = 250
# A quarter of the experts is cold, so that is what a random map leaves. Measured:
# a map of the same domain 9 to 16 %, of another 17 to 47 %.
MAX_MATCHED_SHARE = 0.18
MIN_FOREIGN_OVER_MATCHED = 1.2
MIN_FAR_SHARE = 0.35
MIN_SHARE_OF_EVEN_LOAD = 0.5


def cold_share(mapped: list[int], served: list[int]) -> float:
    """Return what a map from one text leaves cold of another, in one layer."""
    order = sorted(range(len(mapped)), key=lambda expert: (-mapped[expert], expert))
    return sum(served[expert] for expert in order[HOT_EXPERTS:]) / sum(served)


def mean_cold_share(mapped: str, served: str) -> float:
    """Return the mean over layers, for two domains of held-out text."""
    selections = measured()["held_out_selections"]
    layers = selections["map"][mapped]
    shares = [
        cold_share(layers[name], selections["serve"][served][name]) for name in layers
    ]
    return sum(shares) / len(shares)


def test_record_belongs_to_the_checkpoint() -> None:
    """What was measured was measured on these weights."""
    data = (FIXTURE / "model.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest() == measured()["checkpoint_sha256"]
    assert len(data) <= MAX_CHECKPOINT_BYTES


def test_expert_rows_are_whole_pages() -> None:
    """A row is a whole number of 4 KiB pages, so that hot and cold do not share one."""
    config = json.loads((FIXTURE / "config.json").read_text())
    row = config["hidden_size"] * config["moe_intermediate_size"] * 2
    assert row % 4096 == 0
    assert config["dtype"] == "bfloat16"
    assert config["num_experts"] > HOT_EXPERTS


def test_every_expert_of_every_layer_is_used() -> None:
    """On held-out text of all domains no expert is dead, or near it."""
    config = json.loads((FIXTURE / "config.json").read_text())
    selections = measured()["held_out_selections"]["serve"]
    for name in selections[DOMAINS[0]]:
        columns = zip(*(selections[domain][name] for domain in DOMAINS), strict=True)
        loads = [sum(counts) for counts in columns]
        assert len(loads) == config["num_experts"]
        assert min(loads) >= MIN_SHARE_OF_EVEN_LOAD * sum(loads) / len(loads), name


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_map_of_the_same_domain_leaves_little_cold(domain: str) -> None:
    """The hottest experts on one half of a domain's text are those of the other."""
    assert mean_cold_share(domain, domain) <= MAX_MATCHED_SHARE


@pytest.mark.parametrize(("mapped", "served"), [*permutations(DOMAINS, 2)])
def test_a_map_of_another_domain_leaves_more_cold(mapped: str, served: str) -> None:
    """Routing depends on the kind of text, between any two of the four domains."""
    foreign, matched = mean_cold_share(mapped, served), mean_cold_share(served, served)
    assert foreign >= MIN_FOREIGN_OVER_MATCHED * matched


@pytest.mark.parametrize("mapped", ["code", "english", "german"])
def test_a_far_domain_is_far(mapped: str) -> None:
    """Japanese, whose bytes are others, is served badly by every other map."""
    assert mean_cold_share(mapped, "japanese") >= MIN_FAR_SHARE


def test_greedy_text_is_not_a_loop() -> None:
    """What the demo serves goes on, and no two prompts get the same answer."""
    period = repeat_period()
    greedy = measured()["greedy_token_ids"]
    prompts = load_prompts()["prompts"]
    for domain in DOMAINS:
        answers = [tokens[:MAX_TOKENS] for tokens in greedy[domain]]
        assert len(answers) == len(prompts[domain])
        assert [period(tokens) for tokens in answers] == [None] * len(answers), domain
        assert all(left != right for left, right in combinations(answers, 2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("a rather ordinary sentence that goes on for long", None),
        ("then it says " + "x" * 24, 1),
        ("then it says " + "x" * 23 + ".", None),
        ("the " * 8, 4),
        ("start of it. " + "as the file is " * 3, 15),
        ("start of it. " + "as the file is " * 2, None),
    ],
)
def test_repeat_period(text: str, expected: int | None) -> None:
    """A loop is three copies at the end, over at least 24 tokens."""
    assert repeat_period()(list(text.encode())) == expected


def test_prompts_are_short_and_apart_from_the_calibration() -> None:
    """Each domain has prompts to serve and others to make a map from."""
    texts = load_prompts()
    for use in ("calibration", "prompts"):
        assert tuple(texts[use]) == DOMAINS
        for domain in DOMAINS:
            assert len(texts[use][domain]) >= MIN_PROMPTS
            for text in texts[use][domain]:
                assert len(text.encode()) <= MAX_PROMPT_BYTES
    everything = [t for use in texts.values() for part in use.values() for t in part]
    assert len(set(everything)) == len(everything)


def test_tokenizer_is_the_bytes() -> None:
    """Ids 0 to 255 are the bytes, and nothing is merged."""
    model = json.loads((FIXTURE / "tokenizer.json").read_text())["model"]
    assert sorted(model["vocab"].values()) == list(range(256))
    assert model["merges"] == []
