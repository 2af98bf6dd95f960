"""One patch: a git format-patch mail, read as bytes and held to a strict form."""

import email
import email.policy
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from recipe.errors import RecipeError

# The four lines that git writes for a plain edit of an existing file.
_DIFF = re.compile(rb"diff --git a/(?P<old>\S+) b/(?P<new>\S+)")
_INDEX = re.compile(rb"index [0-9a-f]{40}\.\.[0-9a-f]{40} 100(644|755)")
_HUNK = re.compile(
    rb"@@ -(?P<at>\d+)(?:,(?P<old>\d+))? \+\d+(?:,(?P<new>\d+))? @@(?: .*)?"
)
_NO_NEWLINE = b"\\ No newline at end of file"
# What a patch program takes for the start of a diff, indented or not.
_DIFF_LIKE = re.compile(rb"\s*(diff --git |diff -|--- |\+\+\+ |@@ -|Index: |\*\*\* )")
_REFUSED = {
    b"new file": "creates a file; put the file into overlay/ and claim it with Adds:",
    b"deleted file": "deletes a file; edit it instead",
    b"rename": "renames a file; edit it where it is",
    b"copy": "copies a file; put the copy into overlay/",
    b"similarity": "renames or copies a file; edit it where it is",
    b"dissimilarity": "rewrites a file; keep the edit small",
    b"old mode": "changes a file mode; leave modes alone",
    b"new mode": "changes a file mode; leave modes alone",
    b"GIT binary": "is binary; only text can be reviewed",
    b"Binary files": "is binary; only text can be reviewed",
}
_TRAILER = re.compile(r"(?P<key>[A-Z][A-Za-z-]*): (?P<value>\S.*)")


@dataclass(frozen=True)
class Hunk:
    """One hunk of a diff.

    Attributes:
        start: Line of the old file at which it begins, from 1.
        before: Lines that it stands on, context and removed ones, with line ends.
        after: Lines that it leaves there, context and added ones.
    """

    start: int
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]

    def places(self, lines: Sequence[bytes]) -> list[int]:
        """Return every line, from 1, at which it can stand in a file.

        As git has it: a hunk of a file's first line, or one that ends without context,
        stands at the beginning or the end of a file and nowhere else.
        """
        size = len(self.before)
        first, last = 0, len(lines) - size
        if self.start <= 1:
            last = min(last, 0)
        if self.before[-1:] != self.after[-1:]:
            first = len(lines) - size
        return [
            at + 1
            for at in range(max(first, 0), last + 1)
            if tuple(lines[at : at + size]) == self.before
        ]


@dataclass(frozen=True)
class FileEdit:
    """What a patch does to one file.

    Attributes:
        path: Relative to site-packages.
        added: Lines that come in, with their line ends, each with its count.
        removed: Lines that go out, likewise.
        hunks: The hunks, in order.
    """

    path: str
    added: Counter[bytes]
    removed: Counter[bytes]
    hunks: tuple[Hunk, ...]

    @property
    def changed_lines(self) -> int:
        """Lines added plus lines removed."""
        return self.added.total() + self.removed.total()


def split_lines(data: bytes) -> list[bytes]:
    """Split bytes at LF alone, keeping it: form feeds and the like are no line ends."""
    parts = data.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]]
    return [*lines, parts[-1]] if parts[-1] else lines


@dataclass(frozen=True)
class Patch:
    """One entry of the series.

    Attributes:
        name: File name in ``patches/``.
        path: Where it was read.
        raw: The whole mail.
        diff: The part of ``raw`` that a patch program acts on.
        subject: First line of the message, without ``[PATCH]``.
        author: ``Name <address>`` of the From header.
        date: The Date header.
        paragraphs: The message, without the trailers, blank line by blank line.
        trailers: Values by key, in order.
        edits: The edited files, in order.
    """

    name: str
    path: Path
    raw: bytes
    diff: bytes
    subject: str
    author: str
    date: str
    paragraphs: tuple[str, ...]
    trailers: dict[str, list[str]]
    edits: tuple[FileEdit, ...]

    @property
    def adds(self) -> tuple[str, ...]:
        """Paths below ``overlay/`` that this patch brings along."""
        return tuple(self.trailers.get("Adds", ()))

    @property
    def touched(self) -> tuple[str, ...]:
        """Paths that exist at the pin and that this patch edits."""
        return tuple(edit.path for edit in self.edits)

    @property
    def changed_lines(self) -> int:
        """Lines added plus lines removed."""
        return sum(edit.changed_lines for edit in self.edits)


def read_patch(path: Path) -> Patch:
    """Read one patch file.

    Raises:
        RecipeError: The file is not a plain format-patch mail that edits text files.
    """
    return parse_patch(path.read_bytes(), path)


