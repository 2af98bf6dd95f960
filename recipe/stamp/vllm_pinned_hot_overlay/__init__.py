# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Start-up check of the pinned-hot-experts overlay.

vLLM calls :func:`check` in every process. It needs nothing but the standard library.
"""

import hashlib
import json
import logging
import os
import sys
from typing import Any

logger = logging.getLogger("vllm.pinned_hot_overlay")

_HERE = os.path.dirname(os.path.abspath(__file__))


def manifest() -> dict[str, Any]:
    """Return what the overlay recorded about itself when it was installed."""
    with open(os.path.join(_HERE, "manifest.json"), encoding="utf-8") as stream:
        table: dict[str, Any] = json.load(stream)
    return table


def overlay_id() -> str:
    """Return the short form of the series digest."""
    return str(manifest()["digest"])[:12]


def check() -> None:
    """Check that the running vLLM is the patched one, byte for byte.

    Raises:
        RuntimeError: vLLM was imported from elsewhere, or an overlaid file is missing
            or differs, for example because pip reinstalled vLLM.
    """
    table = manifest()
    name = table["digest"][:12]
    site = os.path.dirname(_HERE)
    cure = (
        "Put the overlay back with `./build.sh install --python "
        f"{sys.executable}`, or take it away with `./build.sh uninstall`."
    )
    module = sys.modules.get("vllm")
    origin = getattr(module, "__file__", None)
    expected = os.path.join(site, "vllm", "__init__.py")
    if origin is not None and os.path.realpath(origin) != os.path.realpath(expected):
        raise RuntimeError(
            f"overlay {name} is installed in {site}, but vllm was imported from "
            f"{origin}. Start from another directory or clear PYTHONPATH."
        )
    for path, recorded in table["files"].items():
        file = os.path.join(site, *path.split("/"))
        try:
            with open(file, "rb") as stream:
                found = hashlib.sha256(stream.read()).hexdigest()
        except OSError as error:
            raise RuntimeError(
                f"overlay {name}: {file} cannot be read ({error}). {cure}"
            ) from error
        if found != recorded:
            raise RuntimeError(
                f"overlay {name}: {file} has sha256 {found}, the overlay installed "
                f"{recorded}. {cure}"
            )
    logger.info(
        "pinned-hot-experts overlay %s on vLLM %s: %d files verified",
        name,
        table["version"],
        len(table["files"]),
    )
