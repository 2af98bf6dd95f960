"""Run git so that nobody's configuration can change what it does."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from recipe.errors import RecipeError

# Settings that would change bytes, run hooks or ask questions.
_SETTINGS = (
    "core.autocrlf=false",
    "core.safecrlf=false",
    "core.eol=lf",
    "core.fileMode=true",
    "core.quotePath=true",
    "core.hooksPath=/dev/null",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "apply.whitespace=nowarn",
    "apply.ignoreWhitespace=no",
    "commit.gpgSign=false",
    "diff.suppressBlankEmpty=false",
    "format.headers=",
    "i18n.commitEncoding=UTF-8",
    "i18n.logOutputEncoding=UTF-8",
    "log.showSignature=false",
    "gc.auto=0",
    "maintenance.auto=false",
)


def git_env(cwd: Path) -> dict[str, str]:
    """Return the environment for a git process started in ``cwd``.

    No ``GIT_*`` variable, no system or user configuration, and no repository above
    ``cwd``: inside one, ``git apply`` skips files outside its prefix and exits 0.
    """
    env = {key: value for key, value in os.environ.items() if key[:4] != "GIT_"}
    return env | {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(cwd.resolve().parent),
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
        "TZ": "UTC",
    }


def run_git(
    args: Sequence[str],
    cwd: Path,
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[bytes]:
    """Run git and capture its output.

    Args:
        args: Arguments after ``git``.
        cwd: Where to run it.
        stdin: Bytes to feed.
        env: Variables on top of :func:`git_env`.
        check: Raise if the status is not 0.

    Raises:
        subprocess.CalledProcessError: With ``check``, the command failed.
    """
    settings = [part for setting in _SETTINGS for part in ("-c", setting)]
    try:
        return subprocess.run(
            ["git", *settings, *args],
            cwd=cwd,
            input=stdin,
            env=git_env(cwd) | (env or {}),
            capture_output=True,
            check=check,
        )
    except FileNotFoundError:
        if shutil.which("git"):
            raise
        raise RecipeError("git is missing; on Debian: apt-get install git") from None
