"""Run one real engine on the CPU and write down what it did.

A script, not a test: each run needs its own process, its own vLLM on the path and
its own compile cache. Reads a JSON job from standard input and writes a JSON result
to the file named in it.
"""

import json
import os
import sys
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",
)


def residency(model: Any) -> list[dict[str, int]]:
    """What each provided layer keeps where."""
    import dataclasses

    found = []
    for module in model.modules():
        provider = getattr(module, "expert_provider", None)
        if provider is not None and (there := provider.residency()) is not None:
            found.append({"layer": provider.layer_name} | dataclasses.asdict(there))
    return found


def places(model: Any) -> dict[str, Any]:
    """Where the driver has the pages of a rank's expert ranges, bytes by memory."""
    import torch
    from cuda.bindings import driver

    def ask(function: Any, *args: Any) -> Any:
        status, *values = function(*args)
        assert status == driver.CUresult.CUDA_SUCCESS, (function.__name__, status)
        return values[0] if values else None

    page_bytes = 2 << 20
    on_gpu = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found: dict[str, int] = {}
    for module in model.modules():
        provider = getattr(module, "expert_provider", None)
        if provider is None or provider.residency() is None:
            continue
        for name in ("w13_weight", "w2_weight"):
            rows = getattr(module, name)
            for start in range(0, rows.nbytes, page_bytes):
                address = rows.data_ptr() + start
                handle = ask(driver.cuMemRetainAllocationHandle, address)
                location = ask(
                    driver.cuMemGetAllocationPropertiesFromHandle, handle
                ).location
                ask(driver.cuMemRelease, handle)
                place = f"GPU {location.id}" if location.type == on_gpu else "host"
                found[place] = found.get(place, 0) + page_bytes
    return {"device": torch.accelerator.current_device_index(), "bytes": found}


def status_bytes(field: str) -> int:
    """A size from the process's status, such as RssAnon, what cannot be reclaimed."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def counters(model: Any) -> dict[str, Any]:
    """Count the logical ids each router gives out from now on."""
    import torch

    counts = {}
    for module in model.modules():
        router = getattr(module, "router", None)
        if hasattr(router, "set_capture_fn"):
            layer = module.routed_experts
            total = torch.zeros(
                layer.global_num_experts,
                dtype=torch.int64,
                device=next(layer.parameters()).device,
            )

            def count(ids: Any, total: Any = total) -> None:
                real = ids.flatten()
                total += torch.bincount(real[real >= 0], minlength=len(total))

            router.set_capture_fn(count)
            counts[layer.layer_name] = total
    return counts


def watch_schedule(scheduler: Any) -> list[int]:
    """Keep the number of rows of every batch that a scheduler makes from now on."""
    batches: list[int] = []
    schedule = scheduler.schedule

    def watched(*args: Any) -> Any:
        output = schedule(*args)
        batches.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = watched
    return batches


def main() -> None:
    job = json.load(sys.stdin)
    if job["steps"] == ["key"]:
        from vllm.engine.arg_utils import EngineArgs

        config = EngineArgs(model=job["model"], **job["engine"]).create_engine_config()
        with open(job["result"], "w") as file:
            json.dump({"key": config.compute_hash()}, file)
        return
    from vllm import LLM, SamplingParams

    llm = LLM(model=job["model"], **job["engine"])
    config = llm.llm_engine.vllm_config
    result: dict[str, Any] = {
        "vllm": sys.modules["vllm"].__file__,
        "dtype": str(config.model_config.dtype),
        "v2_runner": config.use_v2_model_runner,
    }
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"])
    one = SamplingParams(temperature=0, max_tokens=1)
    counts: dict[str, Any] = {}
    for step in job["steps"]:
        if step in ("generate", "generate one"):
            params = one if step == "generate one" else sampling
            outputs = llm.generate(job["prompts"], params, use_tqdm=False)
            result.setdefault("tokens", []).append(
                [list(output.outputs[0].token_ids) for output in outputs]
            )
            result.setdefault("fed", []).append(
                {
                    "prompt": sum(len(output.prompt_token_ids) for output in outputs),
                    "cached": sum(output.num_cached_tokens for output in outputs),
                    "later": sum(len(x.outputs[0].token_ids) - 1 for x in outputs),
                }
            )
        elif step == "watch":
            core = llm.llm_engine.engine_core.engine_core
            result["batches"] = watch_schedule(core.scheduler)
        elif step == "dump":
            core = llm.llm_engine.engine_core.engine_core
            result.setdefault("dumps", []).append(core.dump_expert_profile())
        elif step == "count":
            counts = llm.apply_model(counters)[0]
        elif step == "reload":
            llm.collective_rpc("reload_weights")
        elif step == "residency":
            result["residency"] = llm.apply_model(residency)[0]
        elif step == "places":
            result["places"] = llm.apply_model(places)
    result["anon_bytes"] = status_bytes("RssAnon")
    result["counts"] = {name: total.tolist() for name, total in counts.items()}
    with open(job["result"], "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
