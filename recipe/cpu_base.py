"""The base image of the CPU flavor: Debian by mmdebstrap, the pinned wheel by pip.

No registry is needed. The result is kept under a tag that names the release and the
hash of everything it is made from, so that it is built once on a machine.
"""

import ast
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from recipe.engine import (
    Build,
    Docker,
    Engine,
    Mount,
    host_platform,
)
from recipe.env import INSTALLER, locked
from recipe.errors import RecipeError
from recipe.paths import ROOT, cache_dir
from recipe.pin import Flavor
from recipe.system import apt_install
from recipe.wheel import fetch_wheel

RECIPE = ROOT / "recipe" / "base"
SUITE = "bookworm"
# Any fixed time: with it two runs of mmdebstrap give the same bytes.
EPOCH = 1_700_000_000
# Where the base sees what it is made from, while it is made. It is the image's own
# working directory, so that no empty mount point is left behind.
WORK = PurePosixPath("/workspace")

# Packages that come with the wheel and serve no purpose in the image. A quarter of its
# size is triton: xgrammar's GPU kernels want it, vLLM's CPU backend turns it off.
WITHOUT = ("triton",)

# pip's settings that say where packages come from; others (target, user …) say where
# they go and are this machine's own business. Value: what a path in it stands for.
PIP_KEYS = {
    "index-url": "index",
    "extra-index-url": "index",
    "find-links": "path",
    "constraint": "path",
    "cert": "path",
    "client-cert": "path",
    "no-index": "",
    "trusted-host": "",
    "proxy": "",
    "timeout": "",
    "retries": "",
    "prefer-binary": "",
    "only-binary": "",
    "no-binary": "",
}
PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


@dataclass(frozen=True)
class PipSettings:
    """pip's settings on this machine, rewritten for a container.

    Attributes:
        text: A pip configuration file.
        files: Local files that it names, by their name in :data:`WORK`.
        directories: Local directories that it names, by their name in :data:`WORK`.
    """

    text: str
    files: dict[str, Path]
    directories: dict[str, Path]


def parse_pip_config(lines: Iterable[str]) -> dict[str, str]:
    """Return the effective settings from the output of ``pip config list``.

    pip lists one ``section.name='value'`` a line. A command's section overrides
    ``global``, the environment overrides both.
    """
    order = ("global", "download", "install", ":env:")
    found: dict[str, dict[str, str]] = {section: {} for section in order}
    for line in lines:
        key, separator, value = line.strip().partition("=")
        section, _, name = key.rpartition(".")
        if separator and section in found:
            found[section][name.removeprefix("default-")] = str(ast.literal_eval(value))
    merged: dict[str, str] = {}
    for section in order:
        merged |= found[section]
    return merged


def pip_settings(config: Mapping[str, str], ca_file: str | None) -> PipSettings:
    """Return the settings that a container needs to resolve packages as this machine.

    Local paths become paths in :data:`WORK`. The links of an index of files must be
    relative and stay within the directory above it.

    Args:
        config: Effective settings, see :func:`parse_pip_config`.
        ca_file: Certificates to trust if pip's settings name none.
    """
    chosen = {key: config[key] for key in PIP_KEYS if config.get(key)}
    if ca_file and "cert" not in chosen:
        chosen["cert"] = ca_file
    settings = PipSettings("", {}, {})
    lines = ["[global]"]
    for key, value in chosen.items():
        words = value.split() if PIP_KEYS[key] else [value]
        moved = [_move(word, PIP_KEYS[key], settings) for word in words]
        lines.append(f"{key} = " + "\n  ".join(moved))
    return replace(settings, text="\n".join(lines) + "\n")


def _move(word: str, kind: str, settings: PipSettings) -> str:
    """Return ``word`` as the container is to see it, noting what it needs for that."""
    url = urlsplit(word)
    if not kind or url.scheme not in ("", "file"):
        return word
    path = Path(unquote(url.path) if url.scheme else word).expanduser().absolute()
    if not path.exists():
        return word
    prefix = "file://" if url.scheme else ""
    if path.is_file():
        name = f"file{len(settings.files)}{path.suffix}"
        settings.files[name] = path
        return f"{prefix}{WORK}/{name}"
    whole = path.parent if kind == "index" else path
    name = f"dir{len(settings.directories)}"
    settings.directories[name] = whole
    return f"{prefix}{WORK / name / path.relative_to(whole)}"


def host_pip_settings() -> PipSettings:
    """Return :func:`pip_settings` for this machine.

    Raises:
        RecipeError: pip does not tell its settings.
    """
    lines = _pip("config", "list").splitlines()
    names = ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
    ca_files = [os.environ[name] for name in names if os.environ.get(name)]
    return pip_settings(parse_pip_config(lines), ca_files[0] if ca_files else None)


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RecipeError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def packages(text: str) -> list[str]:
    """Return the package names of ``recipe/base/packages``."""
    names = (line.partition("#")[0].strip() for line in text.splitlines())
    return [name for name in names if name]


def base_tag(flavor: Flavor) -> str:
    """Return the name of the base: release, and hash of all that it is made from."""
    digest = hashlib.sha256(" ".join([SUITE, flavor.sha256, *WITHOUT]).encode())
    for path in (*sorted(RECIPE.iterdir()), INSTALLER):
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return f"localhost/vllm-cpu-base:{flavor.version}-{digest.hexdigest()[:12]}"


