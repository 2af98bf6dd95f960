"""Parts of Markdown pages that are generated: what stands between two comments."""

import re
from pathlib import Path

from recipe.errors import RecipeError


def replace_part(page: Path, name: str, text: str) -> str:
    """Return a page with one generated part replaced.

    Args:
        page: The page; it is not written.
        name: Name of the part, which stands between the comments ``NAME: begin`` and
            ``NAME: end``.
        text: The new part.

    Raises:
        RecipeError: The markers are missing.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    old = page.read_text()
    if not pattern.search(old):
        raise RecipeError(f"{page.name}: no {begin} … {end}; restore the markers")
    return pattern.sub(lambda _: f"{begin}\n{text}\n{end}", old)
