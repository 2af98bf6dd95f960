"""One arm of the serving benchmark: one engine, one placement, in its own process.

A script, run by `arms.py`: it reads a JSON job from standard input and writes a JSON
result to the file named in it. Weights are random and routing is drawn from a table
with a set skew, so outputs mean nothing and speed is what a trained model of the same
shape and skew would have.
"""

import json
import os
import platform
import statistics
import sys
import time
from importlib.metadata import version
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_MOE_ROUTING_SIMULATION_STRATEGY="skewed",
    HF_HUB_OFFLINE="1",
)
TABLE_ROWS = 4096
STEPS_DRAWN = 8192
# One stream's step is short and so is its share of the run: more repeats, less noise.
SINGLE_STREAM_REPEATS = 3
PROFILED_TOKENS = 24
PREFILL_REPEATS = 3


def skewed_strategy(job: dict[str, Any]) -> Any:
    """Make a routing strategy that replays draws with a set skew, and counts them.

    Experts are drawn without replacement; a cold expert's weight is such that the
    wanted share of all selections is cold.
    """
    import torch

    from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import (
        RoutingStrategy,
    )

    experts, top_k = job["config"]["num_experts"], job["config"]["num_experts_per_tok"]
    cold = torch.tensor(job["traffic_cold"])
    share = job["cold_share"]
    weight = torch.ones(experts)
    hot_count = experts - len(cold)
    weight[cold] = share * hot_count / (len(cold) * (1 - share))
    generator = torch.Generator().manual_seed(0)
    table = torch.multinomial(
        weight.expand(TABLE_ROWS, experts), top_k, generator=generator
    )

    class Skewed(RoutingStrategy):
        def __init__(self) -> None:
            self.table = table.to("cuda", torch.int32)
            self.drawn = torch.zeros(TABLE_ROWS, dtype=torch.int32, device="cuda")
            self.ones = torch.ones(65536, dtype=torch.int32, device="cuda")
            self.weights = torch.full((65536, top_k), 1 / top_k, device="cuda")
            self.is_cold = torch.zeros(experts, dtype=torch.bool)
            self.is_cold[torch.tensor(job["map_cold"], dtype=torch.long)] = True

        def route_tokens(
            self,
            hidden_states: Any,
            router_logits: Any,
            top_k: int,
            indices_type: Any = None,
        ) -> Any:
            tokens = hidden_states.shape[0]
            row = torch.randint(0, TABLE_ROWS, (tokens,), device="cuda")
            self.drawn.index_add_(0, row, self.ones[:tokens])
            ids = self.table[row]
            return self.weights[:tokens], ids.to(indices_type or torch.long)

        def served(self) -> dict[str, int]:
            """Selections so far of experts that the map keeps hot, and of others."""
            per_row = self.is_cold[self.table.cpu().long()].sum(1)
            drawn = self.drawn.cpu().long()
            total, cold_seen = int(drawn.sum()) * top_k, int((drawn * per_row).sum())
            return {"hot": total - cold_seen, "cold": cold_seen}

        def distinct_cold(self, streams: int) -> list[float]:
            """How often a layer's step needs 0, 1, … distinct cold experts."""
            picked = torch.randint(0, TABLE_ROWS, (STEPS_DRAWN, streams))
            ids = self.table.cpu().long()[picked].flatten(1)
            needed = torch.zeros(STEPS_DRAWN, experts, dtype=torch.bool)
            needed.scatter_(1, ids, True)
            counts = torch.bincount((needed & self.is_cold).sum(1))
            return [round(x, 5) for x in (counts / STEPS_DRAWN).tolist()]

    return Skewed()