def parse_patch(raw: bytes, path: Path) -> Patch:
    """Parse the bytes of a patch; see :func:`read_patch`."""
    name = path.name
    if not raw.strip():
        raise RecipeError(f"{name}: empty file; delete it or run ./build.sh refresh")
    head, message, diff = _split(raw, name)
    mail = email.message_from_bytes(head, policy=email.policy.default)
    subject = str(mail["Subject"] or "")
    if not subject.startswith("[PATCH] "):
        raise RecipeError(
            f"{name}: Subject is {subject!r}, expected '[PATCH] …' without a number; "
            "run ./build.sh refresh"
        )
    _check_diff(diff, name, raw.count(b"\n") - diff.count(b"\n"))
    try:
        paragraphs, trailers = _message(message.decode())
    except UnicodeDecodeError as error:
        raise RecipeError(f"{name}: the message is not UTF-8; rewrite it") from error
    return Patch(
        name=name,
        path=path,
        raw=raw,
        diff=diff,
        subject=subject.removeprefix("[PATCH] "),
        author=str(mail["From"] or ""),
        date=str(mail["Date"] or ""),
        paragraphs=paragraphs,
        trailers=trailers,
        edits=_edits(diff, name),
    )


def _split(raw: bytes, name: str) -> tuple[bytes, bytes, bytes]:
    """Split a mail into header, message and diff."""
    start = raw.find(b"\ndiff --git ") + 1
    prose = raw[:start] if start else raw
    # A CR in header or message means that the file was converted.
    for number, line in enumerate(prose.split(b"\n"), 1):
        if line.endswith(b"\r"):
            raise RecipeError(_crlf(name, number))
    head, blank, message = prose.partition(b"\n\n")
    if not blank or not head.startswith(b"From " + b"0" * 40 + b" "):
        raise RecipeError(
            f"{name}: does not start with the header of a format-patch mail with a "
            "zero commit id; run ./build.sh refresh"
        )
    for number, line in enumerate(message.split(b"\n"), head.count(b"\n") + 3):
        if _DIFF_LIKE.match(line) or line.rstrip() == b"---":
            raise RecipeError(
                f"{name}:{number}: the message holds {_show(line)}, which patch "
                "programs take for a diff; quote it with '> ' in front"
            )
    if not start:
        raise RecipeError(
            f"{name}: holds no diff, only prose; give it one or take it off the series"
        )
    return head, message, raw[start:]


def _crlf(name: str, number: int) -> str:
    return f"{name}:{number}: line ends in CR LF; the file was converted, restore it"


def _check_diff(diff: bytes, name: str, offset: int) -> None:
    """Hold the diff to the grammar that git writes for edits of existing files.

    Args:
        diff: Bytes from the first ``diff --git`` on.
        name: Patch name for messages.
        offset: Lines of the mail before the diff.
    """
    if not diff.endswith(b"\n"):
        raise RecipeError(
            f"{name}: the last line has no newline; run ./build.sh refresh"
        )
    lines = enumerate(diff[:-1].split(b"\n"), offset + 1)
    number, line = next(lines)
    seen: set[bytes] = set()
    while line:
        path = _check_file_header(number, line, lines, name)
        if path in seen:
            raise RecipeError(
                f"{name}:{number}: {path.decode()} comes twice; run ./build.sh refresh"
            )
        seen.add(path)
        number, line = _check_hunks(lines, name, path)


def _check_file_header(
    number: int, line: bytes, lines: Iterator[tuple[int, bytes]], name: str
) -> bytes:
    if line.endswith(b"\r"):
        raise RecipeError(_crlf(name, number))
    match = _DIFF.fullmatch(line)
    if match and match["old"] != match["new"]:
        raise RecipeError(f"{name}:{number}: {_REFUSED[b'rename']}")
    if match is None or b'"' in line:
        raise RecipeError(
            f"{name}:{number}: {_show(line)} is not 'diff --git a/PATH b/PATH' with "
            "one plain path twice; only -p1 paths without quoting are taken"
        )
    path: bytes = match["old"]
    expected = (
        _INDEX.pattern,
        b"--- a/" + re.escape(path),
        rb"\+\+\+ b/" + re.escape(path),
    )
    for pattern in expected:
        number, line = next(lines, (number + 1, b""))
        if line.endswith(b"\r"):
            raise RecipeError(_crlf(name, number))
        for start, why in _REFUSED.items():
            if line.startswith(start):
                raise RecipeError(f"{name}:{number}: {path.decode()}: {why}")
        if not re.fullmatch(pattern, line):
            raise RecipeError(
                f"{name}:{number}: {_show(line)} where a full-index -p1 header of "
                f"{path.decode()} should go on; run ./build.sh refresh"
            )
    return path


