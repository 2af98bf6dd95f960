"""What an overlay image holds, and which bases are refused.

On a small base with the pin's real Python files; field cases F1 to F12 by their ids.
"""

import base64
import dataclasses
import hashlib
import importlib.util
import json
import posixpath
import re
import struct
from pathlib import Path

import pytest

from recipe.engine import Archive, Docker, Image, parse_archive
from recipe.errors import RecipeError
from recipe.image import Contents, Result, git_revision, plan_overlay, stage
from recipe.patch import parse_patch
from recipe.series import load_series
from recipe.stamp import PACKAGE
from recipe.wheel import fetch_wheel
from tests.image.support import CPU, PLATFORM, SITE, TIME, Workshop, top_layer

pytestmark = pytest.mark.image

TOUCHED = min(path for path, old in plan_overlay().before.items() if old)
SHADOWED = ("/tmp/shadow", "/vllm-workspace")
# Bits 0 and 1 of a .pyc's flags: based on the source's hash; hash checked on import.
HASH_BASED = 1
DELETION = """diff --git a/vllm/old.py b/vllm/old.py
deleted file mode 100644
index 0123456789012345678901234567890123456789..0000000000000000000000000000000000000000
--- a/vllm/old.py
+++ /dev/null
@@ -1 +0,0 @@
-OLD = 1
"""


