# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Count the routes of a model on the device it runs on.

A persistent device buffer holds the phase of each row of the batch. It is filled
before a real forward pass and cleared after it, so whatever else runs the model
(memory profiling, warm-up, graph capture, dummy batches of data parallelism) counts
nothing. The layers read it where they select experts, inside captured graphs too.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.expert_routes import route_recorder
from vllm.model_executor.layers.fused_moe.expert_profile.count_routes import (
    DECODE,
    PREFILL,
    count_routes,
)
from vllm.utils.torch_utils import async_tensor_h2d

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.v1.worker.worker_base import WorkerBase

logger = init_logger(__name__)


@dataclass(frozen=True)
class RecordedRoutes:
    """Everything counted since the model was loaded, by one rank.

    Attributes:
        layer_names: The rank's MoE layers, in model order.
        counts: Selections, int64 `(num_layers, 2, num_experts)`: prefill, decode.
        tokens: Rows that were to be counted: prefill, decode.

    """

    layer_names: tuple[str, ...]
    counts: npt.NDArray[np.int64]
    tokens: tuple[int, int]


class RouteCounter:
    """Counts the routes of one layer.

    Args:
        layer_name: The layer, as vLLM names it.
        phases: Phase of each row of the batch, int8 `(max_rows,)`.
        counts: The layer's counters, int64 `(2, num_experts)`.
        dp_rank: This rank among data-parallel ones.

    """

    def __init__(
        self,
        layer_name: str,
        phases: torch.Tensor,
        counts: torch.Tensor,
        dp_rank: int,
    ):
        self.layer_name = layer_name
        self.phases = phases
        self.counts = counts
        self.dp_rank = dp_rank

    def capture(self, topk_ids: torch.Tensor) -> None:
        """Count what a router selected; also called while the model is traced."""
        if torch.compiler.is_compiling():
            torch.ops.vllm.count_layer_routes(topk_ids, self.layer_name)
        else:
            self.count(topk_ids)

    def count(self, topk_ids: torch.Tensor) -> None:
        """Count the rows that are this rank's own.

        Args:
            topk_ids: Logical ids, integer `(num_rows, top_k)`.

        """
        count_routes(topk_ids[self._own_rows(len(topk_ids))], self.phases, self.counts)

    def _own_rows(self, num_rows: int) -> slice:
        """Where this rank's rows lie: kernels may gather all ranks' rows first."""
        metadata = get_forward_context().dp_metadata
        if metadata is None:
            return slice(num_rows)
        sizes = metadata.num_tokens_across_dp_cpu.tolist()
        if num_rows == sizes[self.dp_rank]:
            return slice(num_rows)
        if num_rows == sum(sizes):
            first = sum(sizes[: self.dp_rank])
            return slice(first, first + sizes[self.dp_rank])
        raise RuntimeError(
            f"{self.layer_name} routes {num_rows} rows, and the data-parallel ranks "
            f"have {sizes}: --expert-profile-out cannot tell whose they are."
        )


