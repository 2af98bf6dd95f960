"""Container engines: docker, podman and buildah behind one small interface.

Nothing on the machine is configured. What an engine needs here and not elsewhere is
passed on its command line.
"""

import json
import os
import platform as host
import re
import resource
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from recipe.errors import RecipeError
from recipe.system import apt_install, is_debian_root

# Bit of CAP_SYS_RESOURCE in CapEff, from linux/capability.h.
CAP_SYS_RESOURCE = 24
MISSING = "not installed"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Image:
    """An image that an engine holds.

    Attributes:
        id: Digest of the image's configuration, ``sha256:…``.
        digest: Digest of its manifest; the id where the engine keeps no manifest.
        names: ``name@digest`` under which registries know it.
        platform: Operating system and architecture, such as ``linux/amd64``.
        config: What a container inherits: ``Entrypoint``, ``Cmd``, ``Labels`` …
        layers: Digests of the uncompressed layers, lowest first.
    """

    id: str
    digest: str
    names: tuple[str, ...]
    platform: str
    config: dict[str, Any]
    layers: tuple[str, ...]

    @property
    def labels(self) -> dict[str, str]:
        """Labels, empty if there are none."""
        return self.config.get("Labels") or {}


@dataclass(frozen=True)
class Mount:
    """A host directory that RUN sees.

    Attributes:
        source: The directory on the host.
        target: Where the container sees it.
        writable: Whether the container may write there.
    """

    source: Path
    target: PurePosixPath
    writable: bool = False

    @property
    def flag(self) -> str:
        """The ``--volume`` flag, the same for every engine."""
        mode = "rw" if self.writable else "ro"
        return f"--volume={self.source}:{self.target}:{mode}"


@dataclass(frozen=True)
class Build:
    """One build from a Containerfile.

    Attributes:
        containerfile: The file.
        context: Directory that COPY and ADD read from.
        tag: Name of the result.
        platform: Operating system and architecture of the result.
        arguments: Values of ARG.
        labels: Labels to set.
        timestamp: Time of all files, seconds since 1970; ``None`` to keep theirs.
        mounts: Host directories that RUN sees.
        verbose: Show what the build prints.
    """

    containerfile: Path
    context: Path
    tag: str
    platform: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    timestamp: int | None = None
    mounts: Sequence[Mount] = ()
    verbose: bool = False


@dataclass(frozen=True)
class Archive:
    """Where to write an image as a file.

    Attributes:
        format: ``oci-archive`` or ``docker-archive``.
        path: The file.
    """

    format: str
    path: Path


def parse_archive(text: str) -> Archive:
    """Read an ``--output`` value, ``oci-archive:PATH`` or ``docker-archive:PATH``.

    Raises:
        RecipeError: The format is another one, or the directory does not exist.
    """
    kind, _, name = text.partition(":")
    if kind not in ("oci-archive", "docker-archive") or not name:
        raise RecipeError(
            f"--output {text}: write oci-archive:PATH or docker-archive:PATH"
        )
    path = Path(name).absolute()
    if not path.parent.is_dir():
        raise RecipeError(f"--output {text}: {path.parent} is no directory; make it")
    if path.is_dir():
        raise RecipeError(f"--output {text}: {path} is a directory; name a file in it")
    return Archive(kind, path)


def host_platform() -> str:
    """Return this machine's platform as images spell it."""
    machine = host.machine()
    return f"linux/{ARCHITECTURES.get(machine, machine)}"


def ulimit_flags() -> list[str]:
    """Return the ``--ulimit`` flags that ``podman run`` needs on this machine.

    As root podman raises two limits above the machine's own, which the kernel refuses
    without CAP_SYS_RESOURCE (inside a container, say). Then the limits are kept, save
    that podman first lowers its own number of processes to the kernel's ``pid_max``.
    """
    if os.geteuid() or _has_capability(CAP_SYS_RESOURCE):
        return []
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    largest = int(Path("/proc/sys/kernel/pid_max").read_text())
    if processes == resource.RLIM_INFINITY or processes > largest:
        processes = largest
    flags = [f"--ulimit=nproc={processes}:{processes}"]
    if files != resource.RLIM_INFINITY:
        flags.append(f"--ulimit=nofile={files}:{files}")
    return flags