@pytest.fixture(scope="session")
def archive(
    workshop: Workshop, built: Result, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the image as a docker archive."""
    path = tmp_path_factory.mktemp("archive") / "image.tar"
    workshop.engine.save(built.tag, Archive("docker-archive", path))
    return path


def test_image_holds_every_runtime_file_of_the_series(built: Result) -> None:
    overlay = plan_overlay()
    assert set(overlay.files) == set(built.contents.sha256)
    assert not [path for path in overlay.files if path.startswith("tests/")]
    assert f"{PACKAGE}/manifest.json" in overlay.files
    for path, data in overlay.files.items():
        assert built.contents.sha256[path] == hashlib.sha256(data).hexdigest(), path


def test_f3_new_packages_look_like_their_siblings(
    workshop: Workshop, small: str
) -> None:
    owned = workshop.derive(
        small,
        f"RUN chown -R 1234:2345 {SITE}/vllm && chmod 0775 {SITE}/vllm",
    )
    result = workshop.overlay(owned)
    new = sorted(
        {
            posixpath.dirname(path)
            for path, old in result.overlay.before.items()
            if old is None and path.startswith("vllm/")
        }
    )
    assert new
    paths = [f"{SITE}/{path}" for path in (*new, f"{new[0]}/__pycache__", TOUCHED)]
    shown = workshop.shell(result.tag, f"stat -c '%u:%g %a %F' {' '.join(paths)}")
    *folders, file = shown.splitlines()
    assert set(folders) == {"1234:2345 775 directory"}
    assert file == "1234:2345 644 regular file"


def test_f4_labels_record_base_and_series(built: Result, small: str) -> None:
    labels = built.image.labels
    assert labels["org.opencontainers.image.base.name"] == small
    assert labels["org.opencontainers.image.base.digest"] == built.base.digest
    assert re.fullmatch("sha256:[0-9a-f]{64}", built.base.digest)
    assert labels["pinned-hot-experts.series"] == built.overlay.digest
    revision = git_revision()
    assert labels.get("org.opencontainers.image.revision") == revision
    assert revision is None or re.fullmatch("[0-9a-f]{40}(-dirty)?", revision)


@pytest.mark.parametrize(
    ("instruction", "what"),
    [
        (f"RUN echo '# moved on' >> {SITE}/{TOUCHED}", "has sha256"),
        (f"RUN rm {SITE}/{TOUCHED}", "is missing"),
    ],
    ids=["changed", "missing"],
)
def test_f4_drifted_base_is_refused(
    workshop: Workshop, small: str, instruction: str, what: str
) -> None:
    drifted = workshop.derive(small, instruction)
    with pytest.raises(RecipeError, match=f"{re.escape(TOUCHED)} {what}") as error:
        workshop.overlay(drifted)
    assert drifted in str(error.value)
    assert "--base" in str(error.value)
    assert workshop.engine.inspect(workshop.made[-1]) is None


def test_f5_no_touched_file_is_skipped(built: Result) -> None:
    for path, old in built.overlay.before.items():
        assert built.contents.sha256[path] not in (None, old), path


def test_f5_base_that_has_the_overlay_is_refused(
    workshop: Workshop, built: Result
) -> None:
    with pytest.raises(RecipeError, match="an overlay is in it already"):
        workshop.overlay(built.tag)


def test_f5_base_that_has_an_added_file_is_refused(
    workshop: Workshop, small: str
) -> None:
    added = min(path for path, old in plan_overlay().before.items() if old is None)
    folder = posixpath.dirname(f"{SITE}/{added}")
    taken = workshop.derive(small, f"RUN mkdir -p {folder} && touch {SITE}/{added}")
    with pytest.raises(RecipeError, match="has no such file"):
        workshop.overlay(taken)


def test_f6_platform_is_explicit(built: Result) -> None:
    assert built.image.platform == PLATFORM
    assert built.image.labels["pinned-hot-experts.platform"] == PLATFORM


def test_f6_f8_platform_of_another_machine_is_refused(workshop: Workshop) -> None:
    other = "linux/arm64" if PLATFORM != "linux/arm64" else "linux/amd64"
    tag = "localhost/pinned-hot-test-small:other"
    if isinstance(workshop.engine, Docker):
        pytest.skip("docker's builder does not label a platform that it does not run")
    mislabelled = workshop.small_base(other, tag)
    with pytest.raises(RecipeError, match=f"it is for {other}, asked for is"):
        workshop.overlay(mislabelled)
    # F8: the label is for one architecture, the programs are for another.
    with pytest.raises(RecipeError, match="its label is wrong"):
        workshop.overlay(mislabelled, platform=other)


def test_f7_config_is_inherited(built: Result) -> None:
    # "Image" is docker's own note of what it built on.
    def rest(image: Image) -> dict[str, object]:
        different = ("Labels", "Image")
        return {key: image.config[key] for key in image.config if key not in different}

    assert rest(built.image) == rest(built.base)
    assert built.image.config["Entrypoint"] == ["vllm", "serve"]
    assert built.image.config["Cmd"] == ["--help"]
    assert built.image.layers[:-1] == built.base.layers
    kept = {**built.image.labels, **built.base.labels}
    assert kept == built.image.labels


def test_f8_no_machine_code_is_overlaid(built: Result) -> None:
    assert not [path for path, data in built.overlay.files.items() if b"\0" in data]


def test_f9_other_python_is_refused(workshop: Workshop, small: str) -> None:
    flavor = dataclasses.replace(CPU, base_python="3.99")
    with pytest.raises(RecipeError, match=r"on Python 3\.\d+, the pin records 3\.99"):
        workshop.overlay(small, flavor)


def test_f9_python_of_the_vllm_command_is_asked(workshop: Workshop, small: str) -> None:
    script = "import sys; sys.path.insert(0, '/opt/other')"
    other = workshop.derive(
        small,
        f"RUN python3 -m venv --without-pip /opt/venv && mkdir /opt/other && "
        f'echo "{script}" > /opt/venv/lib/python{CPU.base_python}/site-packages/x.pth '
        f"&& cp -r {SITE}/vllm /opt/other/ && printf '#!/opt/venv/bin/python\\n' "
        "> /usr/local/bin/vllm && chmod +x /usr/local/bin/vllm",
    )
    result = workshop.overlay(other)
    assert result.contents.executable == "/opt/venv/bin/python"
    assert result.contents.site == "/opt/other"


def test_f10_links_stay_and_members_are_relative(
    workshop: Workshop, small: str, tmp_path: Path
) -> None:
    linked = workshop.derive(
        small, f"RUN ln -s {SITE} /opt/link", "ENV PYTHONPATH=/opt/link"
    )
    result = workshop.overlay(linked)
    assert result.contents.site == SITE
    shown = workshop.shell(result.tag, "readlink /opt/link /lib /bin")
    assert shown.split() == [SITE, "usr/lib", "usr/bin"]
    path = tmp_path / "linked.tar"
    workshop.engine.save(result.tag, Archive("docker-archive", path))
    members, _ = top_layer(path)
    inside = SITE.removeprefix("/")
    for name, member in members.items():
        assert not name.startswith(("/", "./")), name
        assert name.startswith(f"{inside}/") or inside.startswith(name), name
        assert member.isdir() or member.isreg(), name


def test_f10_link_inside_the_package_is_refused(workshop: Workshop, small: str) -> None:
    folder = posixpath.dirname(TOUCHED)
    linked = workshop.derive(
        small,
        f"RUN mv {SITE}/{folder} /opt/moved && ln -s /opt/moved {SITE}/{folder}",
    )
    with pytest.raises(RecipeError, match="is a link to /opt/moved"):
        workshop.overlay(linked)


def test_f11_nothing_is_deleted(archive: Path) -> None:
    members, _ = top_layer(archive)
    assert not [name for name in members if posixpath.basename(name)[:4] == ".wh."]


def test_f11_deletion_in_the_series_is_refused() -> None:
    raw = load_series()[0].path.read_bytes()
    head, separator, _ = raw.partition(b"diff --git ")
    assert separator
    with pytest.raises(RecipeError, match="deletes a file"):
        parse_patch(head + DELETION.encode(), Path("0001-delete.patch"))


def test_f12_reinstall_is_noticed_at_start(workshop: Workshop, built: Result) -> None:
    check = f"import {PACKAGE} as overlay; overlay.check()"
    listed = (
        "import importlib.metadata as m; "
        "print(*[e.value for e in m.entry_points(group='vllm.general_plugins')])"
    )
    assert workshop.shell(built.tag, f'python3 -c "{check}"') == ""
    assert f"{PACKAGE}:check" in workshop.shell(built.tag, f'python3 -c "{listed}"')
    pip = "python3 -m pip install --break-system-packages --no-index --no-deps"
    reverted = workshop.derive(
        built.tag,
        f"COPY {CPU.wheel} /opt/",
        f"RUN {pip} --force-reinstall --quiet /opt/{CPU.wheel}",
        files={CPU.wheel: fetch_wheel(CPU)},
    )
    with pytest.raises(RecipeError, match=r"RuntimeError: overlay \w+: .*sha256"):
        workshop.shell(reverted, f'python3 -c "{check}"')


@pytest.mark.parametrize("folder", SHADOWED)
def test_f2_shadowing_directory_is_noticed(
    workshop: Workshop, built: Result, folder: str
) -> None:
    check = f"import vllm, {PACKAGE} as overlay; overlay.check()"
    script = f"mkdir -p {folder}/vllm && cd {folder} && touch vllm/__init__.py && "
    with pytest.raises(RecipeError, match=f"vllm was imported from {folder}"):
        workshop.shell(built.tag, script + f'python3 -c "{check}"')


def test_compiled_files_belong_to_their_sources(
    workshop: Workshop, built: Result
) -> None:
    modules = [path for path in built.overlay.files if path.endswith(".py")]
    script = """
import base64, importlib.util, json, sys
site, paths = sys.argv[1], sys.argv[2:]
answer = {}
for path in paths:
    with open(importlib.util.cache_from_source(f"{site}/{path}"), "rb") as stream:
        answer[path] = base64.b64encode(stream.read()).decode()
print(json.dumps(answer))
"""
    argv = ["python3", "-c", script, SITE, *modules]
    answer = json.loads(workshop.engine.output_of(built.tag, argv, b""))
    for path in modules:
        data = base64.b64decode(answer[path])
        (flags,) = struct.unpack("<I", data[4:8])
        assert flags == HASH_BASED, path
        source = built.overlay.files[path]
        assert data[8:16] == importlib.util.source_hash(source), path
        assert f"{SITE}/{path}".encode() in data, path


def test_layer_has_one_time_and_plain_modes(archive: Path) -> None:
    members, config = top_layer(archive)
    files = {name: member for name, member in members.items() if member.isreg()}
    assert {member.mode & 0o7777 for member in files.values()} == {0o644}
    inside = [m for name, m in members.items() if f"/{name}/".startswith(f"{SITE}/")]
    assert {member.mtime for member in files.values()} == {TIME}
    assert {m.mode & 0o7777 for m in inside if m.isdir()} == {0o755}
    assert config["history"][-1]["created_by"]


def test_two_builds_give_one_digest(
    workshop: Workshop, small: str, built: Result, tmp_path: Path
) -> None:
    if not workshop.engine.reproducible:
        pytest.skip("docker's builder writes the time of the build into the image")
    first = parse_archive(f"oci-archive:{tmp_path / 'first.tar'}")
    second = parse_archive(f"oci-archive:{tmp_path / 'second.tar'}")
    one = workshop.overlay(small, archive=first)
    two = workshop.overlay(small, archive=second)
    assert one.image.id == two.image.id == built.image.id
    assert one.image.digest == two.image.digest == built.image.digest
    assert one.archive_digest == two.archive_digest
    later = workshop.overlay(small, timestamp=TIME + 1)
    assert later.image.id != one.image.id


@pytest.mark.parametrize("kind", ["oci-archive", "docker-archive"])
def test_archive_loads_and_runs(
    workshop: Workshop, small: str, kind: str, tmp_path: Path
) -> None:
    if workshop.engine.name == "buildah":
        load = ["pull", "--quiet", f"{kind}:{tmp_path / 'image.tar'}"]
    else:
        load = ["load", "--quiet", f"--input={tmp_path / 'image.tar'}"]
    result = workshop.overlay(
        small, archive=parse_archive(f"{kind}:{tmp_path / 'image.tar'}")
    )
    if kind == "oci-archive" and workshop.engine.name == "docker":
        pytest.skip("docker loads OCI archives only since release 25")
    workshop.forget(result.tag)
    assert workshop.engine.inspect(result.tag) is None
    workshop.command(*load)
    loaded = workshop.engine.inspect(result.tag)
    assert loaded is not None
    assert loaded.id == result.image.id
    script = f"cd /; python3 -c 'import {PACKAGE} as o; print(o.overlay_id())'"
    assert workshop.shell(result.tag, script).strip() == result.overlay.digest[:12]


def test_stage_normalises_modes_and_times(tmp_path: Path) -> None:
    contents = Contents("3", "", "", "/", (0, 0), 0o775, 0o755, {}, {})
    stage({"a/b/c.py": b"1", "d.json": b"{}"}, tmp_path, contents, TIME)
    for path in (tmp_path, *tmp_path.rglob("*")):
        state = path.stat()
        assert state.st_mtime == TIME
        assert state.st_mode & 0o7777 == (0o775 if path.is_dir() else 0o644)
