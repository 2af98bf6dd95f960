"""Tell where an image's Python finds vLLM and what it finds there.

Reads ``{"paths": […], "directories": […]}`` (relative to site-packages) as JSON from
stdin and answers in JSON on stdout. Nothing of vLLM is imported: no GPU, no torch.
"""

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import sys


def main() -> None:
    """Answer one question."""
    question = json.load(sys.stdin)
    spec = importlib.util.find_spec("vllm")
    answer: dict[str, object] = {
        "executable": sys.executable,
        "launcher": launcher(),
        "machine": platform.machine(),
        "python": "{}.{}".format(*sys.version_info[:2]),
        "site": None,
    }
    if spec is not None and spec.origin is not None:
        package = os.path.dirname(os.path.realpath(spec.origin))
        site = os.path.dirname(package)
        state = os.stat(package)
        answer.update(
            site=site,
            on_path=site in {os.path.realpath(path) for path in sys.path if path},
            owner=[state.st_uid, state.st_gid],
            directory_mode=state.st_mode & 0o777,
            file_mode=os.stat(spec.origin).st_mode & 0o777,
            sha256={path: sha256(site, path) for path in question["paths"]},
            moved={
                path: os.path.realpath(os.path.join(site, path))
                for path in question["directories"]
                if os.path.realpath(os.path.join(site, path))
                != os.path.join(site, path)
            },
        )
    json.dump(answer, sys.stdout)


def launcher() -> str | None:
    """Return the interpreter that the ``vllm`` command runs on, if it is a script."""
    script = shutil.which("vllm")
    if script is None:
        return None
    with open(script, "rb") as stream:
        line = stream.readline(1000)
    words = line[2:].decode(errors="replace").split()
    if not line.startswith(b"#!") or not words:
        return None
    found = shutil.which(words[-1]) if words[0].endswith("/env") else words[0]
    return found


def sha256(site: str, path: str) -> str | None:
    """Return the hash of a file, ``None`` if there is none."""
    try:
        with open(os.path.join(site, path), "rb") as stream:
            return hashlib.sha256(stream.read()).hexdigest()
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    main()
