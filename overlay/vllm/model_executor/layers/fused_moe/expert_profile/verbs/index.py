# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm expert-map index`: a folder of maps, one for each class of traffic.

`index.json` says what each map of the folder is, so that a script that restarts a
server can choose one without reading the maps. It is made from them and can be made
again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from vllm.model_executor.layers.fused_moe.expert_profile.errors import (
    ExpertPlanError,
)
from vllm.model_executor.layers.fused_moe.expert_profile.verbs.common import (
    Answer,
    NamedMap,
    gib,
    percent,
    read_map,
    table,
    write_text,
)

INDEX = "index.json"
FORMAT = "vllm-expert-map-index"
VERSION = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("folder", help="A folder of maps; the index is written to it.")
    parser.add_argument(
        "--check",
        action="store_true",
        help="Write nothing; exit with status 3 if the index is not up to date.",
    )


def maps_at(path: str | Path) -> list[NamedMap]:
    """Read a map, or every map of a folder in the order of their names.

    Raises:
        ExpertMapError: A map cannot be used.
        ExpertPlanError: The folder has no maps, or maps of several models.

    """
    path = Path(path)
    if not path.is_dir():
        return [read_map(path)]
    files = sorted(file for file in path.glob("*.json") if file.name != INDEX)
    if not files:
        raise ExpertPlanError(
            f"{path}: it has no maps (*.json). Write one to it: vllm expert-map plan "
            f"PROFILE --out {path}/NAME.json."
        )
    maps = [read_map(file) for file in files]
    first = maps[0].expert_map.fingerprint
    for one in maps[1:]:
        if differing := one.expert_map.fingerprint.differences(first, one.path.name):
            raise ExpertPlanError(
                f"{path}: {one.path.name} and {maps[0].path.name} are maps of "
                f"different models: fingerprint: {differing}. Keep a folder for each "
                "model."
            )
    return maps


def index_of(maps: list[NamedMap]) -> dict[str, Any]:
    """The index of a folder's maps, a JSON object."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": maps[0].expert_map.fingerprint.model_dump(mode="json"),
        "maps": {
            one.path.stem: {
                "file": one.path.name,
                "sha256": one.sha256,
                "profiles": [profile.label for profile in one.expert_map.profiles],
                "tokens": sum(profile.tokens for profile in one.expert_map.profiles),
                "hot_rows": sum(layer.hot for layer in one.expert_map.layers.values()),
                "hot_bytes": one.expert_map.budget and one.expert_map.budget.hot_bytes,
                "expected_cold_share": one.expert_map.expected_cold_share,
            }
            for one in maps
        },
    }


def run(args: argparse.Namespace) -> Answer:
    """Write or check the index.

    Raises:
        ExpertMapError: A map cannot be used.
        ExpertPlanError: The folder has no maps, or maps of several models.

    """
    folder = Path(args.folder)
    if not folder.is_dir():
        raise ExpertPlanError(f"{folder}: it is no folder. Give one that has maps.")
    index = index_of(maps_at(folder))
    path = folder / INDEX
    text = json.dumps(index, indent=1) + "\n"
    current = path.read_text("utf-8") if path.exists() else None
    if not args.check:
        write_text(path, text)
    rows = [
        (
            name,
            "+".join(one["profiles"]) or "–",
            f"{one['tokens']:,}",
            one["hot_rows"],
            "–" if one["hot_bytes"] is None else gib(one["hot_bytes"]),
            percent(one["expected_cold_share"]),
        )
        for name, one in index["maps"].items()
    ]
    head = ("map", "planned from", "tokens", "hot rows", "hot memory", "cold")
    up_to_date = current == text
    state = f"index        {path}" + (
        ("" if up_to_date else " is not up to date") if args.check else ""
    )
    return Answer(
        {"index": str(path), "up_to_date": up_to_date or not args.check, **index},
        f"{state}\n\n{table(head, rows)}",
        satisfied=up_to_date or not args.check,
    )
