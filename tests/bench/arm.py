"""One arm of the serving benchmark: one engine, one placement, in its own process.

A script, run by `arms.py`: it reads a JSON job from standard input and writes a JSON
result to the file named in it. Weights are random and routing is drawn from a table
with a set skew, so outputs mean nothing and speed is what a trained model of the same
shape and skew would have.
"""

import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_MOE_ROUTING_SIMULATION_STRATEGY="skewed",
    HF_HUB_OFFLINE="1",
)
TABLE_ROWS = 4096


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
            is_cold = torch.zeros(experts, dtype=torch.bool)
            is_cold[torch.tensor(job["map_cold"], dtype=torch.long)] = True
            per_row = is_cold[self.table.cpu().long()].sum(1)
            drawn = self.drawn.cpu().long()
            total, cold_seen = int(drawn.sum()) * top_k, int((drawn * per_row).sum())
            return {"hot": total - cold_seen, "cold": cold_seen}

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


def admit_candidate() -> None:
    """Measure MXFP4 on Marlin although its layers are not yet shown to be equal."""
    from vllm.model_executor.layers.fused_moe.pinned_hot import tensors

    names = ("w13_weight_scale", "w2_weight_scale")
    candidate = tensors.ExpertTensors(names, ("MarlinExperts",), bits=4)
    tensors._BY_METHOD.setdefault("Mxfp4OnlineMoEMethod", candidate)


def main() -> None:
    job = json.load(sys.stdin)
    import torch

    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import (
        RoutingSimulator,
    )

    admit_candidate()
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
    }
    free, total = torch.cuda.mem_get_info()
    result["device_bytes_used"] = total - free
    layers = [
        provider.residency()
        for module in llm.apply_model(lambda model: list(model.modules()))[0]
        if (provider := getattr(module, "expert_provider", None)) is not None
    ]
    there = [layer for layer in layers if layer is not None]
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

    short, long = job["tokens"]
    for streams in job["streams"]:
        timed(streams, short)
        strategy.drawn.zero_()
        steps = []
        for _ in range(job["repeats"]):
            # The difference leaves prefill and request handling out.
            less, more = timed(streams, short), timed(streams, long)
            steps.append((more - less) / (long - short) * 1e3)
        result["steps_ms"][streams] = {
            "median": statistics.median(steps),
            "all": steps,
        }
        result["served"][streams] = strategy.served()
    with open(job["result"], "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
