"""Images made for a test, and what to look for in them."""

import json
import os
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.cpu_base import debian_rootfs
from recipe.engine import Build, Engine
from recipe.image import Result, build_image, default_platform
from recipe.paths import cache_dir
from recipe.pin import Flavor, load_pin
from recipe.wheel import NATIVE, fetch_wheel

CPU = load_pin().flavor("cpu")
PLATFORM = default_platform(CPU)
SITE = f"/usr/local/lib/python{CPU.base_python}/dist-packages"
TIME = 1_600_000_000
SMALL_PACKAGES = ("python3", "python3-pip")
SMALL = "localhost/pinned-hot-test-small:base"

# A base with every field that a careless builder drops or changes.
SMALL_CONTAINERFILE = f"""
FROM scratch
ADD debian.tar /
COPY site/ {SITE}/
ENV PATH=/usr/local/bin:/usr/bin:/bin ANSWER=42
LABEL org.opencontainers.image.title=small kept=yes
WORKDIR /vllm-workspace
EXPOSE 8000/tcp
VOLUME /data
STOPSIGNAL SIGINT
ENTRYPOINT ["vllm", "serve"]
CMD ["--help"]
"""


@dataclass
class Workshop:
    """Makes images with one engine and forgets them at the end.

    Attributes:
        engine: The engine.
        made: Names of the images made so far.
    """

    engine: Engine
    made: list[str]

    def name(self) -> str:
        """Return a fresh image name."""
        self.made.append(f"localhost/pinned-hot-test:{os.getpid()}-{len(self.made)}")
        return self.made[-1]

    def small_base(
        self, platform: str = PLATFORM, tag: str = SMALL, flavor: Flavor = CPU
    ) -> str:
        """Make a base with a pin's Python files, and neither torch nor extensions."""
        self.made.append(tag)
        with tempfile.TemporaryDirectory(dir=cache_dir()) as work:
            context = Path(work)
            (context / "Containerfile").write_text(SMALL_CONTAINERFILE)
            os.link(debian_rootfs(SMALL_PACKAGES, install=True), context / "debian.tar")
            with zipfile.ZipFile(fetch_wheel(flavor)) as wheel:
                names = [n for n in wheel.namelist() if not n.endswith(NATIVE)]
                wheel.extractall(context / "site", names)
            job = Build(context / "Containerfile", context, tag, platform)
            self.engine.build(job)
        return tag

    def derive(
        self,
        base: str,
        *instructions: str,
        files: Mapping[str, Path] | None = None,
        platform: str = PLATFORM,
    ) -> str:
        """Build an image on another one and return its name."""
        tag = self.name()
        with tempfile.TemporaryDirectory(dir=cache_dir()) as work:
            context = Path(work)
            lines = [f"FROM {base}", *instructions, ""]
            (context / "Containerfile").write_text("\n".join(lines))
            for name, path in (files or {}).items():
                os.link(path, context / name)
            job = Build(context / "Containerfile", context, tag, platform)
            self.engine.build(job)
        return tag

    def overlay(self, base: str, flavor: Flavor = CPU, **options: Any) -> Result:
        """Build the overlay image on a base."""
        options = {"tag": self.name(), "timestamp": TIME} | options
        return build_image(self.engine, flavor, base=base, **options)

    def shell(self, image: str, script: str, stdin: bytes = b"") -> str:
        """Run a shell script in an image and return what it prints."""
        return self.engine.output_of(image, ["sh", "-c", script], stdin).decode()

    def command(self, *arguments: str) -> str:
        """Run the engine's own program and return what it prints."""
        command = [self.engine.name, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def forget(self, tag: str) -> None:
        """Remove an image, if it is there."""
        if self.engine.inspect(tag) is not None:
            self.command("rmi", "--force", tag)

    def clean(self) -> None:
        """Remove every image that was made, the latest first."""
        for tag in reversed(self.made):
            self.forget(tag)


def top_layer(path: Path) -> tuple[dict[str, tarfile.TarInfo], dict[str, Any]]:
    """Return the members of the uppermost layer of a docker archive, and its config.

    Names are exactly as in the layer, so that a leading ``/`` or ``./`` shows.
    """
    with tarfile.open(path) as archive:
        manifest = _load(archive, "manifest.json")[0]
        stream = archive.extractfile(manifest["Layers"][-1])
        with tarfile.open(fileobj=stream) as layer:
            members = {member.name: member for member in layer.getmembers()}
        return members, _load(archive, manifest["Config"])


def _load(archive: tarfile.TarFile, name: str) -> Any:
    stream = archive.extractfile(name)
    assert stream is not None
    return json.load(stream)
