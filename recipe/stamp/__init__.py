"""The stamp: what an overlay leaves in site-packages to tell and check itself.

The package ``vllm_pinned_hot_overlay`` and its metadata are laid out exactly alike by
``install`` and by ``image``. vLLM calls the entry point at start-up in every process.
"""

import json
from collections.abc import Mapping

from recipe.apply import sha256
from recipe.paths import STAMP_SOURCE
from recipe.pin import Pin, load_pin
from recipe.series import Sources
from recipe.tree import series_digest

PACKAGE = "vllm_pinned_hot_overlay"
MANIFEST = f"{PACKAGE}/manifest.json"
FORMAT = 1


def overlay_id(digest: str) -> str:
    """Return the short form of a series digest, for people and logs."""
    return digest[:12]


def stamp_files(
    files: Mapping[str, bytes],
    *,
    sources: Sources | None = None,
    pin: Pin | None = None,
) -> dict[str, bytes]:
    """Return the extra files to place in site-packages.

    The metadata has no RECORD, so that pip neither claims nor removes the package.

    Args:
        files: Bytes of every overlaid file by path relative to site-packages.
        sources: The series, for its digest.
        pin: The release.
    """
    pin = pin or load_pin()
    digest = series_digest(sources)
    manifest = {
        "format": FORMAT,
        "digest": digest,
        "version": pin.version,
        "files": {path: sha256(data) for path, data in sorted(files.items())},
    }
    version = f"{pin.version}+{overlay_id(digest)}"
    info = f"{PACKAGE}-{version}.dist-info"
    metadata = (
        "Metadata-Version: 2.1\n"
        f"Name: {PACKAGE.replace('_', '-')}\n"
        f"Version: {version}\n"
        "Summary: Start-up check of the pinned-hot-experts overlay of vLLM\n"
        "License: Apache-2.0\n"
    )
    entry_points = f"[vllm.general_plugins]\npinned_hot_overlay = {PACKAGE}:check\n"
    return {
        f"{PACKAGE}/__init__.py": (STAMP_SOURCE / "__init__.py").read_bytes(),
        MANIFEST: (json.dumps(manifest, indent=2) + "\n").encode(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/INSTALLER": b"pinned-hot-experts\n",
        f"{info}/entry_points.txt": entry_points.encode(),
    }
