"""The verb ``image``: the overlay as one layer on an image that holds the pinned vLLM.

The base is asked where it keeps vLLM and what its files hash to. A base that is not the
pin, byte for byte in every file that the series touches, is refused.
"""

import argparse
import base64
import json
import os
import posixpath
import shlex
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from recipe.apply import sha256
from recipe.cpu_base import ensure_base
from recipe.engine import (
    ARCHITECTURES,
    ENGINES,
    Archive,
    Build,
    Docker,
    Engine,
    Image,
    memlock_flags,
    parse_archive,
    pick_engine,
    ulimit_flags,
)
from recipe.errors import RecipeError
from recipe.git import run_git
from recipe.lock import load_lock
from recipe.paths import ROOT, cache_dir
from recipe.pin import Flavor, Pin, add_pin_option, load_pin
from recipe.series import Sources
from recipe.stamp import MANIFEST, overlay_id, stamp_files
from recipe.tree import is_runtime, overlay_files, series_digest

CONTAINERFILE = ROOT / "recipe" / "Containerfile"
INSIDE = ROOT / "recipe" / "inside"
LABEL = "pinned-hot-experts"


@dataclass(frozen=True)
class Contents:
    """What an image's Python says about the vLLM in it.

    Attributes:
        python: Minor version of the Python that runs vLLM, such as ``3.12``.
        executable: That Python.
        machine: Architecture as the kernel names it.
        site: Directory that holds ``vllm/``, symbolic links resolved.
        owner: User and group id of ``vllm/``.
        directory_mode: Permission bits of ``vllm/``.
        file_mode: Permission bits of ``vllm/__init__.py``.
        sha256: Hash of each file asked for, ``None`` if it is missing.
        moved: Directories asked for that a symbolic link leads elsewhere, and where.
    """

    python: str
    executable: str
    machine: str
    site: str
    owner: tuple[int, int]
    directory_mode: int
    file_mode: int
    sha256: dict[str, str | None]
    moved: dict[str, str]


@dataclass(frozen=True)
class Overlay:
    """What goes into an image.

    Attributes:
        files: Bytes of each file, stamp included, by path relative to site-packages.
        before: What each of them hashes to in the base; ``None`` if it is absent there.
        digest: Digest of the series.
    """

    files: dict[str, bytes]
    before: dict[str, str | None]
    digest: str


@dataclass(frozen=True)
class Result:
    """A finished image.

    Attributes:
        tag: Its name.
        image: What the engine says of it.
        base: What it was built on.
        overlay: What it brings.
        contents: What its own Python says of it.
        archive: The file it was written to, if any.
        archive_digest: Digest of the manifest in an OCI archive.
    """

    tag: str
    image: Image
    base: Image
    overlay: Overlay
    contents: Contents
    archive: Archive | None
    archive_digest: str | None


def plan_overlay(sources: Sources | None = None, pin: Pin | None = None) -> Overlay:
    """Return what an image gets: the runtime files of the series and the stamp.

    Args:
        sources: The series.
        pin: The release; the first by default.

    Raises:
        RecipeError: The series is not in order, deletes or renames a file, or does not
            apply.
    """
    sources = sources or Sources()
    pin = pin or load_pin()
    files = overlay_files(sources=sources, pin=pin)
    files = {path: files[path] for path in sorted(files) if is_runtime(path)}
    stamp = stamp_files(files, sources=sources, pin=pin)
    at_pin = load_lock(sources, pin).pin
    before = {path: at_pin.get(path) for path in (*files, *stamp)}
    return Overlay(files | stamp, before, series_digest(sources))


def default_platform(flavor: Flavor) -> str:
    """Return the platform of the pinned wheel, such as ``linux/amd64``."""
    for machine, architecture in ARCHITECTURES.items():
        if flavor.wheel.endswith(f"{machine}.whl"):
            return f"linux/{architecture}"
    raise RecipeError(f"{flavor.wheel}: unknown architecture; name one with --platform")


def find_base(engine: Engine, ref: str, platform: str) -> Image:
    """Return a base image, pulling it if the engine does not hold it.

    Raises:
        RecipeError: It cannot be had, or is for another platform.
    """
    image = engine.inspect(ref)
    if image is None:
        _say(f"pulling {ref} for {platform}")
        try:
            engine.pull(ref, platform)
        except RecipeError as error:
            raise RecipeError(
                f"{error}. The base {ref} is neither here nor to be had; name one with "
                "--base, or take --flavor cpu, whose base is built without a registry"
            ) from error
        image = engine.inspect(ref)
        assert image is not None
    if image.platform != platform:
        raise RecipeError(
            f"base {ref}: it is for {image.platform}, asked for is {platform}; name "
            f"that one's own digest with --base, or say --platform {image.platform}"
        )
    return image