def register_positional() -> None:
    """A provider that does what positional offload does: whole tensors, first first."""
    import torch

    from vllm.model_executor.layers.fused_moe import (
        ExpertWeightProvider,
        register_expert_provider,
    )
    from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
        ExpertResidency,
    )
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

    class Positional(ExpertWeightProvider):
        name = "positional"
        budget = 0
        kept: list[Any] = []

        def check(self, layer: Any) -> None:
            return None

        def attach(self, layer: Any) -> None:
            if self.attached:
                return
            self.attached = True
            self.cold = self.hot = 0
            for name in ("w13_weight", "w2_weight"):
                parameter = getattr(layer, name)
                size = parameter.numel() * parameter.element_size()
                if size > Positional.budget:
                    self.hot += size
                    continue
                Positional.budget -= size
                self.cold += size
                host = torch.empty_like(parameter, device="cpu", pin_memory=True)
                host.copy_(parameter)
                Positional.kept.append(host)
                parameter.data = get_accelerator_view_from_cpu_tensor(host)
            torch.cuda.empty_cache()

        def residency(self) -> Any:
            return ExpertResidency(0, 0, self.hot, self.cold)

    register_expert_provider("positional", Positional)
    return Positional


def main() -> None:
    job = json.load(sys.stdin)
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import (
        RoutingSimulator,
    )

    strategy = skewed_strategy(job)
    RoutingSimulator.register_strategy("skewed", strategy)
    if job["arm"] == "positional":
        register_positional().budget = job["positional_bytes"]
    begin = time.perf_counter()
    llm = LLM(model=job["model"], **job["engine"])
    result: dict[str, Any] = {
        "arm": job["arm"],
        "load_s": time.perf_counter() - begin,
        "steps_ms": {},
        "served": {},
        "distinct_cold": {},
        "experts_us_per_layer": {},
        "versions": {
            "torch": torch.__version__,
            "triton": version("triton"),
            "python": platform.python_version(),
        },
    }
    free, total = torch.cuda.mem_get_info()
    result["device_bytes_used"] = total - free
    layers = [
        provider.residency()
        for module in llm.apply_model(lambda model: list(model.modules()))[0]
        if (provider := getattr(module, "expert_provider", None)) is not None
    ]
    there = [layer for layer in layers if layer is not None]
    if there:
        result["layout"] = there[0].layout
        result["cold_bytes_per_s"] = there[0].cold_bytes_per_s
    result["hot_bytes"] = sum(layer.hot_bytes for layer in there)
    result["cold_bytes"] = sum(layer.cold_bytes for layer in there)
    result["hot_rows"] = sum(layer.hot_rows for layer in there)
    result["cold_rows"] = sum(layer.cold_rows for layer in there)

    def timed(streams: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": [7 + i, 3, 5, 9]} for i in range(streams)]
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    def prefill_ms(tokens: int) -> float:
        prompt = [3 + i % 1000 for i in range(tokens)]
        sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        begin = time.perf_counter()
        llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        return (time.perf_counter() - begin) * 1e3

    result["prefill_ms"] = {}
    for tokens in job["prefill_tokens"]:
        prefill_ms(tokens)
        found = [prefill_ms(tokens) for _ in range(PREFILL_REPEATS)]
        result["prefill_ms"][tokens] = statistics.median(found)
    short, long = job["tokens"]
    for streams in job["streams"]:
        timed(streams, short)
        strategy.drawn.zero_()
        steps = []
        for _ in range(job["repeats"] * (SINGLE_STREAM_REPEATS if streams == 1 else 1)):
            # The difference leaves prefill and request handling out.
            less, more = timed(streams, short), timed(streams, long)
            steps.append((more - less) / (long - short) * 1e3)
        result["steps_ms"][streams] = {
            "median": statistics.median(steps),
            "all": steps,
        }
        result["served"][streams] = strategy.served()
        result["distinct_cold"][streams] = strategy.distinct_cold(streams)
        if job["arm"] == "counting":
            core = llm.llm_engine.engine_core.engine_core
            recorded = result.setdefault("recorded", {})
            recorded[streams] = core.dump_expert_profile()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            timed(streams, PROFILED_TOKENS)
        experts_us = sum(
            event.time_range.elapsed_us()
            for event in profiler.events()
            if event.device_type == DeviceType.CUDA and "moe" in event.name.lower()
        )
        per_layer = experts_us / PROFILED_TOKENS / job["config"]["num_hidden_layers"]
        result["experts_us_per_layer"][streams] = round(per_layer, 2)
    with open(job["result"], "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
