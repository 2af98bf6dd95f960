"""Which layers ``pinned_hot`` serves: docs/kernels.md, from code, receipts and the pin.

What is served is what the overlay's table admits; what was shown is what a receipt of
layer parity says. The two must agree. Everything else at the pin is refused by name.
"""

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from recipe.errors import RecipeError
from recipe.paths import ROOT
from recipe.wheel import WheelFiles

TABLE = ROOT / "overlay/vllm/model_executor/layers/fused_moe/pinned_hot/tensors.py"
PAGE = ROOT / "docs" / "kernels.md"
LAYERS = "vllm/model_executor/layers/"
_METHODS = ("FusedMoEMethodBase", "OnlineMoEMethodBase", "CompressedTensorsMoEMethod")

Pair = tuple[str, str]
"""A quantization method and an experts class."""


def admitted(source: str) -> set[Pair]:
    """Read the pairs that the overlay's table admits.

    Args:
        source: Text of the overlay's ``tensors.py``.

    """
    values: dict[str, tuple[str, ...]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                values[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
            return {
                (ast.literal_eval(method), kernel)
                for method, call in zip(node.value.keys, node.value.values, strict=True)
                if method is not None and isinstance(call, ast.Call)
                for kernel in _strings(call.args[0], values)
            }
    raise RecipeError(f"{TABLE}: no table of methods; kernels.py must learn its form")


def _strings(node: ast.expr, values: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.BinOp):
        return _strings(node.left, values) + _strings(node.right, values)
    found: tuple[str, ...] = ast.literal_eval(node)
    return found


def shown(receipts: Mapping[str, Mapping[str, Any]]) -> dict[Pair, list[str]]:
    """What receipts say was equal: quantization, dtype and hardware by pair."""
    found: dict[Pair, list[str]] = {}
    for name, receipt in receipts.items():
        for case in receipt.get("parity", ()):
            if "method" not in case or case["equal"] is not True:
                continue
            words = [case["quantization"] or "unquantized", case["dtype"]]
            words += ["with biases"] if case.get("bias") else []
            text = f"{', '.join(words)} ([{receipt['hardware']['name']}]"
            text += f"(../recipe/receipts/{name}.json))"
            found.setdefault((case["method"], case["kernel"]), []).append(text)
    return found


def methods_of_pin(files: Mapping[str, bytes]) -> set[str]:
    """Quantization methods of MoE layers at the pin, found by their base classes.

    Args:
        files: Contents of the pin's modules of layers by path.

    """
    bases: dict[str, set[str]] = {}
    for data in files.values():
        for node in ast.walk(ast.parse(data)):
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(base).split(".")[-1] for base in node.bases}
                bases.setdefault(node.name, set()).update(names)
    found: set[str] = set()
    while grown := {
        name
        for name, above in bases.items()
        if name not in found and above & (found | set(_METHODS))
    }:
        found |= grown
    return found - set(_METHODS)


def render(
    pairs: Iterable[Pair], evidence: Mapping[Pair, list[str]], methods: set[str]
) -> str:
    """Write the table of what is served and the list of what is refused.

    Raises:
        RecipeError: A pair is admitted and not shown, or shown and not admitted.

    """
    pairs = set(pairs)
    for pair in sorted(pairs - evidence.keys()):
        raise RecipeError(
            f"{TABLE.name} admits {' on '.join(pair)} and no receipt shows it; run its "
            "case of ./build.sh test gpu and write the receipt, or remove the pair"
        )
    for pair in sorted(evidence.keys() - pairs):
        raise RecipeError(
            f"a receipt shows {' on '.join(pair)} and {TABLE.name} refuses it; admit it"
        )
    lines = ["| method | kernel | shown equal for |", "|---|---|---|"]
    for method, kernel in sorted(pairs):
        cases = "<br>".join(evidence[method, kernel])
        lines.append(f"| `{method}` | `{kernel}` | {cases} |")
    refused = sorted(methods - {method for method, _ in pairs})
    lines += ["", "Refused by name, with every kernel: "]
    lines[-1] += ", ".join(f"`{method}`" for method in refused) + "."
    return "\n".join(lines)


def generate(receipts: Mapping[str, Mapping[str, Any]], wheel: WheelFiles) -> str:
    """Write the table of docs/kernels.md.

    Args:
        receipts: All receipts by name.
        wheel: The pin's wheel.

    """
    names = [x for x in wheel.names if x.startswith(LAYERS) and x.endswith(".py")]
    files = {name: wheel.read(name) for name in names}
    pairs = admitted(TABLE.read_text())
    return render(pairs, shown(receipts), methods_of_pin(files))
