"""The verb ``stats``: how big the series is, and whether it stays within its goals."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recipe.errors import RecipeError
from recipe.patch import Patch
from recipe.series import Sources, load_series, overlay_paths

MAX_PATCHES = 12
MAX_CHANGED_LINES = 250
MAX_HOT_LINES = 60

# The one list of vLLM's code that runs in each forward step, from the scheduler to the
# callers of kernels. Every file below these places counts whole, save `__init__.py`,
# which runs when it is imported.
HOT_PATH = (
    "vllm/_custom_ops.py",
    "vllm/compilation/",
    "vllm/distributed/",
    "vllm/forward_context.py",
    "vllm/ir/",
    "vllm/kernels/",
    "vllm/lora/",
    "vllm/model_executor/custom_op.py",
    "vllm/model_executor/kernels/",
    "vllm/model_executor/layers/",
    "vllm/model_executor/models/",
    "vllm/models/",
    "vllm/v1/attention/",
    "vllm/v1/core/",
    "vllm/v1/cudagraph_dispatcher.py",
    "vllm/v1/engine/core.py",
    "vllm/v1/executor/",
    "vllm/v1/sample/",
    "vllm/v1/spec_decode/",
    "vllm/v1/worker/",
)


@dataclass(frozen=True)
class PatchStats:
    """Size of one patch.

    Attributes:
        name: The patch.
        changed: Lines added plus removed in files of upstream.
        hot: Those of them that are in the hot path.
    """

    name: str
    changed: int
    hot: int


@dataclass(frozen=True)
class Stats:
    """Size of the series.

    Attributes:
        patches: Each patch, in order.
        files: Number of files of upstream that are edited.
        modules: Number of new modules.
        module_lines: Lines in them.
        tests: Number of new test files.
        test_lines: Lines in them.
    """

    patches: tuple[PatchStats, ...]
    files: int
    modules: int
    module_lines: int
    tests: int
    test_lines: int

    @property
    def changed(self) -> int:
        """Lines added plus removed in files of upstream."""
        return sum(patch.changed for patch in self.patches)

    @property
    def hot(self) -> int:
        """Those of them that are in the hot path."""
        return sum(patch.hot for patch in self.patches)

    def missed(self) -> list[str]:
        """Return the goals that are missed, each with its numbers and a cure."""
        texts = []
        if len(self.patches) > MAX_PATCHES:
            texts.append(
                f"{len(self.patches)} patches, the goal is {MAX_PATCHES}; merge two "
                "that go upstream together"
            )
        if self.changed > MAX_CHANGED_LINES:
            texts.append(
                f"{self.changed} changed lines in files of upstream, the goal is "
                f"{MAX_CHANGED_LINES}; move code to overlay/"
            )
        texts += [
            f"{patch.name}: {patch.hot} changed lines in the hot path, the goal is "
            f"{MAX_HOT_LINES}; move code to overlay/ or off the forward step"
            for patch in self.patches
            if patch.hot > MAX_HOT_LINES
        ]
        return texts


def is_hot(path: str) -> bool:
    """Tell whether a file of upstream runs in each forward step."""
    return path.startswith(HOT_PATH) and not path.endswith("/__init__.py")


def measure(patches: Sequence[Patch], sources: Sources) -> Stats:
    """Measure the series."""
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for path in overlay_paths(sources):
        lines = sources.added_file(path).read_bytes().count(b"\n")
        sizes[path.startswith("tests/")].append(lines)
    return Stats(
        patches=tuple(
            PatchStats(
                patch.name,
                patch.changed_lines,
                sum(edit.changed_lines for edit in patch.edits if is_hot(edit.path)),
            )
            for patch in patches
        ),
        files=len({path for patch in patches for path in patch.touched}),
        modules=len(sizes[False]),
        module_lines=sum(sizes[False]),
        tests=len(sizes[True]),
        test_lines=sum(sizes[True]),
    )


def report(stats: Stats) -> Iterator[str]:
    """Yield the lines that tell people about the size."""
    yield f"patches                 {len(stats.patches):6}   goal: {MAX_PATCHES}"
    yield (
        f"changed upstream lines  {stats.changed:6}   goal: {MAX_CHANGED_LINES}"
        f"   in {stats.files} files"
    )
    yield f"lines in the hot path   {stats.hot:6}   goal: {MAX_HOT_LINES} a patch"
    for patch in stats.patches:
        yield f"  {patch.changed:4} changed, {patch.hot:3} hot   {patch.name}"
    yield f"overlay lines           {stats.module_lines:6}   in {stats.modules} modules"
    yield f"overlay test lines      {stats.test_lines:6}   in {stats.tests} files"


def _run(args: argparse.Namespace) -> int:
    sources = Sources()
    stats = measure(load_series(sources), sources)
    print("\n".join(report(stats)))
    if missed := stats.missed():
        raise RecipeError("\n       ".join(missed))
    return 0


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Add the verb ``stats``."""
    parser = subparsers.add_parser("stats", help="size of the series, and its goals")
    parser.set_defaults(run=_run)
