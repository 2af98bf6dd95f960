"""Docker with a daemon and a registry of the tests' own, by both of its builders.

F4 here with a real registry: a base that is named by digest is pulled, recorded, and
stays what it is when its tag is pushed again.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.engine import Docker, parse_archive
from recipe.errors import RecipeError
from recipe.image import Result, plan_overlay, run_command
from recipe.stamp import PACKAGE
from tests.image import daemon
from tests.image.support import CPU, PLATFORM, SITE, TIME, Workshop, top_layer

pytestmark = [
    pytest.mark.image,
    pytest.mark.skipif(daemon.why_not() is not None, reason=str(daemon.why_not())),
]
TOUCHED = min(path for path, old in plan_overlay().before.items() if old)
BUILDERS = {"classic": "0", "BuildKit": "1"}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start daemon and registry; return the registry's name."""
    folder = tmp_path_factory.mktemp("registry")
    with (
        daemon.docker_daemon() as socket,
        daemon.registry(folder) as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("DOCKER_HOST", f"unix://{socket}")
        patch.setenv("PATH", str(socket.parent / "bin"), prepend=":")
        patch.delenv("DOCKER_CONTEXT", raising=False)
        patch.setenv("DOCKER_BUILDKIT", "0")
        yield name


@pytest.fixture(scope="module")
def shop(host: str) -> Workshop:
    engine = Docker()
    assert engine.unusable() is None
    return Workshop(engine, [])


@pytest.fixture(scope="module")
def pushed(shop: Workshop, host: str) -> str:
    """Push the small base and forget it here; return its name by digest."""
    name = f"{host}/vllm/small:release"
    small = shop.small_base()
    shop.command("tag", small, name)
    shop.forget(small)
    exact = push(shop, name)
    assert shop.engine.inspect(exact) is None
    return exact


def push(shop: Workshop, name: str) -> str:
    """Push an image; return its name by digest, with nothing of it left here."""
    shop.command("push", "--quiet", name)
    image = shop.engine.inspect(name)
    assert image is not None
    repository = name.rpartition(":")[0]
    (exact,) = [known for known in image.names if known.startswith(repository)]
    shop.forget(name)
    return exact


@pytest.fixture(scope="module", params=BUILDERS)
def built(
    request: pytest.FixtureRequest, shop: Workshop, pushed: str
) -> Iterator[Result]:
    """Build on the base by digest, with each builder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_BUILDKIT", BUILDERS[request.param])
        yield shop.overlay(pushed)


def test_f4_base_by_digest_is_pulled_and_recorded(built: Result, pushed: str) -> None:
    labels = built.image.labels
    assert labels["org.opencontainers.image.base.name"] == pushed
    assert labels["org.opencontainers.image.base.digest"] == pushed.rpartition("@")[2]
    assert built.base.digest == pushed.rpartition("@")[2]


def test_f5_f7_one_layer_comes_and_the_config_stays(built: Result) -> None:
    for path, data in built.overlay.files.items():
        assert built.contents.sha256[path] is not None, path
        assert data
    assert built.image.layers[:-1] == built.base.layers
    different = ("Labels", "Image")
    theirs, ours = built.base.config, built.image.config
    for key in {*theirs, *ours} - set(different):
        # A builder may leave a field out where another writes it empty.
        assert (ours.get(key) or None) == (theirs.get(key) or None), key
    assert ours["Entrypoint"] == ["vllm", "serve"] and ours["Cmd"] == ["--help"]
    assert built.image.labels | built.base.labels == built.image.labels
    assert built.image.platform == PLATFORM


def test_f10_members_of_the_layer_are_relative(
    shop: Workshop, built: Result, tmp_path: Path
) -> None:
    path = tmp_path / "image.tar"
    shop.engine.save(built.tag, parse_archive(f"docker-archive:{path}"))
    members, _ = top_layer(path)
    files = [member for member in members.values() if member.isreg()]
    assert len(files) >= len(built.overlay.files)
    for name, member in members.items():
        assert not name.startswith(("/", "./")), name
        assert member.isdir() or member.isreg(), name
    assert {member.mtime for member in files} == {TIME}


def test_saved_image_loads_and_runs(
    shop: Workshop, built: Result, tmp_path: Path
) -> None:
    path = tmp_path / "image.tar"
    shop.engine.save(built.tag, parse_archive(f"docker-archive:{path}"))
    shop.forget(built.tag)
    shop.command("load", "--quiet", f"--input={path}")
    script = f"cd /; python3 -c 'import {PACKAGE} as o; print(o.overlay_id())'"
    assert shop.shell(built.tag, script).strip() == built.overlay.digest[:12]


def test_oci_archive_has_a_digest(shop: Workshop, pushed: str, tmp_path: Path) -> None:
    result = shop.overlay(
        pushed, archive=parse_archive(f"oci-archive:{tmp_path}/i.tar")
    )
    assert result.archive_digest is not None
    command = ["skopeo", "inspect", f"oci-archive:{tmp_path}/i.tar"]
    shown = subprocess.run(command, capture_output=True, check=True)
    assert json.loads(shown.stdout)["Digest"] == result.archive_digest


def test_f4_tag_that_is_pushed_again_is_refused_and_the_digest_is_not(
    shop: Workshop, pushed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F4, F5: the tag names another image now; nothing of it is taken for the pin."""
    # BuildKit runs no RUN without a network to attach it to; the overlay has none.
    monkeypatch.setenv("DOCKER_BUILDKIT", BUILDERS["classic"])
    tag = f"{pushed.partition('@')[0]}:release"
    moved = shop.derive(pushed, f"RUN echo '# moved on' >> {SITE}/{TOUCHED}")
    shop.command("tag", moved, tag)
    assert push(shop, tag) != pushed
    with pytest.raises(RecipeError, match=f"{TOUCHED} has sha256") as error:
        shop.overlay(tag)
    assert tag in str(error.value)
    again = shop.overlay(pushed)
    assert again.base.digest == pushed.rpartition("@")[2]


def test_f4_digest_that_is_gone_is_explained(shop: Workshop, host: str) -> None:
    gone = f"{host}/vllm/small@sha256:{'0' * 64}"
    with pytest.raises(RecipeError, match="neither here nor to be had; name one with"):
        shop.overlay(gone)


def test_base_on_the_registry_of_another_platform_is_refused(
    shop: Workshop, pushed: str
) -> None:
    """F6: the platform is asked for, and the one that comes is looked at."""
    other = "linux/arm64" if PLATFORM != "linux/arm64" else "linux/amd64"
    with pytest.raises(RecipeError, match="it is for|neither here nor to be had"):
        shop.overlay(pushed, platform=other)


def test_printed_command_names_docker(shop: Workshop, built: Result) -> None:
    words = run_command(shop.engine, CPU, built.tag).split()
    assert words[:2] == ["docker", "run"] and built.tag in words


def test_the_daemon_is_not_the_machines(host: str) -> None:
    command = ["docker", "info", "--format={{.DockerRootDir}}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    root = Path(shown.stdout.strip())
    assert root.name.startswith("docker.") and root != Path("/var/lib/docker")
