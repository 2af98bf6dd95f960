"""The verb ``demo``: the pinned vLLM beside the patched one, over HTTP, token by token.

Both serve the tiny model of ``fixtures/tiny-moe`` on this machine's CPU. A patched
server records which experts a calibration text selects; the map planned from that keeps
some experts of each layer in memory and leaves the others in a file. Then the pinned
server and one with the map answer the same prompts.
"""

import argparse
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipe.engine import pick_engine
from recipe.env import ensure_env
from recipe.errors import RecipeError
from recipe.image import build_image, run_command
from recipe.paths import ROOT, cache_dir
from recipe.pin import load_pin
from recipe.tree import patched_tree

FIXTURE = ROOT / "fixtures" / "tiny-moe"
MODEL_NAME = "tiny-moe"
DTYPES = ("bfloat16", "float32")
HOT_EXPERTS = 24
MAP_DOMAIN = "code"
MAX_TOKENS = 64
START_LIMIT_S = 300.0
ANSWER_LIMIT_S = 120.0
STOP_LIMIT_S = 20.0
PROGRESS_EVERY_S = 5.0
LOG_TAIL_LINES = 25
EXTENSION = "recipe.inside.route_counter.RouteCounter"


@dataclass(frozen=True)
class Answer:
    """What a server made of one prompt.

    Attributes:
        prompt_tokens: Length of the prompt in tokens.
        token_ids: Every generated token.
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        domain: Kind of text.
        prompts: Prompts sent to both servers.
        tokens: Tokens that each server generated.
        equal: Prompts whose whole answer is the same in both.
        hot: Selections of expert rows that the patched server has in memory.
        cold: Selections of rows that it reads through the file mapping.
    """

    domain: str
    prompts: int
    tokens: int
    equal: int
    hot: int
    cold: int

    @property
    def cold_share(self) -> float:
        """Share of the selections that were cold, 0 to 1."""
        selections = self.hot + self.cold
        return self.cold / selections if selections else 0.0


def load_prompts(path: Path = FIXTURE / "prompts.json") -> dict[str, dict[str, Any]]:
    """Return ``calibration`` and ``prompts``, each a list of texts by domain."""
    texts: dict[str, dict[str, Any]] = json.loads(path.read_text("utf-8"))
    return texts


def fed_tokens(answers: Sequence[Answer]) -> dict[str, int]:
    """Return the tokens that pass the layers: all but the last of each answer."""
    return {
        "tokens_prefill": sum(answer.prompt_tokens for answer in answers),
        "tokens_decode": sum(len(answer.token_ids) - 1 for answer in answers),
    }


def check_all_counted(answers: Sequence[Answer], counted: Mapping[str, int]) -> None:
    """Refuse counts that are not those of the served tokens, no more and no less.

    Raises:
        RecipeError: The counts are off.
    """
    fed = fed_tokens(answers)
    if any(counted[phase] != tokens for phase, tokens in fed.items()):
        raise RecipeError(
            f"{fed} were fed and the server recorded {dict(counted)}; the counts are "
            "not to be trusted"
        )


def compare(
    domain: str,
    stock: Sequence[Answer],
    patched: Sequence[Answer],
    cold_share: float,
    selections_per_token: int,
) -> Row:
    """Return one line of the result from what both servers made of a domain.

    Args:
        domain: Kind of text.
        stock: Answers of the pinned server.
        patched: Answers of the one with the map.
        cold_share: Share of that one's selections that were cold, 0 to 1.
        selections_per_token: Experts that a token selects in all layers together.
    """
    pairs = list(zip(stock, patched, strict=True))
    selections = sum(fed_tokens(patched).values()) * selections_per_token
    cold = round(cold_share * selections)
    return Row(
        domain=domain,
        prompts=len(pairs),
        tokens=sum(len(answer.token_ids) for answer in patched),
        equal=sum(left == right for left, right in pairs),
        hot=selections - cold,
        cold=cold,
    )


def total(rows: Sequence[Row]) -> Row:
    """Return the sum of all lines."""
    return Row(
        domain="all",
        prompts=sum(row.prompts for row in rows),
        tokens=sum(row.tokens for row in rows),
        equal=sum(row.equal for row in rows),
        hot=sum(row.hot for row in rows),
        cold=sum(row.cold for row in rows),
    )


def verdict(rows: Sequence[Row]) -> str | None:
    """Return what is wrong with a result, ``None`` if nothing is."""
    everything = total(rows)
    if everything.tokens == 0:
        return "no token was generated"
    if everything.equal != everything.prompts:
        different = everything.prompts - everything.equal
        return f"{different} of {everything.prompts} answers differ from stock vLLM's"
    if everything.cold == 0 or everything.hot == 0:
        return (
            f"{everything.hot} hot and {everything.cold} cold rows were selected; the "
            "comparison has not used both"
        )
    return None


