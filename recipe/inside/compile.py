"""Byte-compile modules for the Python that runs this file.

Reads ``{"site": DIR, "files": {PATH: BASE64}}`` as JSON from stdin, paths relative to
``DIR``; answers ``{PATH OF .pyc: BASE64}`` on stdout. The result is hash-based and
unchecked, so that it stays valid whatever becomes of modification times, and names the
files as they will lie in ``DIR``.
"""

import base64
import json
import os
import py_compile
import sys
import tempfile


def main() -> None:
    """Compile what stdin holds."""
    question = json.load(sys.stdin)
    answer = {}
    with tempfile.TemporaryDirectory() as scratch:
        source = os.path.join(scratch, "source.py")
        compiled = os.path.join(scratch, "compiled.pyc")
        for path, text in sorted(question["files"].items()):
            with open(source, "wb") as stream:
                stream.write(base64.b64decode(text))
            py_compile.compile(
                source,
                cfile=compiled,
                dfile=os.path.join(question["site"], path),
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )
            directory, name = os.path.split(path)
            name = "{}.{}.pyc".format(name[:-3], sys.implementation.cache_tag)
            with open(compiled, "rb") as binary:
                data = base64.b64encode(binary.read()).decode()
            answer[os.path.join(directory, "__pycache__", name)] = data
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
