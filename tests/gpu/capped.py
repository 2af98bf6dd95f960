"""Load and serve a model on a GPU of which most is taken, and watch its memory.

A script: it reads a JSON job from standard input. A ballast leaves `free_bytes` of the
GPU; from then on a thread samples what the driver and the process have in use. Without
`free_bytes` nothing is taken and nobody watches, which would slow the load down.
"""

import json
import os
import sys
import threading
import time
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    HF_HUB_OFFLINE="1",
)
INTERVAL_S = 0.002


def memory_in_use(kind: str) -> int:
    """A size from the process's status, such as RssAnon."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(kind + ":"))
    return int(line.split()[1]) * 1024


def available_memory() -> int:
    """MemAvailable of the host, bytes; pages the driver pins do not show elsewhere."""
    with open("/proc/meminfo") as file:
        line = next(line for line in file if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


class Watch(threading.Thread):
    """Peak of the device memory, and of the process's own host memory."""

    def __init__(self, device_start: int):
        super().__init__(daemon=True)
        self.device_start = device_start
        self.device_peak = self.host_peak = 0
        self.done = threading.Event()

    def run(self) -> None:
        import torch

        while not self.done.is_set():
            free, _ = torch.cuda.mem_get_info()
            self.device_peak = max(self.device_peak, self.device_start - free)
            self.host_peak = max(self.host_peak, memory_in_use("RssAnon"))
            time.sleep(INTERVAL_S)

    def stop(self) -> dict[str, int]:
        self.done.set()
        self.join()
        return {"device": self.device_peak, "host": self.host_peak}


def main() -> None:
    job = json.load(sys.stdin)
    import torch
    from cuda.bindings import driver

    from vllm import LLM, SamplingParams

    torch.empty(1, device="cuda")
    anonymous = memory_in_use("RssAnon")
    watch: Watch | None = None
    if job["free_bytes"] is not None:
        free, total = torch.cuda.mem_get_info()
        # Not through torch: it stands for what another process has taken.
        status, _ = driver.cuMemAlloc(free - job["free_bytes"])
        assert status == driver.CUresult.CUDA_SUCCESS, status
        job["engine"]["gpu_memory_utilization"] = 0.9 * job["free_bytes"] / total
        free, _ = torch.cuda.mem_get_info()
        watch = Watch(free)
        watch.start()
    begin = time.perf_counter()
    load_seconds: list[float] = []
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    stock_load = BaseModelLoader.load_model

    def timed_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        model = stock_load(self, *args, **kwargs)
        torch.cuda.synchronize()
        load_seconds.append(time.perf_counter() - start)
        if watch is not None:
            peaks.update(watch.stop())
        return model

    peaks: dict[str, int] = {}
    BaseModelLoader.load_model = timed_load  # type: ignore[method-assign]
    llm = LLM(model=job["model"], **job["engine"])
    result: dict[str, Any] = {
        "start_s": time.perf_counter() - begin,
        "load_s": load_seconds[0],
        "peaks": peaks,
        "anonymous_before": anonymous,
        "available_after": available_memory(),
        "kv_tokens": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        * llm.llm_engine.vllm_config.cache_config.block_size,
    }
    model = llm.apply_model(lambda model: model)[0]
    there = [
        residency
        for module in model.modules()
        if (provider := getattr(module, "expert_provider", None)) is not None
        and (residency := provider.residency()) is not None
    ]
    rows = ("w13_weight", "w2_weight")
    expert_bytes = [
        sum(getattr(module, name).nbytes for name in rows)
        for module in model.modules()
        if hasattr(module, "expert_provider")
    ]
    dense = sum(
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if not name.endswith(rows)
    )
    result |= {
        "hot_bytes": sum(x.hot_bytes for x in there),
        "cold_bytes": sum(x.cold_bytes for x in there),
        "layer_bytes": max(expert_bytes),
        "expert_bytes": sum(expert_bytes),
        "dense_bytes": dense,
    }
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    result["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
    with open(job["result"], "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
