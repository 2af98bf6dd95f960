"""Command line: ``python -m recipe VERB …``; each verb lives in its own module."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from recipe.errors import RecipeError

# verb -> module with add_parser(). Only the module of the verb in use is imported.
VERBS = {
    "image": "recipe.image",
    "tree": "recipe.tree",
    "install": "recipe.install",
    "uninstall": "recipe.install",
    "verify": "recipe.install",
    "env": "recipe.env",
    "demo": "recipe.demo",
    "test": "recipe.testing",
    "refresh": "recipe.refresh",
    "series": "recipe.series",
    "stats": "recipe.stats",
    "drift": "recipe.drift",
    "export": "recipe.export",
    "receipts": "recipe.receipts",
}


def _parser(verb: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="build.sh", description="Build, install and test the overlay of vLLM."
    )
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    modules = [VERBS[verb]] if verb in VERBS else dict.fromkeys(VERBS.values())
    for module in modules:
        importlib.import_module(module).add_parser(subparsers)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run one verb.

    Args:
        argv: Arguments without the program name.

    Returns:
        The exit status: 0 on success, 1 for an error that was explained.
    """
    args = _parser(argv[0] if argv else None).parse_args(argv)
    try:
        status: int = args.run(args)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