def ensure_base(engine: Engine, flavor: Flavor, platform: str, install: bool) -> str:
    """Return the name of the CPU base, building it if the engine does not hold it.

    Args:
        engine: Where to build and keep it.
        flavor: The CPU flavor.
        platform: Platform of the image; it must be this machine's.
        install: As root on Debian, install mmdebstrap if it is missing.

    Raises:
        RecipeError: A step failed, or mmdebstrap is missing.
    """
    tag = base_tag(flavor)
    if engine.inspect(tag) is not None:
        return tag
    if platform != host_platform():
        raise RecipeError(
            f"--platform {platform}: the CPU base is built by running pip in it, "
            f"here only for {host_platform()}; build it there or name a --base"
        )
    with locked(cache_dir() / "base" / tag.rpartition(":")[2]):
        if engine.inspect(tag) is None:
            _build(engine, flavor, platform, install, tag)
    return tag


def _build(
    engine: Engine, flavor: Flavor, platform: str, install: bool, tag: str
) -> None:
    rootfs = debian_rootfs(packages((RECIPE / "packages").read_text()), install)
    wheel = fetch_wheel(flavor)
    _say(f"building {tag} (takes minutes, once on a machine)")
    settings = host_pip_settings()
    cache = Path(_pip("cache", "dir"))
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="base.") as work:
        setup = Path(work)
        (setup / "pip.conf").write_text(settings.text)
        (setup / "setup.sh").write_text(setup_script(flavor, proxies(os.environ)))
        shutil.copy(INSTALLER, setup)
        os.link(wheel, setup / wheel.name)
        os.link(rootfs, setup / "debian.tar")
        for name, path in settings.files.items():
            shutil.copy(path, setup / name)
        directories = settings.directories | {"cache": cache}
        mounts = [Mount(setup, WORK)]
        for name, path in directories.items():
            (setup / name).mkdir()
            mounts.append(Mount(path, WORK / name, writable=path == cache))
        if isinstance(engine, Docker):
            text = (RECIPE / "Containerfile").read_text()
            engine.make_base(rootfs, mounts, *read_containerfile(text), tag)
        else:
            file = RECIPE / "Containerfile"
            engine.build(Build(file, setup, tag, platform, mounts=mounts, verbose=True))


def setup_script(flavor: Flavor, variables: Mapping[str, str]) -> str:
    """Return the shell script that the Containerfile's RUN executes in the base.

    Args:
        flavor: The build; its wheel lies in :data:`WORK`.
        variables: More environment.
    """
    environment = {
        **variables,
        "PIP_CONFIG_FILE": f"{WORK}/pip.conf",
        "PIP_CACHE_DIR": f"{WORK}/cache",
    }
    exports = [f"export {key}={shlex.quote(environment[key])}" for key in environment]
    command = ["python3", f"{WORK}/{INSTALLER.name}", f"--wheel={WORK}/{flavor.wheel}"]
    command += [f"--without={name}" for name in WITHOUT]
    command.append(f"--cpu={flavor.version}")
    return "\n".join(["set -eu", *exports, f"exec {shlex.join(command)}"]) + "\n"


def proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the proxy variables of an environment, in either case."""
    return {
        name: environment[name]
        for name in environment
        if name.lower() in PROXY_VARIABLES and environment[name]
    }


def read_containerfile(text: str) -> tuple[list[str], list[str]]:
    """Split the base's Containerfile into what docker runs and what it commits with.

    Returns:
        The RUN command's words, and the instructions that ``docker commit`` takes as
        changes.
    """
    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    runs = [line.partition(" ")[2] for line in lines if line.startswith("RUN ")]
    kept = ("ENV ", "WORKDIR ", "ENTRYPOINT ")
    return shlex.split(runs[0]), [line for line in lines if line.startswith(kept)]


def debian_rootfs(names: Sequence[str], install: bool) -> Path:
    """Return a tar file with Debian and some packages, made once on a machine.

    Args:
        names: Packages besides the essential ones.
        install: As root on Debian, install mmdebstrap if it is missing.

    Raises:
        RecipeError: mmdebstrap is missing or failed.
    """
    key = hashlib.sha256(" ".join([SUITE, *names]).encode()).hexdigest()[:12]
    rootfs = cache_dir() / "base" / f"debian-{SUITE}-{key}.tar"
    if rootfs.exists():
        return rootfs
    command = "apt-get install --yes mmdebstrap"
    if shutil.which("mmdebstrap") is None:
        if not install or os.geteuid() or shutil.which("apt-get") is None:
            raise RecipeError(
                f"the CPU base needs mmdebstrap. Run: {command}, or as root let "
                "--install-deps run it; or name an image that has it with --base"
            )
        apt_install(command)
    _say(f"making a Debian {SUITE} file system ({len(names)} packages)")
    rootfs.parent.mkdir(parents=True, exist_ok=True)
    partial = rootfs.with_suffix(f".{os.getpid()}.partial.tar")
    arguments = ["--variant=minbase", f"--include={','.join(names)}"]
    made = subprocess.run(
        ["mmdebstrap", *arguments, SUITE, str(partial)],
        env={**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)},
        stdout=sys.stderr,
    )
    if made.returncode:
        partial.unlink(missing_ok=True)
        raise RecipeError(
            f"mmdebstrap ended with status {made.returncode}; its own message is above"
        )
    partial.replace(rootfs)
    return rootfs


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