def ask(engine: Engine, image: str, paths: Iterable[str]) -> Contents:
    """Ask an image's Python where vLLM is and what it holds.

    Args:
        engine: Engine that holds the image.
        image: Its name or id.
        paths: Files of interest, relative to site-packages.

    Raises:
        RecipeError: There is no Python or no ordinary install of vLLM in the image.
    """
    listed = sorted(paths)
    folders = sorted({posixpath.dirname(path) for path in listed} - {""})
    question = json.dumps({"paths": listed, "directories": folders}).encode()
    answer = _python(engine, image, "python3", "ask.py", question)
    launcher = answer["launcher"]
    if launcher and launcher != answer["executable"]:
        # The `vllm` command may run on another Python than the first on PATH.
        answer = _python(engine, image, launcher, "ask.py", question)
    if answer["site"] is None:
        raise RecipeError(
            f"image {image}: {answer['executable']} finds no package vllm; name an "
            "image that holds the pinned release with --base"
        )
    if not answer["on_path"]:
        raise RecipeError(
            f"image {image}: vllm lies in {answer['site']}, which is not on sys.path "
            "(an editable install?); name an image with an ordinary install with --base"
        )
    return Contents(
        python=answer["python"],
        executable=answer["executable"],
        machine=answer["machine"],
        site=answer["site"],
        owner=(answer["owner"][0], answer["owner"][1]),
        directory_mode=answer["directory_mode"],
        file_mode=answer["file_mode"],
        sha256=answer["sha256"],
        moved=answer["moved"],
    )


def _python(
    engine: Engine, image: str, python: str, script: str, question: bytes
) -> dict[str, Any]:
    argv = [python, "-c", (INSIDE / script).read_text()]
    try:
        answer: dict[str, Any] = json.loads(engine.output_of(image, argv, question))
    except (RecipeError, ValueError) as error:
        raise RecipeError(
            f"image {image}: {python} did not answer ({error}); an image of another "
            "architecture runs here only with qemu's binfmt support"
        ) from error
    return answer


def check_base(
    ref: str, contents: Contents, overlay: Overlay, flavor: Flavor, platform: str
) -> None:
    """Refuse a base that the overlay was not made for.

    Raises:
        RecipeError: It differs in Python, architecture, layout or any touched file.
    """
    pin = load_pin(flavor.version)
    if contents.python != flavor.base_python:
        raise RecipeError(
            f"base {ref}: runs vLLM on Python {contents.python}, the pin records "
            f"{flavor.base_python} for {flavor.name}; name the base of the pin"
        )
    architecture = ARCHITECTURES.get(contents.machine, contents.machine)
    if f"linux/{architecture}" != platform:
        raise RecipeError(
            f"base {ref}: says {platform} but its programs run as {contents.machine}; "
            "its label is wrong, take another one"
        )
    if contents.moved:
        path, target = next(iter(contents.moved.items()))
        raise RecipeError(
            f"base {ref}: {contents.site}/{path} is a link to {target}, outside the "
            "package; name an image with an ordinary install with --base"
        )
    if contents.sha256[MANIFEST] is not None:
        raise RecipeError(
            f"base {ref}: an overlay is in it already; name the image it was built on"
        )
    for path, expected in overlay.before.items():
        found = contents.sha256[path]
        if found == expected:
            continue
        has = f"has sha256 {found}" if found else "is missing"
        wants = f"has sha256 {expected}" if expected else "has no such file"
        raise RecipeError(
            f"base {ref}: {path} {has}, vLLM {pin.version} ({pin.commit}) {wants}; the "
            "base is not the pinned release, name one that is with --base"
        )


