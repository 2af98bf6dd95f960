#!/bin/sh
# Entry point: makes a small tooling environment outside the tree, once for each version
# of pyproject.toml, and runs `python -m recipe VERB …` in it. Without a verb: image.
set -eu

root=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/pinned-hot-experts
python=${PYTHON:-python3}

fail() {
    echo "error: $1" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 ||
    fail "$python is missing; on Debian: apt-get install python3 python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old, 3.11 or newer is needed; set PYTHON to one"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module; on Debian: apt-get install python3-venv"

# `python -m recipe` from the root, without a PYTHONPATH that every child would inherit.
recipe='import runpy, sys
sys.path[0] = sys.argv.pop(1)
runpy.run_module("recipe", run_name="__main__", alter_sys=True)'

# The GPU tests run in the Python that serves, on a host that may reach no registry.
[ "${1-} ${2-}" != "test gpu" ] || exec "$python" -B -c "$recipe" "$root" "$@"

key=$({ "$python" --version; cat "$root/pyproject.toml"; } | sha256sum | cut -c1-12)
tools=$cache/tools-$key
if [ ! -e "$tools/ready" ]; then
    echo "making the tooling environment in $tools …" >&2
    mkdir -p "$cache"
    "$python" -m venv --clear "$tools"
    "$python" -c 'import sys, tomllib
for line in tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"]:
    print(line)' "$root/pyproject.toml" >"$tools/requirements.txt"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check \
        -r "$tools/requirements.txt" || fail "pip could not install the tooling; see above"
    touch "$tools/ready"
fi

[ $# -gt 0 ] || set -- image
exec "$tools/bin/python" -B -c "$recipe" "$root" "$@"
