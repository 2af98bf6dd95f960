"""A tiny pin, a tiny series, and the tools, for tests that need no vLLM."""

import base64
import hashlib
import os
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from recipe.pin import Flavor, Pin, load_pin
from recipe.series import Sources

CACHE = "cache"
SAMPLES = Path(__file__).parent / "samples"

_TWIN = """def {name}():
    first = 1
    second = 2
    third = 3
    fourth = 4
    fifth = 5
    return first

"""

# The pin in small: each file has one property that a careless tool trips over.
PIN_FILES: dict[str, bytes] = {
    "vllm/__init__.py": b"NAME = 'tiny'\n",
    "vllm/plain.py": b"".join(b"line_%02d = %d\n" % (n, n) for n in range(40)),
    "vllm/twins.py": "".join(_TWIN.format(name=f"f{n}") for n in range(6)).encode(),
    "vllm/imports.py": b"import a\nimport b\n\nCODE = 1\n",
    "vllm/crlf.py": b"".join(b"crlf_%d = %d\r\n" % (n, n) for n in range(9)),
    "vllm/no_eol.py": b"one = 1\ntwo = 2\nthree = 3",
    "vllm/feeds.py": "one = 1\n\f\ntwo = '\x85 \u2028'\nthree = 3\nfour = 4\n".encode(),
    "vllm/latin.py": b"# coding: latin-1\none = '\xe9'\ntwo = 2\nthree = 3\n",
    "vllm/tool.py": b"#!/usr/bin/env python3\none = 1\ntwo = 2\nthree = 3\n",
    "vllm/gaps.py": b"one = 1\n\ntwo = 2\n\nthree = 3\n\nfour = 4\n",
    "vllm/sub/__init__.py": b"",
    "vllm/data.json": b'{\n  "one": 1,\n  "two": 2\n}\n',
}
EXECUTABLE = "vllm/tool.py"
FLAVORS = ("cpu", "cuda")

MESSAGE = """{subject}

Why: a user cannot do this without the change, and this says why.

Why here: a plugin cannot do it, for a reason that is written here.

Default: nothing changes unless the flag is given on the command line.

Buys: {buys}
RFC: https://github.com/vllm-project/vllm/issues/38256
Upstream-Status: Pending [a sample]
Related: none (a sample)
{adds}Test: tests/sample/test_new.py
Drop-when: upstream can do this without the patch
Signed-off-by: Ada Example <ada@example.org>
"""
NEW_FILES: dict[str, bytes] = {
    "vllm/fresh/__init__.py": b"",
    "vllm/fresh/code.py": b"VALUE = 1\n",
    "tests/sample/test_new.py": b"def test_new():\n    assert 1 + 1 == 2\n",
}


def message(subject: str, adds: tuple[str, ...] = ()) -> str:
    """Return a commit message that satisfies every rule."""
    lines = "".join(f"Adds: {path}\n" for path in adds)
    return MESSAGE.format(subject=subject, buys=f"what {subject} buys", adds=lines)


def write_files(root: Path, files: Mapping[str, bytes]) -> None:
    """Write files below a directory, with the modes of the pin."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if name == EXECUTABLE else 0o644)


def snapshot(root: Path) -> dict[str, tuple[int, int, str]]:
    """Return mode, mtime in ns and sha256 of every file below a directory."""
    table = {}
    for path in sorted(root.rglob("*")):
        if path.is_file():
            status = path.stat()
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            name = path.relative_to(root).as_posix()
            table[name] = (status.st_mode, status.st_mtime_ns, digest)
        else:
            table[path.relative_to(root).as_posix() + "/"] = (0, 0, "")
    return table


def make_wheel(
    folder: Path, package: str, version: str, files: dict[str, bytes]
) -> Path:
    """Write a real wheel that pip installs."""
    stem = f"{package.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    contents = files | {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\n"
        b"Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
        record += f"{name},sha256={digest.decode()},{len(data)}\n"
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = folder / f"{stem}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6))
            mode = 0o755 if name == EXECUTABLE else 0o644
            entry.external_attr = (0o100000 | mode) << 16
            archive.writestr(entry, data)
    return wheel


def make_pin(
    cache: Path,
    version: str | None = None,
    *,
    name: str | None = None,
    changes: Mapping[str, bytes | None] | None = None,
    flavors: tuple[str, ...] = FLAVORS,
) -> Pin:
    """Put tiny wheels into a cache directory and return a pin on them.

    The flavors hold the same files but for one, as the real ones do.

    Args:
        cache: The cache directory.
        version: Its release; the real first pin's by default.
        name: Its name, likewise.
        changes: Files that differ from those of the tiny pin, ``None`` for gone ones.
        flavors: Which builds there are.
    """
    real = load_pin()
    version = version or real.version
    made: dict[str, Flavor] = {}
    for flavor in flavors:
        build = {"vllm/build.py": f"FLAVOR = {flavor!r}\n".encode()}
        wanted = {**PIN_FILES, **build, **(changes or {})}
        files = {path: data for path, data in wanted.items() if data is not None}
        package = real.flavors[flavor].package
        wheel = make_wheel(cache / "pinned-hot-experts/wheels", package, version, files)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        made[flavor] = replace(
            real.flavors[flavor], version=version, wheel=wheel.name, sha256=digest
        )
    return replace(real, name=name or real.name, version=version, flavors=made)


def git(repo: Path, *args: str) -> str:
    """Run the developer's git, with an identity and no configuration."""
    env = os.environ | {
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_AUTHOR_NAME": "Ada Example",
        "GIT_AUTHOR_EMAIL": "ada@example.org",
        "GIT_AUTHOR_DATE": "2026-01-02T03:04:05+0900",
        "GIT_COMMITTER_NAME": "Bob",
        "GIT_COMMITTER_EMAIL": "bob@example.org",
    }
    command = ["git", *args]
    result = subprocess.run(command, cwd=repo, env=env, capture_output=True, check=True)
    return result.stdout.decode(errors="replace")


def commit(
    repo: Path,
    text: str,
    edits: Mapping[str, tuple[bytes, bytes]],
    new: Mapping[str, bytes] | None = None,
) -> None:
    """Commit edits, each a pair of old and new bytes, and new files."""
    for name, (old, fresh) in edits.items():
        data = (repo / name).read_bytes()
        assert data.count(old) == 1, (name, old)
        (repo / name).write_bytes(data.replace(old, fresh))
    write_files(repo, new or {})
    git(repo, "add", "--all")
    git(repo, "commit", "--quiet", "-m", text)


def sample(name: str) -> Path:
    """Return the path of a sample diff."""
    return SAMPLES / name


def one_patch(root: Path, patch: Path, name: str = "0001-sample.patch") -> Sources:
    """Make a series of one patch, without a lock."""
    sources = Sources(root)
    sources.patches.mkdir(parents=True)
    shutil.copyfile(patch, sources.patches / name)
    (sources.patches / "series").write_text(f"# what it buys\n{name}\n")
    return sources