def memlock_flags() -> list[str]:
    """Return the flags with which a container may lock any amount of memory.

    Raising the limit needs CAP_SYS_RESOURCE on this side; without it the container gets
    the capability that the limit does not bind.
    """
    if os.geteuid() or _has_capability(CAP_SYS_RESOURCE):
        return ["--ulimit=memlock=-1:-1"]
    return ["--cap-add=IPC_LOCK"]


def _has_capability(bit: int) -> bool:
    status = Path("/proc/self/status")
    if not status.exists():
        return True
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
    return found is None or bool(int(found[1], 16) >> bit & 1)


class Engine(ABC):
    """What building an overlay asks of a container engine.

    Attributes:
        name: Its program.
        reproducible: Whether two builds of one input give one digest.
    """

    name: ClassVar[str]
    reproducible: ClassVar[bool] = True

    @abstractmethod
    def unusable(self) -> str | None:
        """Return why the engine does not work here, ``None`` if it does."""

    @abstractmethod
    def inspect(self, ref: str) -> Image | None:
        """Return an image that the engine holds, ``None`` if it does not."""

    @abstractmethod
    def output_of(self, image: str, argv: Sequence[str], stdin: bytes) -> bytes:
        """Run a command in a throw-away container and return its stdout.

        It runs as root in ``/``, without the image's entry point and without network.
        """

    @abstractmethod
    def build(self, job: Build) -> None:
        """Build an image in one layer per instruction that adds files."""

    @abstractmethod
    def save(self, ref: str, archive: Archive) -> None:
        """Write an image to a file, replacing one that is there."""

    def pull(self, ref: str, platform: str) -> None:
        """Fetch an image from its registry.

        Raises:
            RecipeError: The registry did not give it.
        """
        self._call("pull", f"--platform={platform}", ref)

    def _capture(
        self, *arguments: str, stdin: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        command = [self.name, *arguments]
        return subprocess.run(command, input=stdin, capture_output=True)

    def _output(self, *arguments: str, stdin: bytes = b"") -> bytes:
        done = self._capture(*arguments, stdin=stdin)
        if done.returncode:
            message = done.stderr.decode(errors="replace").strip()
            raise RecipeError(
                f"{self.name} {arguments[0]} ended with status {done.returncode}: "
                f"{message}"
            )
        return done.stdout

    def _call(self, *arguments: str, show: bool = True) -> None:
        """Run a step whose messages, and with ``show`` output, the user sees."""
        stdout = sys.stderr if show else subprocess.DEVNULL
        done = subprocess.run([self.name, *arguments], stdout=stdout)
        if done.returncode:
            raise RecipeError(
                f"{self.name} {arguments[0]} ended with status {done.returncode}; "
                "its own message is above"
            )

    def _works(self, *arguments: str) -> str | None:
        if shutil.which(self.name) is None:
            return MISSING
        done = self._capture(*arguments)
        if not done.returncode:
            return None
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"status {done.returncode}"

    def _build_arguments(self, job: Build) -> list[str]:
        flags = [f"--file={job.containerfile}", f"--tag={job.tag}"]
        flags.append(f"--platform={job.platform}")
        flags += [f"--build-arg={key}={job.arguments[key]}" for key in job.arguments]
        flags += [f"--label={key}={job.labels[key]}" for key in sorted(job.labels)]
        return flags


class _Containers(Engine):
    """podman and buildah: one library, one image store, one builder."""

    def build(self, job: Build) -> None:
        """Build without layers of their own for LABEL and the like."""
        flags = self._build_arguments(job)
        flags += ["--layers=false", "--isolation=chroot", "--pull=never"]
        flags.append("--identity-label=false")
        flags += [mount.flag for mount in job.mounts]
        if not job.verbose:
            flags.append("--quiet")
        if job.timestamp is not None:
            flags.append(f"--timestamp={job.timestamp}")
        self._call("build", *flags, str(job.context), show=job.verbose)


class Podman(_Containers):
    """podman, with or without root."""

    name = "podman"

    def unusable(self) -> str | None:
        """Ask for the runtime too: without one podman builds and cannot run."""
        return self._works("info", "--format={{.Host.OCIRuntime.Name}}")

    def inspect(self, ref: str) -> Image | None:
        """Read ``podman image inspect``."""
        done = self._capture("image", "inspect", ref)
        return None if done.returncode else _docker_style(json.loads(done.stdout)[0])

    def output_of(self, image: str, argv: Sequence[str], stdin: bytes) -> bytes:
        """Use ``podman run``."""
        flags = ["--rm", "--interactive", "--network=none", "--user=0", "--workdir=/"]
        flags += ["--pull=never", f"--entrypoint={argv[0]}", *ulimit_flags()]
        return self._output("run", *flags, image, *argv[1:], stdin=stdin)

    def save(self, ref: str, archive: Archive) -> None:
        """Use ``podman save``, uncompressed, so that digests stay as built."""
        with _replacing(archive.path) as partial:
            flags = [f"--format={archive.format}", f"--output={partial.path}"]
            if archive.format == "oci-archive":
                flags.append("--uncompressed")
            self._call("save", "--quiet", *flags, ref)


class Buildah(_Containers):
    """buildah, which needs no runtime."""

    name = "buildah"

    def unusable(self) -> str | None:
        """Make and remove a container, which touches all that a build touches."""
        reason = self._works("from", "--quiet", "--name=pinned-hot-probe", "scratch")
        if reason is None:
            self._capture("rm", "pinned-hot-probe")
        return reason

    def inspect(self, ref: str) -> Image | None:
        """Read ``buildah inspect``."""
        done = self._capture("inspect", "--type=image", ref)
        if done.returncode:
            return None
        table = json.loads(done.stdout)
        oci = table["OCIv1"]
        return Image(
            id=f"sha256:{table['FromImageID']}",
            digest=table["FromImageDigest"],
            names=(),
            platform=f"{oci['os']}/{oci['architecture']}",
            config=oci.get("config") or {},
            layers=tuple(oci["rootfs"]["diff_ids"]),
        )

    def output_of(self, image: str, argv: Sequence[str], stdin: bytes) -> bytes:
        """Use ``buildah run`` in a working container."""
        made = self._output("from", "--pull-never", "--quiet", image)
        container = made.decode().strip()
        try:
            flags = ["--isolation=chroot", "--user=0", "--workingdir=/"]
            return self._output("run", *flags, container, "--", *argv, stdin=stdin)
        finally:
            self._output("rm", container)

    def save(self, ref: str, archive: Archive) -> None:
        """Use ``buildah push``, uncompressed, so that digests stay as built."""
        with _replacing(archive.path) as partial:
            target = f"{archive.format}:{partial.path}:{ref}"
            self._call("push", "--quiet", "--disable-compression", ref, target)


class Docker(Engine):
    """docker, through whichever daemon the client is set up for."""

    name = "docker"
    # Its builder writes the time of the build into the image.
    reproducible = False

    def unusable(self) -> str | None:
        """Ask the daemon: the client alone builds nothing."""
        return self._works("version", "--format={{.Server.Version}}")

    def inspect(self, ref: str) -> Image | None:
        """Read ``docker image inspect``."""
        done = self._capture("image", "inspect", ref)
        return None if done.returncode else _docker_style(json.loads(done.stdout)[0])

    def output_of(self, image: str, argv: Sequence[str], stdin: bytes) -> bytes:
        """Use ``docker run``."""
        flags = ["--rm", "--interactive", "--network=none", "--user=0", "--workdir=/"]
        flags += ["--pull=never", f"--entrypoint={argv[0]}"]
        return self._output("run", *flags, image, *argv[1:], stdin=stdin)

    def build(self, job: Build) -> None:
        """Build; BuildKit takes the timestamp for what it can."""
        flags = [*self._build_arguments(job), "--quiet"]
        if job.timestamp is not None:
            flags.append(f"--build-arg=SOURCE_DATE_EPOCH={job.timestamp}")
        self._call("build", *flags, str(job.context), show=job.verbose)

    def make_base(
        self,
        rootfs: Path,
        mounts: Sequence[Mount],
        argv: Sequence[str],
        changes: Sequence[str],
        tag: str,
    ) -> None:
        """Import a root file system, run a command in it, commit the result.

        docker's builder mounts nothing from outside its context, so a Containerfile
        whose RUN needs host directories is carried out in these three steps.
        """
        imported = self._output("import", str(rootfs)).decode().strip()
        flags = [mount.flag for mount in mounts]
        created = self._output("create", "--network=host", *flags, imported, *argv)
        container = created.decode().strip()
        try:
            self._call("start", "--attach", container)
            edits = [f"--change={change}" for change in changes]
            self._output("commit", *edits, container, tag)
        finally:
            self._output("rm", "--force", container)

    def save(self, ref: str, archive: Archive) -> None:
        """Use ``docker save``, or skopeo for an OCI archive."""
        if archive.format == "oci-archive" and shutil.which("skopeo") is None:
            raise RecipeError(
                "docker writes no OCI archive by itself; install skopeo, or use "
                "--output docker-archive:PATH or another --engine"
            )
        with _replacing(archive.path) as partial:
            self._output("save", f"--output={partial.path}", ref)
            if archive.format == "docker-archive":
                return
            with _replacing(partial.path) as converted:
                command = ["skopeo", "copy", "--quiet"]
                command.append(f"docker-archive:{partial.path}")
                command.append(f"oci-archive:{converted.path}:{ref}")
                if subprocess.run(command, stdout=sys.stderr).returncode:
                    raise RecipeError("skopeo copy failed; its own message is above")


class _replacing:
    """A file beside ``path`` that takes its place when nothing went wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.path = path.with_name(f".{path.name}.partial")

    def __enter__(self) -> "_replacing":
        self.path.unlink(missing_ok=True)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.path.replace(self._path)
        else:
            self.path.unlink(missing_ok=True)


def _docker_style(table: dict[str, Any]) -> Image:
    prefix = "" if table["Id"].startswith("sha256:") else "sha256:"
    identity = prefix + table["Id"]
    names = tuple(table.get("RepoDigests") or ())
    known = names[0].rpartition("@")[2] if names else identity
    return Image(
        id=identity,
        digest=table.get("Digest") or known,
        names=names,
        platform=f"{table['Os']}/{table['Architecture']}",
        config=table.get("Config") or {},
        layers=tuple(table["RootFS"].get("Layers") or ()),
    )


# In order of preference: the one that people run containers with comes first.
ENGINES: dict[str, type[Engine]] = {
    engine.name: engine for engine in (Docker, Podman, Buildah)
}
INSTALL_COMMANDS = {
    "docker": "apt-get install --yes docker.io",
    "podman": "apt-get install --yes podman runc",
    "buildah": "apt-get install --yes buildah",
}


def pick_engine(wanted: str | None = None, install: bool = False) -> Engine:
    """Return an engine that works here.

    Args:
        wanted: Only this one will do.
        install: With no engine at hand and as root on Debian, install one.

    Raises:
        RecipeError: None works; the message says why and which command installs one.
    """
    candidates = [ENGINES[wanted]] if wanted else list(ENGINES.values())
    reasons = {}
    for candidate in candidates:
        engine = candidate()
        if (reason := engine.unusable()) is None:
            return engine
        reasons[engine.name] = reason
    choice = wanted or "podman"
    command = INSTALL_COMMANDS[choice]
    if install and reasons[choice] == MISSING and is_debian_root():
        apt_install(command)
        return pick_engine(choice)
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    also = ", or as root let --install-deps run it" if not install else ""
    raise RecipeError(f"no container engine works here ({told}). Run: {command}{also}")
