"""The verb ``demo``: the pinned vLLM beside the patched one, over HTTP, token by token.

Both serve the tiny model of ``fixtures/tiny-moe`` on this machine's CPU. The pinned one
is asked which experts it selects on a calibration text; the map made of that keeps some
experts of each layer in memory and leaves the others in a file. Then both answer the
same prompts.
"""

import argparse
import hashlib
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
from contextlib import contextmanager
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
MAKE_MAP = ROOT / "recipe" / "inside" / "make_map.py"

Selections = dict[str, list[int]]
"""Selections of each expert, ``(E,)``, by layer name."""


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
class Served:
    """What a server made of one domain's prompts.

    Attributes:
        answers: One for each prompt.
        selections: What its routers selected meanwhile.
    """

    answers: tuple[Answer, ...]
    selections: Selections


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        domain: Kind of text.
        prompts: Prompts sent to both servers.
        tokens: Tokens that each server generated.
        equal: Prompts whose whole answer is the same in both.
        hot: Expert rows that the patched server read from memory.
        cold: Expert rows that it read through the file mapping.
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


def cold_experts(expert_map: Mapping[str, Any]) -> dict[str, frozenset[int]]:
    """Return the experts beyond the cut of each layer of a map."""
    return {
        name: frozenset(layer["ranking"][layer["hot"] :])
        for name, layer in expert_map["layers"].items()
    }


def split_selections(
    selections: Selections, cold: Mapping[str, frozenset[int]]
) -> tuple[int, int]:
    """Return how many selections are hot and how many are cold, over all layers."""
    cold_count = sum(
        count
        for name, counts in selections.items()
        for expert, count in enumerate(counts)
        if expert in cold[name]
    )
    return sum(map(sum, selections.values())) - cold_count, cold_count


def check_all_counted(served: Served, top_k: int, layers: int) -> None:
    """Refuse counts that are not those of the served tokens, no more and no less.

    Every token but the last of an answer passes through every layer once, which
    selects ``top_k`` experts for it.

    Raises:
        RecipeError: The counts are off.
    """
    forwarded = sum(
        answer.prompt_tokens + len(answer.token_ids) - 1 for answer in served.answers
    )
    found = {name: sum(counts) for name, counts in served.selections.items()}
    if len(found) != layers or set(found.values()) != {forwarded * top_k}:
        raise RecipeError(
            f"{forwarded} tokens passed {layers} layers of top-{top_k} and the routers "
            f"report {found} selections; the counts are not to be trusted"
        )


def compare(
    domain: str, stock: Served, patched: Served, cold: Mapping[str, frozenset[int]]
) -> Row:
    """Return one line of the result from what both servers made of a domain."""
    pairs = list(zip(stock.answers, patched.answers, strict=True))
    hot_count, cold_count = split_selections(patched.selections, cold)
    return Row(
        domain=domain,
        prompts=len(pairs),
        tokens=sum(len(answer.token_ids) for answer in patched.answers),
        equal=sum(left == right for left, right in pairs),
        hot=hot_count,
        cold=cold_count,
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
            f"{everything.hot} hot and {everything.cold} cold rows were served; the "
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

    def serve(self, prompts: Sequence[str]) -> Served:
        """Send prompts one after the other and count what the routers select."""
        self.call("reset_routes")
        answers = []
        for index, prompt in enumerate(prompts, 1):
            answers.append(self.complete(prompt))
            _STATUS.show(f"{self.name}: answered {index} of {len(prompts)} prompts")
        _STATUS.clear()
        return Served(tuple(answers), self.call("read_routes"))

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
        "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc, on 127.0.0.1 only
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
    """End a server and the processes it started, which share its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            continue


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])


def make_map(
    python: Path, tree: Path, counts: Selections, texts: Sequence[str], tokens: int
) -> str:
    """Return the text of a map made from counts.

    Args:
        python: Interpreter of an environment with the CPU flavor.
        tree: The patched tree, whose planner makes the map.
        counts: What the calibration text selected.
        texts: That text.
        tokens: Tokens counted.

    Raises:
        RecipeError: The planner refused.
    """
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    profile = {"label": MAP_DOMAIN, "sha256": digest, "tokens": tokens}
    question = {
        "model": str(FIXTURE),
        "counts": counts,
        "hot": HOT_EXPERTS,
        "profiles": [profile],
    }
    made = subprocess.run(
        [str(python), str(MAKE_MAP)],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        env=server_environment(tree),
    )
    if made.returncode:
        raise RecipeError(f"the planner made no map: {made.stderr.strip()[-1500:]}")
    return made.stdout[made.stdout.index("{") :]


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
        ``stock``: :class:`Served` by domain.

    Raises:
        RecipeError: A server failed, or did something other than what was asked.
    """
    config = json.loads((FIXTURE / "config.json").read_text())
    top_k, layers = config["num_experts_per_tok"], config["num_hidden_layers"]
    texts = load_prompts()
    calibration = texts["calibration"][MAP_DOMAIN]
    map_path = work / "expert-map.json"

    with serve("stock", python, work / "stock.log", dtype=dtype) as server:
        check_stock(server.call("describe_experts"))
        _say(f"counting the experts that {len(calibration)} {MAP_DOMAIN} texts select")
        counted = server.serve(calibration)
        check_all_counted(counted, top_k, layers)
        stock = {}
        for domain, prompts in texts["prompts"].items():
            _say(f"asking the stock server {len(prompts)} {domain} prompts")
            stock[domain] = server.serve(prompts)

    _say(f"making the expert map: {HOT_EXPERTS} of {config['num_experts']} rows hot")
    tokens = sum(a.prompt_tokens + len(a.token_ids) - 1 for a in counted.answers)
    map_text = make_map(python, tree, counted.selections, calibration, tokens)
    map_path.write_text(map_text)
    cold = cold_experts(json.loads(map_text))

    options = ["--expert-provider=pinned_hot", f"--expert-map={map_path}"]
    options.append(f"--expert-cold-dir={work}")
    rows = []
    with serve(
        "pinned_hot",
        python,
        work / "pinned_hot.log",
        tree=tree,
        dtype=dtype,
        extra=options,
    ) as server:
        description = server.call("describe_experts")
        check_patched(description, HOT_EXPERTS, config["num_experts"])
        for domain, prompts in texts["prompts"].items():
            _say(f"asking the pinned_hot server {len(prompts)} {domain} prompts")
            served = server.serve(prompts)
            check_all_counted(served, top_k, layers)
            rows.append(compare(domain, stock[domain], served, cold))
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
        "stock": {name: asdict(served) for name, served in result["stock"].items()},
        "hot_bytes": result["hot_bytes"],
        "cold_bytes": result["cold_bytes"],
    }
    (work / "result.json").write_text(json.dumps(saved, indent=1) + "\n")

    print(format_table(rows))
    print("hot and cold are expert rows read, as the patched server's routers counted.")
    print(
        f"rows        {HOT_EXPERTS} of each layer's experts in memory "
        f"({result['hot_bytes'] / 1e6:.1f} MB), the others in a file "
        f"({result['cold_bytes'] / 1e6:.1f} MB)"
    )
    print(f"map         {result['map']} (made from {MAP_DOMAIN})")
    print(f"logs        {work}/stock.log {work}/pinned_hot.log")
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
