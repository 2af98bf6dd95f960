"""Where things are: inside the repository, and in the cache outside it."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIN_FILE = ROOT / "recipe" / "pin.toml"
STAMP_SOURCE = ROOT / "recipe" / "stamp" / "vllm_pinned_hot_overlay"


def cache_dir() -> Path:
    """Return the cache directory of this project and create it.

    It lies outside the repository: ``$XDG_CACHE_HOME/pinned-hot-experts``, by
    default ``~/.cache/pinned-hot-experts``.
    """
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    path = Path(base) / "pinned-hot-experts"
    path.mkdir(parents=True, exist_ok=True)
    return path