def compile_modules(
    engine: Engine, image: str, contents: Contents, files: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Return the ``.pyc`` of every module in ``files``, made by the image's Python.

    Raises:
        RecipeError: A module does not compile there.
    """
    modules = [path for path in files if path.endswith(".py")]
    sources = {path: base64.b64encode(files[path]).decode() for path in modules}
    question = json.dumps({"site": contents.site, "files": sources}).encode()
    answer = _python(engine, image, contents.executable, "compile.py", question)
    return {path: base64.b64decode(answer[path]) for path in answer}


def stage(
    files: Mapping[str, bytes], dest: Path, contents: Contents, timestamp: int
) -> None:
    """Lay files out as they are to be copied, with the base's modes and one time.

    Args:
        files: Bytes by path relative to ``dest``.
        dest: An empty directory.
        contents: The base, for its modes.
        timestamp: Modification time of everything, seconds since 1970.
    """
    for path, data in files.items():
        target = dest / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(contents.file_mode & ~0o111)
    for folder, _, _ in os.walk(dest, topdown=False):
        os.chmod(folder, contents.directory_mode)
    for folder, _, names in os.walk(dest, topdown=False):
        for name in (*names, ""):
            os.utime(os.path.join(folder, name), (timestamp, timestamp))


def image_labels(
    ref: str,
    base: Image,
    contents: Contents,
    overlay: Overlay,
    flavor: Flavor,
    platform: str,
) -> dict[str, str]:
    """Return the labels that tell what an image is made of."""
    pin = load_pin(flavor.version)
    labels = {
        "org.opencontainers.image.base.name": ref,
        "org.opencontainers.image.base.digest": base.digest,
        f"{LABEL}.series": overlay.digest,
        f"{LABEL}.vllm": f"{pin.version} ({pin.commit})",
        f"{LABEL}.python": contents.python,
        f"{LABEL}.platform": platform,
    }
    if revision := git_revision():
        labels["org.opencontainers.image.revision"] = revision
    return labels


def git_revision() -> str | None:
    """Return this checkout's commit, ``-dirty`` if it has changes, ``None`` if none."""
    head = run_git(["rev-parse", "--verify", "HEAD"], ROOT)
    if head.returncode:
        return None
    changes = run_git(["status", "--porcelain"], ROOT).stdout.strip()
    return head.stdout.decode().strip() + ("-dirty" if changes else "")


def default_timestamp() -> int:
    """Return ``SOURCE_DATE_EPOCH``, or the time of this checkout's commit, or 0."""
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not text:
        shown = run_git(["show", "--no-patch", "--format=%ct", "HEAD"], ROOT)
        text = "0" if shown.returncode else shown.stdout.decode().strip()
    if not text.isdecimal():
        raise RecipeError(
            f"SOURCE_DATE_EPOCH={text!r}: write a number of seconds since 1970"
        )
    return int(text)


def build_image(
    engine: Engine,
    flavor: Flavor,
    *,
    base: str | None = None,
    tag: str | None = None,
    platform: str | None = None,
    timestamp: int | None = None,
    archive: Archive | None = None,
    install_deps: bool = False,
    sources: Sources | None = None,
) -> Result:
    """Build the overlay image and check it from inside.

    Args:
        engine: What builds and keeps it.
        flavor: Which build of the pinned release the base holds.
        base: Image to put the overlay on; by default the pin's, or the CPU base.
        tag: Name of the result.
        platform: Platform, by default the pinned wheel's.
        timestamp: Time of everything in the layer, seconds since 1970; by default
            :func:`default_timestamp`.
        archive: File to write the image to.
        install_deps: As root on Debian, install what the CPU base needs.
        sources: The series.

    Raises:
        RecipeError: The base is not the pinned release, or a step failed.
    """
    platform = platform or default_platform(flavor)
    timestamp = default_timestamp() if timestamp is None else timestamp
    overlay = plan_overlay(sources, load_pin(flavor.version))
    ref = base or flavor.base_image
    if ref is None:
        ref = ensure_base(engine, flavor, platform, install_deps)
    origin = find_base(engine, ref, platform)
    build_ref = _exact(engine, ref, origin)
    _say(f"base {ref} ({origin.digest}, {platform}), asking where vLLM lies")
    contents = ask(engine, build_ref, overlay.before)
    check_base(ref, contents, overlay, flavor, platform)
    tag = tag or default_tag(flavor, platform)
    compiled = compile_modules(engine, build_ref, contents, overlay.files)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="image.") as work:
        context = Path(work)
        stage(overlay.files | compiled, context / "overlay", contents, timestamp)
        job = Build(
            CONTAINERFILE,
            context,
            tag,
            platform,
            arguments={
                "BASE": build_ref,
                "SITE": contents.site,
                "OWNER": "{}:{}".format(*contents.owner),
            },
            labels=image_labels(ref, origin, contents, overlay, flavor, platform),
            timestamp=timestamp,
        )
        _say(f"copying {len(overlay.files)} files to {contents.site}")
        engine.build(job)
    after = ask(engine, tag, overlay.files)
    check_result(tag, after, overlay)
    digest = None
    if archive is not None:
        _say(f"writing {archive.format} {archive.path}")
        engine.save(tag, archive)
        digest = archive_digest(archive)
    image = engine.inspect(tag)
    assert image is not None
    return Result(tag, image, origin, overlay, after, archive, digest)


