"""Choosing an engine, reading options, handing pip's settings to the CPU base."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipe import cpu_base, engine
from recipe.errors import RecipeError
from tests.image.support import CPU

pytestmark = pytest.mark.image


@pytest.mark.parametrize("wanted", [None, *engine.ENGINES])
def test_without_an_engine_one_command_is_named(
    wanted: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RecipeError) as error:
        engine.pick_engine(wanted)
    for name in [wanted] if wanted else engine.ENGINES:
        assert f"{name}: not installed" in str(error.value)
    commands = str(error.value).split("Run: ")[1:]
    assert len(commands) == 1
    assert commands[0].startswith(engine.INSTALL_COMMANDS[wanted or "podman"])
    assert "--install-deps" in commands[0]


def test_client_without_a_daemon_is_no_engine() -> None:
    if shutil.which("docker") is None:
        pytest.skip("no docker client here")
    missing = {**os.environ, "DOCKER_HOST": "unix:///nowhere/docker.sock"}
    script = "from recipe.engine import Docker; print(Docker().unusable())"
    shown = subprocess.run(
        [sys.executable, "-c", script], env=missing, capture_output=True, text=True
    )
    assert "/nowhere/docker.sock" in shown.stdout


@pytest.mark.parametrize(
    "text", ["x.tar", "oci:x.tar", "oci-archive:", "oci-archive:/no/where/x.tar"]
)
def test_output_is_checked_before_anything_is_built(text: str) -> None:
    with pytest.raises(RecipeError, match=f"--output {text}"):
        engine.parse_archive(text)


def test_output_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is a directory"):
        engine.parse_archive(f"oci-archive:{tmp_path}")


def test_ulimit_flags_stay_within_the_limits_of_this_process() -> None:
    for flag in engine.ulimit_flags():
        name, _, value = flag.removeprefix("--ulimit=").partition("=")
        hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
        assert hard == resource.RLIM_INFINITY or int(value.split(":")[1]) <= hard


def test_pip_config_is_merged_as_pip_does() -> None:
    lines = [
        ":env:.find-links='/env'",
        ":env:.default-timeout='9'",
        "global.find-links='/global'",
        "global.timeout='5'",
        "global.index-url='https://a.example/simple'",
        "install.index-url='https://b.example/simple'",
        "freeze.timeout='1'",
        "global.trusted-host='a\\nb'",
    ]
    assert cpu_base.parse_pip_config(lines) == {
        "find-links": "/env",
        "timeout": "9",
        "index-url": "https://b.example/simple",
        "trusted-host": "a\nb",
    }


def test_pip_settings_move_local_paths_into_the_base(tmp_path: Path) -> None:
    (tmp_path / "index" / "simple").mkdir(parents=True)
    (tmp_path / "links").mkdir()
    (tmp_path / "ca.pem").write_text("")
    (tmp_path / "limits.txt").write_text("")
    config = {
        "index-url": "https://pypi.example/simple",
        "extra-index-url": f"file://{tmp_path}/index/simple https://b.example/simple",
        "find-links": f"{tmp_path}/links\nhttps://c.example/links.html",
        "constraint": f"{tmp_path}/limits.txt",
        "target": "/not/for/the/base",
        "trusted-host": "a.example b.example",
    }
    settings = cpu_base.pip_settings(config, str(tmp_path / "ca.pem"))
    assert settings.text.splitlines() == [
        "[global]",
        "index-url = https://pypi.example/simple",
        "extra-index-url = file:///workspace/dir0/simple",
        "  https://b.example/simple",
        "find-links = /workspace/dir1",
        "  https://c.example/links.html",
        "constraint = /workspace/file0.txt",
        "trusted-host = a.example b.example",
        "cert = /workspace/file1.pem",
    ]
    assert settings.directories == {
        "dir0": tmp_path / "index",
        "dir1": tmp_path / "links",
    }
    assert set(settings.files.values()) == {
        tmp_path / "limits.txt",
        tmp_path / "ca.pem",
    }


def test_pip_reads_the_settings_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(cpu_base.host_pip_settings().text)
    command = [sys.executable, "-m", "pip", "config", "list"]
    clean = {key: os.environ[key] for key in os.environ if key[:4] != "PIP_"}
    clean |= {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "HOME": str(tmp_path)}
    shown = subprocess.run(command, env=clean, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr


def test_proxies_are_passed_in_either_case() -> None:
    environment = {"HTTP_PROXY": "a", "https_proxy": "b", "no_proxy": "", "HOME": "c"}
    assert cpu_base.proxies(environment) == {"HTTP_PROXY": "a", "https_proxy": "b"}


def test_setup_script_is_shell(tmp_path: Path) -> None:
    script = tmp_path / "setup.sh"
    script.write_text(cpu_base.setup_script(CPU, {"http_proxy": "it's; $HOME"}))
    checked = subprocess.run(["sh", "-n", str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert f"--wheel=/workspace/{CPU.wheel}" in script.read_text()


def test_containerfile_serves_every_engine() -> None:
    text = (cpu_base.RECIPE / "Containerfile").read_text()
    command, changes = cpu_base.read_containerfile(text)
    assert command == ["sh", "/workspace/setup.sh"]
    kinds = [change.split()[0] for change in changes]
    assert kinds == ["ENV", "WORKDIR", "ENTRYPOINT"]
    instructions = [line.split()[0] for line in text.splitlines() if line[:1].isupper()]
    assert instructions == ["FROM", "ADD", "RUN", *kinds]


def test_packages_are_read_without_comments() -> None:
    names = cpu_base.packages("# why\npython3\n\nlibnuma1 # NUMA\n")
    assert names == ["python3", "libnuma1"]


def test_base_is_named_by_what_it_is_made_of() -> None:
    tag = cpu_base.base_tag(CPU)
    assert tag.startswith("localhost/vllm-cpu-base:")
    assert tag == cpu_base.base_tag(CPU)


@pytest.mark.parametrize("name", engine.ENGINES)
def test_engine_works_or_tells_why(name: str) -> None:
    if reason := engine.ENGINES[name]().unusable():
        pytest.skip(f"{name} does not run here by itself: {reason}")
    assert engine.pick_engine(name).name == name