def format_table(rows: Sequence[Row]) -> str:
    """Return the result as aligned text, with a line for the sum."""
    head = ("domain", "prompts", "tokens", "equal to stock", "hot", "cold", "cold %")
    lines = [head]
    for row in (*rows, total(rows)):
        lines.append(
            (
                row.domain,
                str(row.prompts),
                str(row.tokens),
                f"{row.equal} of {row.prompts}",
                f"{row.hot:,}",
                f"{row.cold:,}",
                f"{row.cold_share:.1%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


class Status:
    """One line on what is going on: in place on a terminal, else now and then."""

    def __init__(self) -> None:
        """Start with nothing shown."""
        self._in_place = sys.stderr.isatty()
        self._shown_at = 0.0

    def show(self, text: str) -> None:
        """Replace the line."""
        now = time.monotonic()
        if self._in_place:
            sys.stderr.write(f"\r\x1b[K  {text}")
            sys.stderr.flush()
        elif now - self._shown_at >= PROGRESS_EVERY_S:
            _say(f"  {text}")
            self._shown_at = now

    def clear(self) -> None:
        """Make room for ordinary output."""
        if self._in_place:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


_STATUS = Status()


class Server:
    """A running OpenAI-compatible server on this machine, see :func:`serve`."""

    def __init__(self, name: str, url: str, log: Path) -> None:
        """Remember where the server is."""
        self.name = name
        self._url = url
        self._log = log
        # Not through a proxy that the environment may name.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def is_up(self) -> bool:
        """Tell whether the server answers."""
        try:
            with self._opener.open(f"{self._url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    def complete(self, prompt: str, max_tokens: int = MAX_TOKENS) -> Answer:
        """Return the greedy continuation of a prompt."""
        answer = self._post(
            "/v1/completions",
            {
                "model": MODEL_NAME,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        choice = answer["choices"][0]
        return Answer(len(choice["prompt_token_ids"]), tuple(choice["token_ids"]))

    def call(self, method: str) -> Any:
        """Call a method of the server's only worker."""
        (result,) = self._post("/collective_rpc", {"method": method})["results"]
        return result

    def serve(self, prompts: Sequence[str]) -> tuple[Answer, ...]:
        """Send prompts one after the other."""
        answers = []
        for index, prompt in enumerate(prompts, 1):
            answers.append(self.complete(prompt))
            _STATUS.show(f"{self.name}: answered {index} of {len(prompts)} prompts")
        _STATUS.clear()
        return tuple(answers)

    def record(self, prompts: Sequence[str], profile: Path) -> tuple[Answer, ...]:
        """Send prompts and keep what they selected in a profile of its own.

        Raises:
            RecipeError: What the server recorded is not what it was fed.
        """
        profile.unlink(missing_ok=True)
        answers = self.serve(prompts)
        recorded = self._post("/expert_profile/dump", {})
        check_all_counted(answers, recorded)
        Path(recorded["path"]).rename(profile)
        return answers

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            self._url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with self._opener.open(request, timeout=ANSWER_LIMIT_S) as response:
                return json.loads(response.read() or "null")
        except urllib.error.HTTPError as error:
            reason = f"{error} {error.read().decode(errors='replace')[:300]}"
        except (OSError, http.client.HTTPException) as error:
            reason = str(error)
        raise RecipeError(
            f"the {self.name} server did not answer {path}: {reason}; its log "
            f"{self._log} ends with:\n{_tail(self._log)}"
        )


def server_command(
    python: Path, dtype: str, port: int, extra: Sequence[str]
) -> list[str]:
    """Return the command that serves the tiny model.

    Args:
        python: Interpreter of an environment with the CPU flavor.
        dtype: One of :data:`DTYPES`.
        port: Port on 127.0.0.1.
        extra: More options of ``vllm serve``.
    """
    return [
        *(str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(FIXTURE)),
        *("--host=127.0.0.1", f"--port={port}", f"--served-model-name={MODEL_NAME}"),
        *(f"--dtype={dtype}", "--enforce-eager", "--no-enable-prefix-caching"),
        f"--worker-extension-cls={EXTENSION}",
        *extra,
    ]


def server_environment(tree: Path | None) -> dict[str, str]:
    """Return a server's environment; a patched tree goes before what is installed."""
    path = [str(ROOT)] if tree is None else [str(tree), str(ROOT)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # For /collective_rpc and /expert_profile/dump, on 127.0.0.1 only.
        "VLLM_SERVER_DEV_MODE": "1",
    }


@contextmanager
def serve(
    name: str,
    python: Path,
    log: Path,
    *,
    tree: Path | None = None,
    dtype: str = DTYPES[0],
    extra: Sequence[str] = (),
) -> Iterator[Server]:
    """Run a server while the block runs, whatever ends it.

    Args:
        name: What to call it in messages.
        python: Interpreter of an environment with the CPU flavor.
        log: File for its output.
        tree: Patched tree to serve from, by default the environment's own vLLM.
        dtype: One of :data:`DTYPES`.
        extra: More options of ``vllm serve``.

    Raises:
        RecipeError: It did not start; the message ends with its last lines.
    """
    port = _free_port()
    command = server_command(python, dtype, port, extra)
    _say(f"starting the {name} server (log: {log})")
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=server_environment(tree),
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        server = Server(name, f"http://127.0.0.1:{port}", log)
        _wait_until_up(server, process, log)
        yield server
    finally:
        _stop(process)


def _wait_until_up(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    begin = time.monotonic()
    while not server.is_up():
        waited = time.monotonic() - begin
        status = process.poll()
        if status is not None or waited > START_LIMIT_S:
            how = "was not up" if status is None else f"ended with status {status}"
            _STATUS.clear()
            raise RecipeError(
                f"the {server.name} server {how} after {waited:.0f} s; its log {log} "
                f"ends with:\n{_tail(log)}"
            )
        _STATUS.show(f"{server.name}: starting, {waited:.0f} s")
        time.sleep(0.5)
    _STATUS.clear()
    _say(f"the {server.name} server is up after {time.monotonic() - begin:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a server, then what is left of the processes that share its session.

    The workers are the server's own to end: it may have something to ask them.
    """
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_LIMIT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])


def expert_map(python: Path, tree: Path, *arguments: str) -> str:
    """Run ``vllm expert-map`` of the patched tree and return what it prints.

    Raises:
        RecipeError: It refused.
    """
    done = subprocess.run(
        [
            *(str(python), "-m", "vllm.entrypoints.cli.main", "expert-map"),
            *arguments,
        ],
        capture_output=True,
        text=True,
        env=server_environment(tree),
    )
    if done.returncode:
        raise RecipeError(
            f"vllm expert-map {arguments[0]} ended with status {done.returncode}: "
            f"{done.stderr.strip()[-1500:]}"
        )
    return done.stdout


def check_stock(description: Mapping[str, Any]) -> None:
    """Refuse a reference server that is not stock vLLM.

    Raises:
        RecipeError: It knows expert providers.
    """
    if description["providers"] != [None]:
        raise RecipeError(
            f"{description['vllm']}: this vLLM is patched, so it is no reference; "
            "remove the environment that it is in and run the demo again"
        )


def check_patched(description: Mapping[str, Any], hot: int, experts: int) -> None:
    """Refuse a server that does not hold the rows that the map says.

    Raises:
        RecipeError: Another provider serves, or rows lie elsewhere.
    """
    if description["providers"] != ["pinned_hot"]:
        raise RecipeError(
            f"{description['vllm']}: providers {description['providers']} serve, not "
            "pinned_hot"
        )
    for name, where in description["residency"].items():
        if (where["hot_rows"], where["cold_rows"]) != (hot, experts - hot):
            raise RecipeError(
                f"layer {name}: {where['hot_rows']} rows are hot and "
                f"{where['cold_rows']} cold, the map says {hot} and {experts - hot}"
            )


def run_demo(python: Path, tree: Path, work: Path, dtype: str) -> dict[str, Any]:
    """Serve both and compare.

    Args:
        python: Interpreter of an environment with the CPU flavor.
        tree: The patched tree.
        work: Directory for logs, map and cold rows.
        dtype: One of :data:`DTYPES`.

    Returns:
        ``rows`` (:class:`Row`), ``map`` (path), ``hot_bytes`` and ``cold_bytes``, and
        ``stock``: answers by domain.

    Raises:
        RecipeError: A server failed, or did something other than what was asked.
    """
    config = json.loads((FIXTURE / "config.json").read_text())
    per_token = config["num_experts_per_tok"] * config["num_hidden_layers"]
    texts = load_prompts()
    calibration = texts["calibration"][MAP_DOMAIN]
    recording = work / "recording.safetensors"
    recording.unlink(missing_ok=True)  # of a demo that did not end
    record = [f"--expert-profile-out={recording}"]

    def server(
        name: str, tree: Path | None, *extra: str
    ) -> AbstractContextManager[Server]:
        log = work / f"{name}.log"
        return serve(name, python, log, tree=tree, dtype=dtype, extra=extra)

    with server("recording", tree, *record) as running:
        _say(f"recording what {len(calibration)} {MAP_DOMAIN} texts select")
        running.record(calibration, profile := work / f"{MAP_DOMAIN}.safetensors")

    _say(f"planning the expert map: {HOT_EXPERTS} of {config['num_experts']} rows hot")
    map_path = work / "expert-map.json"
    cut = ("--cut=uniform", f"--hot-rows={HOT_EXPERTS}")
    expert_map(python, tree, "plan", str(profile), *cut, f"--out={map_path}")

    with server("stock", None) as running:
        check_stock(running.call("describe_experts"))
        stock = {}
        for domain, prompts in texts["prompts"].items():
            _say(f"asking the stock server {len(prompts)} {domain} prompts")
            stock[domain] = running.serve(prompts)

    options = ["--expert-provider=pinned_hot", f"--expert-map={map_path}"]
    options.append(f"--expert-cold-dir={work}")
    patched, profiles = {}, []
    with server("pinned_hot", tree, *options, *record) as running:
        description = running.call("describe_experts")
        check_patched(description, HOT_EXPERTS, config["num_experts"])
        for domain, prompts in texts["prompts"].items():
            _say(f"asking the pinned_hot server {len(prompts)} {domain} prompts")
            profiles.append(work / f"served-{domain}.safetensors")
            patched[domain] = running.record(prompts, profiles[-1])
    names = map(str, profiles)
    scores = expert_map(python, tree, "score", str(map_path), *names, "--json")
    cold = [score["cold_share"] for score in json.loads(scores)["scores"]]
    rows = [
        compare(domain, stock[domain], patched[domain], share, per_token)
        for domain, share in zip(patched, cold, strict=True)
    ]
    residency = description["residency"].values()
    return {
        "rows": rows,
        "stock": stock,
        "map": map_path,
        "hot_bytes": sum(where["hot_bytes"] for where in residency),
        "cold_bytes": sum(where["cold_bytes"] for where in residency),
    }


def _image_lines() -> list[str]:
    """Build the CPU image where an engine works; return what to tell about it."""
    flavor = load_pin().flavor("cpu")
    try:
        engine = pick_engine()
        _say(f"building the image with {engine.name}")
        result = build_image(engine, flavor)
    except RecipeError as error:
        return [
            f"image       not built: {error}",
            "            Then: ./build.sh image --flavor cpu",
        ]
    return [
        f"image       {result.tag} (in {engine.name})",
        f"            {run_command(engine, flavor, result.tag)}",
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(args: argparse.Namespace) -> int:
    begin = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: sys.exit(128 + received))
    python = ensure_env("cpu", with_tests=False)
    tree = patched_tree("cpu")
    work = cache_dir() / "demo"
    work.mkdir(exist_ok=True)
    result = run_demo(python, tree, work, args.dtype)
    rows: list[Row] = result["rows"]
    problem = verdict(rows)
    saved = {
        "dtype": args.dtype,
        "rows": [asdict(row) for row in rows],
        "stock": {
            name: [asdict(answer) for answer in answers]
            for name, answers in result["stock"].items()
        },
        "hot_bytes": result["hot_bytes"],
        "cold_bytes": result["cold_bytes"],
    }
    (work / "result.json").write_text(json.dumps(saved, indent=1) + "\n")

    print(format_table(rows))
    print(
        "hot and cold are selections of expert rows that the patched server recorded."
    )
    print(
        f"rows        {HOT_EXPERTS} of each layer's experts in memory "
        f"({result['hot_bytes'] / 1e6:.1f} MB), the others in a file "
        f"({result['cold_bytes'] / 1e6:.1f} MB)"
    )
    print(f"profile     {work / MAP_DOMAIN}.safetensors (recorded by the server)")
    print(f"map         {result['map']} (planned from the profile)")
    print(f"logs        {work}/recording.log {work}/stock.log {work}/pinned_hot.log")
    serve_again = shlex.join(
        [
            *("env", f"PYTHONPATH={tree}", "VLLM_CPU_KVCACHE_SPACE=1", str(python)),
            *("-m", "vllm.entrypoints.cli.main", "serve", str(FIXTURE)),
            *("--expert-provider=pinned_hot", f"--expert-map={result['map']}"),
            *(f"--expert-cold-dir={work}", "--enforce-eager"),
        ]
    )
    print(f"serve       {serve_again}")
    if problem is None and not args.no_image:
        print("\n".join(_image_lines()))
    print(f"time        {time.monotonic() - begin:.0f} s")
    if problem is not None:
        raise RecipeError(f"{problem}; see the table and the logs above")
    return 0


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Register the verb ``demo``."""
    parser = subparsers.add_parser(
        "demo", help="serve a tiny model with and without the patches and compare"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help="precision of the model"
    )
    parser.add_argument(
        "--no-image", action="store_true", help="do not build the container image"
    )
    parser.set_defaults(run=_run)
