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
# A call's first argument in the table, or the keyword that says the same.
_LAYOUTS = {"range": 0, "split": "split"}


def admitted(source: str) -> dict[str, set[Pair]]:
    """Read the pairs that the overlay's table admits, by layout.

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
            calls = {
                ast.literal_eval(method): _arguments(call)
                for method, call in zip(node.value.keys, node.value.values, strict=True)
                if method is not None and isinstance(call, ast.Call)
            }
            return {
                layout: {
                    (method, kernel)
                    for method, arguments in calls.items()
                    if place in arguments
                    for kernel in _strings(arguments[place], values)
                }
                for layout, place in _LAYOUTS.items()
            }
    raise RecipeError(f"{TABLE}: no table of methods; kernels.py must learn its form")


def _arguments(call: ast.Call) -> dict[int | str | None, ast.expr]:
    """Arguments of a call by place or keyword."""
    found: dict[int | str | None, ast.expr] = dict(enumerate(call.args))
    return found | {keyword.arg: keyword.value for keyword in call.keywords}


def _strings(node: ast.expr, values: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.BinOp):
        return _strings(node.left, values) + _strings(node.right, values)
    found: tuple[str, ...] = ast.literal_eval(node)
    return found


def shown(
    receipts: Mapping[str, Mapping[str, Any]], layout: str
) -> dict[Pair, list[str]]:
    """What receipts say was equal: quantization, dtype, mode and hardware by pair."""
    found: dict[Pair, list[str]] = {}
    for name, receipt in receipts.items():
        for case in receipt.get("parity", ()):
            if "method" not in case or case["equal"] is not True:
                continue
            if case.get("layout", "range") != layout:
                continue
            words = [case["quantization"] or "unquantized", case["dtype"]]
            words += ["with biases"] if case.get("bias") else []
            words += case.get("modes", ())
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


def render(pairs: Iterable[Pair], evidence: Mapping[Pair, list[str]]) -> str:
    """Write the table of what a layout serves.

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
    return "\n".join(lines)


def generate(receipts: Mapping[str, Mapping[str, Any]], wheel: WheelFiles) -> str:
    """Write the table of docs/kernels.md.

    Args:
        receipts: All receipts by name.
        wheel: The pin's wheel.

    """
    modules = [x for x in wheel.names if x.startswith(LAYERS) and x.endswith(".py")]
    files = {name: wheel.read(name) for name in modules}
    pairs = admitted(TABLE.read_text())
    parts = []
    for layout, members in pairs.items():
        parts += [f"## Layout {layout}", render(members, shown(receipts, layout))]
    served = {method for members in pairs.values() for method, _ in members}
    refused = sorted(methods_of_pin(files) - served)
    names = ", ".join(f"`{method}`" for method in refused)
    return "\n\n".join([*parts, f"Refused by name, with every kernel: {names}."])
