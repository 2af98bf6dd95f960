"""docs/kernels.md says what the overlay admits, and receipts show all of it."""

import pytest

from recipe.errors import RecipeError
from recipe.kernels import TABLE, admitted, methods_of_pin, render, shown

CASE = {"method": "M", "kernel": "K", "quantization": None, "dtype": "d"}
GPU = {"hardware": {"name": "G"}}


def test_pairs_are_read_from_the_table() -> None:
    source = TABLE.read_text()
    pairs = admitted(source)
    assert ("UnquantizedFusedMoEMethod", "TritonExperts") in pairs["range"]
    assert ("Mxfp4OnlineMoEMethod", "MarlinExperts") in pairs["range"]
    assert ("Mxfp4MoEMethod", "TrtLlmMxfp4ExpertsModular") in pairs["split"]
    assert ("Mxfp4MoEMethod", "TrtLlmMxfp4ExpertsModular") not in pairs["range"]
    assert {method for method, _ in pairs["range"]} == {
        line.split('"')[1]
        for line in source.splitlines()
        if line.startswith('    "') and "ExpertTensors(" in line
    }


def test_only_equal_layers_count_as_shown() -> None:
    receipts = {"one": GPU | {"parity": [CASE | {"equal": None}]}}
    assert shown(receipts, "range") == {}
    receipts = {"one": GPU | {"parity": [CASE | {"equal": True}]}}
    assert shown(receipts, "range") == {
        ("M", "K"): ["unquantized, d ([G](../recipe/receipts/one.json))"]
    }


def test_a_layout_counts_for_itself() -> None:
    case = CASE | {"equal": True, "layout": "split", "modes": ["staged"]}
    receipts = {"one": GPU | {"parity": [case]}}
    assert shown(receipts, "range") == {}
    assert shown(receipts, "split") == {
        ("M", "K"): ["unquantized, d, staged ([G](../recipe/receipts/one.json))"]
    }


def test_admitted_pair_without_a_receipt_is_an_error() -> None:
    with pytest.raises(RecipeError, match="admits M on K and no receipt shows it"):
        render({("M", "K")}, {})


def test_shown_pair_that_is_refused_is_an_error() -> None:
    with pytest.raises(RecipeError, match="shows M on K and tensors.py refuses it"):
        render(set(), {("M", "K"): ["x"]})


def test_methods_are_found_through_their_bases() -> None:
    files = {
        "a.py": b"class A(FusedMoEMethodBase, CustomOp): pass",
        "b.py": b"class B(x.A): pass\nclass C(LinearMethodBase): pass",
    }
    assert methods_of_pin(files) == {"A", "B"}
