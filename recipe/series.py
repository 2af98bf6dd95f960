"""The patch series: its order, its records, its rules."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recipe.errors import RecipeError
from recipe.patch import Patch, read_patch
from recipe.paths import ROOT
from recipe.pin import Pin, load_pins

NAME = re.compile(r"(?P<number>\d{4})-[a-z0-9]+(-[a-z0-9]+)*\.patch")
# A patch edits Python or JSON of the package: nothing else of upstream is in the wheel.
PATCHABLE = re.compile(r"vllm/[\w./+-]+\.(py|json)")
ADDABLE = re.compile(r"(vllm/[\w./+-]+\.(py|json)|tests/[\w./+-]+)")
WARN_LINES = 40
MAX_LINES = 100

_STATUS = re.compile(
    r"Pending \[.+\]|Submitted \[https://\S+\]|Backport \[.+\]"
    r"|Denied \[https://\S+\]|Inappropriate \[.+\]"
)
_NONE = r"none \(.+\)"
_REFERENCE = re.compile(r"([\w.-]+(/[\w.-]+)?#\d+|https://\S+)( .*)?|" + _NONE)
_PERSON = re.compile(r"[^<>]+ <\S+@\S+>")


@dataclass(frozen=True)
class Sources:
    """Where a series lives.

    Attributes:
        root: Directory that holds ``patches/``, ``overlay/`` and ``tests/``.
        variant: Name of the pin whose variants take the place of patches of the same
            name; ``None`` for the pin that the series is written for.
    """

    root: Path = ROOT
    variant: str | None = None

    def of(self, pin: Pin) -> "Sources":
        """Return the same sources as they are for a pin."""
        first = load_pins()[0].name
        return replace(self, variant=None if pin.name == first else pin.name)

    @property
    def patches(self) -> Path:
        """Directory of the series file and its patches."""
        return self.root / "patches"

    @property
    def overlay(self) -> Path:
        """Directory of the new files, each at its upstream path."""
        return self.root / "overlay"

    @property
    def lock(self) -> Path:
        """File with the hashes of every touched file."""
        return self.variants / "lock.json"

    @property
    def variants(self) -> Path:
        """Directory of the lock and of the patches that only this pin has."""
        return self.patches / self.variant if self.variant else self.patches

    def held(self) -> dict[str, bytes]:
        """Return the bytes of every file below ``patches/``, by relative path."""
        return {
            path.relative_to(self.patches).as_posix(): path.read_bytes()
            for path in sorted(self.patches.rglob("*"))
            if path.is_file()
        }

    def added_file(self, path: str) -> Path:
        """Return where the new file ``path`` is kept."""
        return self.overlay / path


@dataclass(frozen=True)
class Problem:
    """A finding about the series.

    Attributes:
        patch: Name of the patch, or of the file the finding is about.
        text: What is wrong and what to do.
        fatal: False for a warning.
    """

    patch: str
    text: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.patch}: {self.text}"


@dataclass(frozen=True)
class Rule:
    """The rule for one trailer.

    Attributes:
        form: What every value must match.
        example: A value that does, for messages.
        required: Whether it must be there.
        single: Whether it may be there once only.
    """

    form: re.Pattern[str]
    example: str
    required: bool = True
    single: bool = False


TRAILERS = {
    "Buys": Rule(re.compile(r".{10,100}"), "one line for the series file", single=True),
    "Pull-request": Rule(
        re.compile(r"(\[[A-Za-z/]+\])+ .{10,70}"),
        "[MoE][Offload] Title of the pull request that begins with this patch",
        required=False,
        single=True,
    ),
    "RFC": Rule(
        re.compile(r"https://\S+|" + _NONE),
        "https://github.com/vllm-project/vllm/issues/38256",
    ),
    "Upstream-Status": Rule(
        _STATUS,
        "Pending [reason] | Submitted [url] | Backport [version] | Denied [url] | "
        "Inappropriate [reason]",
        single=True,
    ),
    "Related": Rule(_REFERENCE, "vllm#37190 (open; same seam, differs in …)"),
    "Adds": Rule(ADDABLE, "vllm/…/module.py or tests/…", required=False),
    "Test": Rule(re.compile(r"tests/\S+( .*)?"), "tests/…/test_name.py"),
    "Drop-when": Rule(re.compile(r".{10,}"), "the condition in words", single=True),
    "Size": Rule(re.compile(r".{10,}"), "why so many lines", False, single=True),
    "Signed-off-by": Rule(_PERSON, "Name <name@example.org>"),
    "Co-authored-by": Rule(_PERSON, "Name <name@example.org>", required=False),
}
PARAGRAPHS = ("Why:", "Why here:", "Default:")


def parse_series(text: bytes, where: str) -> list[str]:
    """Return the patch names of a series file in order.

    The form is quilt's, narrowed: a line is a name, blank, or a comment.

    Raises:
        RecipeError: A line is anything else, or a name comes twice.
    """
    names: list[str] = []
    for number, line in enumerate(text.decode("utf-8", "replace").split("\n"), 1):
        if "\r" in line:
            raise RecipeError(f"{where}:{number}: line ends in CR LF; write LF")
        if not line.strip() or line.startswith("#"):
            continue
        if not NAME.fullmatch(line):
            raise RecipeError(
                f"{where}:{number}: {line!r} is not NNNN-slug.patch alone on its line "
                "(no options, no comment behind it, lower case); correct it"
            )
        if line in names:
            raise RecipeError(f"{where}:{number}: {line} comes twice; remove one")
        names.append(line)
    return names


def load_series(sources: Sources | None = None) -> list[Patch]:
    """Read the series in order.

    Raises:
        RecipeError: The series file is missing or ill-formed, a listed patch is
            missing, a file in ``patches/`` is not listed, or a patch is not a plain
            format-patch mail.
    """
    sources = sources or Sources()
    series = sources.patches / "series"
    try:
        names = parse_series(series.read_bytes(), str(series))
    except FileNotFoundError:
        raise RecipeError(f"{series} is missing; restore it from git") from None
    there = {path.name for path in sources.patches.iterdir() if path.is_file()}
    if missing := [name for name in names if name not in there]:
        raise RecipeError(f"{series}: {missing[0]} is listed but missing; restore it")
    stray = sorted(there - set(names) - {"series", sources.lock.name})
    if stray:
        raise RecipeError(
            f"{sources.patches / stray[0]} is not listed in {series}; list or remove it"
        )
    for position, name in enumerate(names, 1):
        if int(name[:4]) != position:
            raise RecipeError(
                f"{series}: {name} is number {position} of the series; "
                "run ./build.sh refresh to renumber"
            )
    variants = _variants(sources, names)
    return [
        read_patch((sources.variants if name in variants else sources.patches) / name)
        for name in names
    ]


def _variants(sources: Sources, names: Sequence[str]) -> set[str]:
    """Return the names of the patches that the pin has a variant of.

    Raises:
        RecipeError: A directory of variants belongs to no pin, or a file in it to no
            patch.
    """
    later = {pin.name for pin in load_pins()[1:]}
    found: dict[str, set[str]] = {}
    for folder in sorted(sources.patches.iterdir()):
        if not folder.is_dir():
            continue
        if folder.name not in later:
            raise RecipeError(
                f"{folder}: no later pin of recipe/pin.toml is called so; remove it"
            )
        found[folder.name] = {path.name for path in folder.iterdir()} - {"lock.json"}
        if stray := sorted(found[folder.name] - set(names)):
            raise RecipeError(
                f"{folder / stray[0]}: the series has no patch of this name; rename or "
                "remove it"
            )
    return found.get(sources.variant or "", set())


def overlay_paths(sources: Sources) -> list[str]:
    """Return every path below ``overlay/``, caches of Python left out."""
    if not sources.overlay.is_dir():
        return []
    return sorted(
        path.relative_to(sources.overlay).as_posix()
        for path in sources.overlay.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    )


def check_ownership(patches: Sequence[Patch], sources: Sources) -> list[Problem]:
    """Check that each path has one owner: patches edit it or ``overlay/`` holds it."""
    problems = []
    owner: dict[str, str] = {}
    there = set(overlay_paths(sources))
    for patch in patches:
        for path in patch.adds:
            if path in owner:
                text = f"Adds: {path} is claimed by {owner[path]} too; keep one"
                problems.append(Problem(patch.name, text))
            owner.setdefault(path, patch.name)
            if path not in there:
                text = f"Adds: {path} is not in overlay/; add the file or drop the line"
                problems.append(Problem(patch.name, text))
    for patch in patches:
        for path in patch.touched:
            if path in there:
                text = (
                    f"{path} is in overlay/ and edited here; a path is one or the other"
                )
                problems.append(Problem(patch.name, text))
            if not PATCHABLE.fullmatch(path):
                text = (
                    f"{path} is not vllm/**/*.py or *.json, the only files of upstream "
                    "to be patched in a wheel; new tests go to overlay/tests/"
                )
                problems.append(Problem(patch.name, text))
    for path in sorted(there - set(owner)):
        text = "no patch claims it; add 'Adds: ' + its path to the patch that needs it"
        problems.append(Problem(f"overlay/{path}", text))
    return problems


def check_headers(patches: Sequence[Patch], sources: Sources) -> list[Problem]:
    """Check paragraphs, trailers and size of every patch."""
    problems = []
    for patch in patches:
        problems += [Problem(patch.name, text) for text in _header(patch, sources)]
        if "Size" not in patch.trailers and patch.changed_lines > WARN_LINES:
            fatal = patch.changed_lines > MAX_LINES
            text = (
                f"changes {patch.changed_lines} lines, aim for {WARN_LINES}, limit "
                f"{MAX_LINES}; split it, move code to overlay/ or add Size: reason"
            )
            problems.append(Problem(patch.name, text, fatal))
    return problems


def _header(patch: Patch, sources: Sources) -> list[str]:
    texts = []
    for start in PARAGRAPHS:
        found = [part for part in patch.paragraphs if part.startswith(start + " ")]
        if len(found) != 1 or len(found[0]) < len(start) + 12:
            texts.append(f"needs one paragraph that starts '{start} …' and says it")
    for key, rule in TRAILERS.items():
        values = patch.trailers.get(key, [])
        if rule.required and not values:
            texts.append(f"trailer {key}: is missing; write '{key}: {rule.example}'")
        if rule.single and len(values) > 1:
            texts.append(f"trailer {key}: comes {len(values)} times; keep one")
        for value in values:
            if not rule.form.fullmatch(value):
                texts.append(f"trailer {key}: {value!r} is not like '{rule.example}'")
    for key in patch.trailers:
        if key not in TRAILERS:
            texts.append(
                f"trailer {key}: is not known; choose from {', '.join(TRAILERS)}"
            )
    for value in patch.trailers.get("Test", []):
        path = value.split(" ")[0].split("::")[0]
        if not ((sources.overlay / path).exists() or (sources.root / path).exists()):
            texts.append(f"trailer Test: {path} is neither in overlay/ nor in tests/")
    if patch.author not in patch.trailers.get("Signed-off-by", [patch.author]):
        texts.append(f"no Signed-off-by of the author {patch.author}; add it")
    return texts


def require(problems: Sequence[Problem]) -> None:
    """Raise if a problem is fatal.

    Raises:
        RecipeError: With every fatal problem, one a line.
    """
    fatal = [str(problem) for problem in problems if problem.fatal]
    if fatal:
        raise RecipeError("\n       ".join(fatal))


def show(args: argparse.Namespace) -> int:
    """Print the series as a table and everything that is wrong with it."""
    sources = Sources()
    patches = load_series(sources)
    for patch in patches:
        buys = "; ".join(patch.trailers.get("Buys", ["?"]))
        print(f"{patch.name}  {patch.changed_lines} lines, {len(patch.adds)} new files")
        print(f"    {buys}")
    problems = [*check_ownership(patches, sources), *check_headers(patches, sources)]
    for problem in problems:
        print(f"{'error' if problem.fatal else 'warning'}: {problem}")
    return int(any(problem.fatal for problem in problems))


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Add the verb ``series``."""
    parser = subparsers.add_parser("series", help="list the patches and check them")
    parser.set_defaults(run=show)