def _exact(engine: Engine, ref: str, image: Image) -> str:
    """Return a name that means exactly this image, now and for the build."""
    if isinstance(engine, Docker):
        # BuildKit takes no bare id of a local image.
        return image.names[0] if image.names else ref
    return image.id.removeprefix("sha256:")


def check_result(tag: str, contents: Contents, overlay: Overlay) -> None:
    """Check that the image's Python finds every overlaid file as it was made.

    Raises:
        RecipeError: It does not.
    """
    for path, data in overlay.files.items():
        found = contents.sha256[path]
        if found != sha256(data):
            raise RecipeError(
                f"image {tag}: {contents.site}/{path} has sha256 {found} instead of "
                f"{sha256(data)}; please report this with the engine's version"
            )


def archive_digest(archive: Archive) -> str | None:
    """Return the manifest digest of an OCI archive, ``None`` for other formats."""
    if archive.format != "oci-archive":
        return None
    with tarfile.open(archive.path) as tar:
        index = tar.extractfile("index.json")
        assert index is not None
        return str(json.load(index)["manifests"][0]["digest"])


def default_tag(flavor: Flavor, platform: str) -> str:
    """Return the name that an image gets if the user gives none."""
    architecture = PurePosixPath(platform).name
    return f"localhost/vllm-pinned-hot:{flavor.version}-{flavor.name}-{architecture}"


def run_command(engine: Engine, flavor: Flavor, tag: str) -> str:
    """Return the command that serves a model from the image on this machine."""
    program = "podman" if engine.name == "buildah" else engine.name
    # vLLM's processes talk through /dev/shm, which containers get too little of.
    words = [program, "run", "--rm", "--ipc=host", "--publish=8000:8000"]
    if program == "podman":
        words += ulimit_flags()
    words += memlock_flags()
    if flavor.name == "cuda":
        gpus = "--gpus=all" if program == "docker" else "--device=nvidia.com/gpu=all"
        words.append(gpus)
    words += ["--volume=MODEL:/model:ro", "--volume=MAP.json:/map.json:ro", tag]
    words += ["/model", "--expert-provider=pinned_hot", "--expert-map=/map.json"]
    return shlex.join(words)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(args: argparse.Namespace) -> int:
    archive = parse_archive(args.output) if args.output else None
    flavor = load_pin(args.pin).flavor(args.flavor)
    engine = pick_engine(args.engine, args.install_deps)
    _say(f"engine: {engine.name}")
    result = build_image(
        engine,
        flavor,
        base=args.base,
        tag=args.tag,
        platform=args.platform,
        timestamp=args.timestamp,
        archive=archive,
        install_deps=args.install_deps,
    )
    labels = result.image.labels
    rows = {
        "image": f"{result.tag} (in {engine.name})",
        "digest": result.image.digest,
        "platform": result.image.platform,
        "base": f"{labels['org.opencontainers.image.base.name']} {result.base.digest}",
        "overlay": f"{overlay_id(result.overlay.digest)}, in {result.contents.site}",
    }
    if result.archive:
        size = result.archive.path.stat().st_size / 1e9
        rows["archive"] = f"{args.output} ({size:.2f} GB)"
    if result.archive_digest:
        rows["its digest"] = result.archive_digest
    if not engine.reproducible:
        rows["note"] = f"{engine.name} writes the time of the build into the digest"
    rows["run"] = run_command(engine, flavor, result.tag)
    for key, value in rows.items():
        print(f"{key:<10}  {value}")
    return 0


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Register the verb ``image``."""
    parser = subparsers.add_parser(
        "image", help="build a container image with the overlay (the default verb)"
    )
    parser.add_argument("--flavor", choices=("cuda", "cpu"), default="cuda")
    add_pin_option(parser)
    parser.add_argument(
        "--base", metavar="REF", help="image that holds the pinned vLLM"
    )
    parser.add_argument(
        "--engine", choices=tuple(ENGINES), help="default: the first that works"
    )
    parser.add_argument(
        "--output", metavar="FORMAT:PATH", help="oci-archive:PATH, docker-archive:PATH"
    )
    parser.add_argument("--tag", help="name of the image")
    parser.add_argument("--platform", help="such as linux/amd64; default: the wheel's")
    parser.add_argument(
        "--install-deps",
        action="store_true",
        help="as root on Debian, apt-get install what is missing",
    )
    parser.add_argument(
        "--timestamp",
        type=int,
        metavar="N",
        help="time of all files in seconds since 1970; default: SOURCE_DATE_EPOCH, or "
        "the commit's time",
    )
    parser.set_defaults(run=_run)