def _check_hunks(
    lines: Iterator[tuple[int, bytes]], name: str, path: bytes
) -> tuple[int, bytes]:
    """Walk the hunks of one file; return the line that follows them."""
    endings: set[bool] = set()
    number, line = next(lines, (0, b""))
    if not line.startswith(b"@@ "):
        raise RecipeError(
            f"{name}:{number}: {path.decode()} has no hunk; run ./build.sh refresh"
        )
    while line.startswith(b"@@ "):
        # Git repeats the CR of a CR LF file in the function name after the second @@.
        match = _HUNK.fullmatch(line.removesuffix(b"\r"))
        if match is None:
            raise RecipeError(f"{name}:{number}: {_show(line)} is not a hunk header")
        old, new = (int(match[side] or b"1") for side in ("old", "new"))
        while old > 0 or new > 0:
            number, line = next(lines, (number + 1, b"EOF"))
            kind = line[:1]
            if line.strip() == b"" and kind != b" ":
                raise RecipeError(
                    f"{name}:{number}: blank line without its leading space; an "
                    "editor trimmed it, restore the line"
                )
            if kind not in (b" ", b"+", b"-", b"\\"):
                raise RecipeError(
                    f"{name}:{number}: {_show(line)} inside an incomplete hunk; "
                    "run ./build.sh refresh"
                )
            if kind == b"\\":
                _check_marker(name, number, line)
                continue
            old -= kind in b" -"
            new -= kind in b" +"
            endings.add(line.endswith(b"\r"))
        if old < 0 or new < 0:
            raise RecipeError(f"{name}:{number}: hunk is longer than its header says")
        number, line = next(lines, (0, b""))
        if line.startswith(b"\\"):
            _check_marker(name, number, line)
            number, line = next(lines, (0, b""))
        if number and not line.startswith((b"@@ ", b"diff --git ")):
            raise RecipeError(
                f"{name}:{number}: {_show(line)} after a complete hunk; patch programs "
                "would ignore what follows, run ./build.sh refresh"
            )
    if len(endings) > 1:
        raise RecipeError(
            f"{name}: {path.decode()}: some lines end in CR LF and some in LF; "
            "keep the line ends of the file"
        )
    return number, line


def _check_marker(name: str, number: int, line: bytes) -> None:
    if line != _NO_NEWLINE:
        raise RecipeError(f"{name}:{number}: {_show(line)} is no line of a hunk")


def _show(line: bytes) -> str:
    return repr(line[:60].decode(errors="backslashreplace"))


def _edits(diff: bytes, name: str) -> tuple[FileEdit, ...]:
    """Read the edits with unidiff.

    Latin-1 keeps the bytes; splitting at LF alone keeps form feeds and the like.
    """
    text = [
        line + "\n" for line in diff.decode("latin-1").removesuffix("\n").split("\n")
    ]
    try:
        files = PatchSet(text)
    except UnidiffParseError as error:
        raise RecipeError(f"{name}: {error}; run ./build.sh refresh") from error
    edits = []
    for file in files:
        lines: dict[str, Counter[bytes]] = {"+": Counter(), "-": Counter()}
        hunks = []
        for hunk in file:
            sides: dict[str, list[bytes]] = {"-": [], "+": []}
            for line, after in zip(hunk, [*hunk[1:], None], strict=True):
                value = line.value.encode("latin-1")
                if after is not None and after.line_type == "\\":
                    value = value.removesuffix(b"\n")
                if line.line_type in lines:
                    lines[line.line_type][value] += 1
                for kind, side in sides.items():
                    if line.line_type in (" ", kind):
                        side.append(value)
            hunks.append(Hunk(hunk.source_start, tuple(sides["-"]), tuple(sides["+"])))
        edits.append(FileEdit(file.path, lines["+"], lines["-"], tuple(hunks)))
    return tuple(edits)


def _message(text: str) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Split a message into paragraphs and the trailers of the last one."""
    blocks = [
        block for block in re.split(r"\n\s*\n", text.strip("\n")) if block.strip()
    ]
    if not blocks:
        return (), {}
    trailers: dict[str, list[str]] = {}
    key = ""
    for line in blocks[-1].split("\n"):
        if match := _TRAILER.fullmatch(line):
            key = match["key"]
            trailers.setdefault(key, []).append(match["value"])
        elif key and line[:1] in (" ", "\t"):
            trailers[key][-1] += " " + line.strip()
        else:
            return tuple(blocks), {}
    return tuple(blocks[:-1]), trailers
