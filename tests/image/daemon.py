"""A docker daemon and a registry that belong to one test session."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipe.paths import cache_dir

PROGRAMS = ("dockerd", "containerd", "runc", "docker-registry")
START_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0
# Nothing of the machine is used or changed: no network of its own, no packet filter,
# no control groups of an init system.
OPTIONS = (
    *("--bridge=none", "--iptables=false", "--ip6tables=false"),
    *(
        "--ip-forward=false",
        "--ip-masq=false",
        "--exec-opt=native.cgroupdriver=cgroupfs",
    ),
    *("--insecure-registry=127.0.0.0/8", "--log-level=warn"),
)


def why_not() -> str | None:
    """Return why no daemon can be started here, ``None`` if one can."""
    if os.geteuid():
        return "dockerd needs root"
    if client() is None:
        return "no docker client is installed; on Debian: apt-get install docker.io"
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return (
            f"{', '.join(missing)}: not installed; on Debian: apt-get install "
            "docker.io docker-registry"
        )
    return None


def _path() -> str:
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


def client() -> str | None:
    """Return the client that came with the daemon, or the first one.

    A newer one without its buildx component cannot use BuildKit.
    """
    return shutil.which("docker", path="/usr/bin") or shutil.which("docker")


@contextmanager
def docker_daemon() -> Iterator[Path]:
    """Start a daemon on a private socket and data root; yield the socket.

    The data lie in the cache directory, which has the room, and are removed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="docker.") as run,
        tempfile.TemporaryDirectory(dir=cache_dir(), prefix="docker.") as data,
    ):
        home = Path(run)
        (home / "bin").mkdir()
        program = client()
        assert program is not None
        (home / "bin/docker").symlink_to(program)
        command = ["dockerd", f"--host=unix://{home / 'docker.sock'}", *OPTIONS]
        command += [f"--data-root={data}", f"--exec-root={home / 'exec'}"]
        command += [f"--pidfile={home / 'docker.pid'}"]
        with _process(command, home / "dockerd.log") as process:
            _wait(process, home / "dockerd.log", lambda: _answers(home))
            yield home / "docker.sock"


def _answers(home: Path) -> bool:
    command = [
        str(home / "bin/docker"),
        f"--host=unix://{home / 'docker.sock'}",
        "info",
    ]
    return subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Start a registry on a free loopback port; yield its name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        name = f"127.0.0.1:{probe.getsockname()[1]}"
    config = folder / "config.yml"
    config.write_text(
        "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n"
        f"    rootdirectory: {folder / 'data'}\nhttp:\n  addr: {name}\n"
    )
    with _process(
        ["docker-registry", "serve", str(config)], folder / "registry.log"
    ) as process:
        _wait(process, folder / "registry.log", lambda: _serves(name))
        yield name


def _serves(name: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{name}/v2/", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": _path()},
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: "subprocess.Popen[bytes]", log: Path, ready) -> None:
    limit = time.monotonic() + START_LIMIT_S
    while not ready():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < limit, log.read_text()[-3000:]
        time.sleep(0.2)