class RouteRecorder:
    """Counts the routes of a model's layers.

    Args:
        model: The built model.
        vllm_config: The engine's configuration.

    Raises:
        ValueError: A layer's routes cannot be counted.

    """

    def __init__(self, model: nn.Module, vllm_config: VllmConfig):
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsSink,
        )

        layers = _moe_layers(model, vllm_config)
        model_config = vllm_config.model_config
        device = vllm_config.device_config.device
        self.layer_names = tuple(layers)
        self.tokens = [0, 0]
        # All ranks of a tensor-parallel group select alike, so one counts.
        self.counting = get_tensor_model_parallel_rank() == 0
        self._phases = torch.zeros(
            vllm_config.scheduler_config.max_num_batched_tokens,
            dtype=torch.int8,
            device=device,
        )
        self._counts = torch.zeros(
            (len(layers), 2, model_config.get_num_experts()),
            dtype=torch.int64,
            device=device,
        )
        self._num_rows = 0
        if not self.counting:
            return
        dp_rank = vllm_config.parallel_config.data_parallel_rank
        for (name, layer), counts in zip(layers.items(), self._counts, strict=True):
            layer.route_counter = RouteCounter(name, self._phases, counts, dp_rank)
            if layer.is_monolithic:
                # Its kernel writes the ids it selected for us to read.
                layer.routed_experts.routing_sink = RoutedExpertsSink(
                    layer.moe_config, layer.route_counter.capture
                )
            else:
                layer.router.set_capture_fn(layer.route_counter.capture)
        logger.info("Counting the routes of %d MoE layers", len(layers))

    def begin(
        self,
        num_scheduled_tokens: npt.NDArray[np.integer],
        num_computed_tokens: npt.NDArray[np.integer],
        num_prompt_tokens: npt.NDArray[np.integer],
    ) -> None:
        """Take the next forward pass as real; see `expert_routes.begin_routes`."""
        if not self.counting:
            return
        prompt = np.clip(
            num_prompt_tokens - num_computed_tokens, 0, num_scheduled_tokens
        )
        lengths = np.stack([prompt, num_scheduled_tokens - prompt], axis=1).ravel()
        kinds = np.tile(np.array([PREFILL, DECODE], np.int8), len(prompt))
        phases = np.repeat(kinds, lengths)
        self._num_rows = len(phases)
        # Staged in fresh pinned memory, which stays until the copy is done: the next
        # step may be prepared before.
        async_tensor_h2d(phases, out=self._phases[: len(phases)])
        num_prefill = int(prompt.sum())
        self.tokens[0] += num_prefill
        self.tokens[1] += len(phases) - num_prefill

    def end(self) -> None:
        """Count nothing until the next `begin`."""
        self._phases[: self._num_rows].zero_()
        self._num_rows = 0

    def read(self) -> RecordedRoutes:
        """Read the counters; waits for the passes that were launched."""
        return RecordedRoutes(
            self.layer_names, self._counts.cpu().numpy(), tuple(self.tokens)
        )


def _moe_layers(model: nn.Module, vllm_config: VllmConfig) -> "dict[str, MoERunner]":
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        RoutedExpertsCaptureSource,
    )
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, RoutedExpertsCaptureSource):
            raise ValueError(
                f"--expert-profile-out: {name} ({type(module).__name__}) routes in a "
                "kernel of its own. Drop the flag."
            )
        if isinstance(module, MoERunner):
            if reason := _why_not_layer(module, vllm_config):
                raise ValueError(
                    f"--expert-profile-out: layer {module.layer_name} {reason}"
                )
            layers[module.layer_name] = module
    if not layers and vllm_config.parallel_config.pipeline_parallel_size == 1:
        raise ValueError(
            f"--expert-profile-out: {type(model).__name__} has no MoE layer of vLLM's "
            "own class. Drop the flag."
        )
    return layers


def _why_not_layer(layer: "MoERunner", vllm_config: VllmConfig) -> str | None:
    from vllm.model_executor.layers.fused_moe.modular_kernel import (
        FusedMoEExpertsMonolithic,
    )
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.router.zero_expert_router import (
        ZeroExpertRouter,
    )

    model_config = vllm_config.model_config
    router = layer.router
    if isinstance(router, ZeroExpertRouter) or not (
        layer.is_monolithic or isinstance(router, BaseRouter)
    ):
        return f"has a router that cannot be read, {type(router).__name__}."
    if layer.is_monolithic:
        kernel = layer.routed_experts.quant_method.experts_cls
        hook = FusedMoEExpertsMonolithic.supports_routing_replay_capture
        if kernel.supports_routing_replay_capture is hook:
            return (
                f"selects experts inside {kernel.__name__}, which does not tell them. "
                "Choose another --moe-backend to record with; the profile does not "
                "depend on it."
            )
    found = layer.moe_config.num_logical_experts, router.top_k
    want = model_config.get_num_experts(), model_config.get_num_experts_per_tok()
    if found != want:
        return (
            f"has {found[0]} experts and top_k {found[1]}, and the model's config says "
            f"{want[0]} and {want[1]}: layers that differ do not fit in one profile."
        )
    return None


def read_routes(worker: "WorkerBase") -> RecordedRoutes | None:
    """What a worker's rank contributes to the profile; None if another rank does.

    Sent to the workers by the engine; see `vllm.v1.engine.expert_profile`.
    """
    recorder = route_recorder(worker.get_model())
    if recorder is None:
        raise RuntimeError("--expert-profile-out: this worker's model has no recorder")
    return recorder.read() if recorder.counting else None
