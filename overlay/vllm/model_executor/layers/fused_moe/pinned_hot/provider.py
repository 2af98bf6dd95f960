# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keep the experts that traffic uses in fast memory, all others next to it.

Which rows are hot comes from the expert map; how hot and cold ones lie together is a
layout's business.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from vllm.config import ModelConfig, VllmConfig
from vllm.config.expert_provider import ExpertProviderConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
    ExpertResidency,
    ExpertWeightProvider,
    ResidentProvider,
    format_bytes,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.choose_layout import (
    layout_kind,
    process_layout,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.deferred import (
    defer_loading,
    release_layer_references,
    undo_defer_loading,
    unread_parameters,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.device_backing import (
    DeviceBacking,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.file_backing import file_backing
from vllm.model_executor.layers.fused_moe.pinned_hot.fingerprint import (
    model_fingerprint,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.hbm_budget import plan_hbm
from vllm.model_executor.layers.fused_moe.pinned_hot.layout import (
    Layout,
    RunExperts,
    row_parameters,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import (
    ExpertMap,
    ExpertMapError,
    LayerMap,
    load_expert_map,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.tensors import (
    expert_tensors,
    why_not_method,
    why_not_rows,
    why_not_scales,
)
from vllm.model_executor.model_loader.weight_utils import enable_tqdm
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.modular_kernel import (
        FusedMoEExpertsModular,
    )
    from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

logger = init_logger(__name__)

# Loaders that fill a model's parameters in place; the others bring their own
# storage, which would be re-homed only after the whole model is in memory.
_LOAD_FORMATS = ("auto", "hf", "safetensors", "mistral", "dummy")
# A line for each layer, like the loader's own for files: logs have no cursor.
_PROGRESS = "{desc}: {percentage:3.0f}% | {n_fmt}/{total_fmt} [{elapsed}<{remaining}]\n"


# An engine validates once and then asks for every layer; the cache also makes all
# layers agree on one reading of the file.
@functools.cache
def _read_map(path: str) -> ExpertMap:
    return load_expert_map(path)


def _loads_draft_model(vllm_config: VllmConfig) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and (
        speculative.use_eagle() or speculative.method == "draft_model"
    )


def _why_not_tier(experts: ExpertProviderConfig, ranks: int) -> str | None:
    peer = experts.peer_device
    if peer is None:
        return None
    if ranks > 1:
        return (
            f"--expert-cold-tier peer:{peer} serves one GPU and {ranks} ranks would "
            "share it. Use --expert-cold-tier host."
        )
    if not 0 < peer < (count := current_platform.device_count()):
        return (
            f"--expert-cold-tier peer:{peer}: this process sees GPUs 0 … {count - 1} "
            "and runs on GPU 0. Name another one, or add it to CUDA_VISIBLE_DEVICES."
        )
    return None


def _why_not_layout(experts: ExpertProviderConfig) -> str | None:
    mode, tier = experts.expert_split_mode, experts.expert_cold_tier
    if experts.expert_layout != "split":
        if mode == "auto":
            return None
        return (
            f"--expert-split-mode {mode} has no effect with --expert-layout "
            f"{experts.expert_layout}. Use --expert-layout split or drop the flag."
        )
    if tier != "host":
        return (
            f"--expert-cold-tier {tier} is served by --expert-layout range: split "
            "reads cold rows from host memory. Drop one of them."
        )
    return None


def _why_not_budget(vllm_config: VllmConfig) -> str | None:
    experts, cache = vllm_config.offload_config.experts, vllm_config.cache_config
    if experts.expert_hbm_gib != "auto":
        if experts.expert_keep_kv_tokens is not None:
            return (
                f"--expert-keep-kv-tokens {experts.expert_keep_kv_tokens} has no "
                "effect without --expert-hbm-gib auto. Add that or drop the flag."
            )
        return None
    if (experts.expert_keep_kv_tokens is None) == (cache.kv_cache_memory_bytes is None):
        return (
            "--expert-hbm-gib auto needs to know how large the KV cache shall be: "
            "give either --expert-keep-kv-tokens or --kv-cache-memory-bytes."
        )
    return None


def _why_not_engine(vllm_config: VllmConfig) -> str | None:
    """Why no layer of this engine can be served, with the cure, or None."""
    model_config = vllm_config.model_config
    parallel = vllm_config.parallel_config
    offload = vllm_config.offload_config
    if model_config is None or not model_config.is_moe:
        return "the model has no MoE layers. Drop the flag."
    if current_platform.is_cuda():
        if reason := DeviceBacking.why_not_here(offload.experts.expert_layout):
            return reason
        if offload.experts.expert_cold_dir is not None:
            return (
                "--expert-cold-dir has no effect on CUDA, where cold rows lie in "
                "host memory. Drop it."
            )
        if model_config.enable_sleep_mode:
            return (
                "sleep mode cannot release or restore expert ranges. Drop "
                "--enable-sleep-mode."
            )
        if reason := _why_not_tier(offload.experts, parallel.world_size):
            return reason
    elif current_platform.is_cpu():
        if offload.experts.expert_cold_tier != "host":
            return (
                f"--expert-cold-tier {offload.experts.expert_cold_tier} has no effect "
                "on the CPU backend. Drop it."
            )
        if offload.experts.expert_hbm_gib == "auto":
            return (
                "--expert-hbm-gib auto has no effect on the CPU backend, whose KV "
                "cache is sized by the user. Give a number of GiB."
            )
    else:
        return (
            f"platform {current_platform.device_type!r} has no page backing; layout "
            "'range' runs on CUDA and on the CPU backend. Drop the flag."
        )
    if reason := _why_not_budget(vllm_config):
        return reason
    if reason := _why_not_layout(offload.experts):
        return reason
    if vllm_config.lora_config is not None:
        return "LoRA on experts has not been shown to be exact. Drop --enable-lora."
    if parallel.enable_expert_parallel or parallel.enable_eplb:
        return (
            "expert parallelism has not been shown to be exact. Drop "
            "--enable-expert-parallel and --enable-eplb."
        )
    if parallel.pipeline_parallel_size > 1:
        return (
            "an expert map covers the whole model and a pipeline stage holds a "
            "part. Use --tensor-parallel-size instead."
        )
    if parallel.data_parallel_size > 1:
        return "data parallelism has not been shown to be exact. Drop the flag."
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        return (
            "another offloader would move the same weights. Drop "
            "--cpu-offload-gb and --offload-group-size."
        )
    load_format = vllm_config.load_config.load_format
    if load_format not in _LOAD_FORMATS:
        return (
            f"--load-format {load_format} does not fill parameters in place. Use one "
            f"of {', '.join(_LOAD_FORMATS)}."
        )
    return None


class PinnedHotProvider(ExpertWeightProvider):
    """Places the rows of a layer's expert tensors by the expert map."""

    name = "pinned_hot"

    def __init__(self, config: ExpertProviderConfig, layer_name: str):
        super().__init__(config, layer_name)
        if config.expert_map is None:
            raise ValueError(f"--expert-provider {self.name} needs --expert-map PATH.")
        self._map = _read_map(config.expert_map)
        self.deferred = False
        self._dummy = False
        self._entry: LayerMap | None = None
        self._granted: int | None = None
        self._homes: dict[str, int] = {}
        self._residency: ExpertResidency | None = None
        self._progress: tqdm | None = None
        self._run: RunExperts | None = None

    @property
    def _layout(self) -> Layout:
        return process_layout(self.config)

    @classmethod
    def needs_routed_ids(cls, config: ExpertProviderConfig) -> bool:
        return layout_kind(config) == "split"

    @classmethod
    def validate(cls, vllm_config: VllmConfig) -> None:
        """Refuse engines that cannot be served and maps of other models."""
        config = vllm_config.offload_config.experts
        if reason := _why_not_engine(vllm_config):
            raise ValueError(f"--expert-provider {cls.name}: {reason}")
        if config.expert_map is None:
            raise ValueError(
                f"--expert-provider {cls.name} needs --expert-map PATH: a map says "
                "which experts are hot."
            )
        _read_map.cache_clear()  # the file may have changed since another engine
        expert_map = _read_map(config.expert_map)
        # How many MoE layers there are is known once the model is built; `bind`
        # compares that.
        num_moe_layers = expert_map.fingerprint.num_moe_layers
        model = model_fingerprint(vllm_config.model_config, num_moe_layers)
        expert_map.check_model(model, config.expert_map)
        if expert_map.draft_layers and not _loads_draft_model(vllm_config):
            raise ExpertMapError(
                config.expert_map,
                "draft_layers",
                f"{sorted(expert_map.draft_layers)} are named and no draft model is "
                "loaded",
                "Add the --speculative-config the map was made with, or drop the "
                "entries.",
            )
        if current_platform.is_cpu():
            file_backing(config.expert_cold_dir).validate()

    def stage(self, layer: "RoutedExperts") -> None:
        names = expert_tensors(layer)
        if names is None or not self._map.names(self.layer_name):
            return  # `bind` refuses the layer or leaves it resident
        self.deferred = defer_loading(layer, names.loaded, names.zeroed)

    @classmethod
    def bind(
        cls,
        layers: "dict[str, RoutedExperts]",
        vllm_config: VllmConfig,
        model_config: ModelConfig,
        unloaded_bytes: int,
    ) -> None:
        """Match the map's layers with the model's and check every budget.

        The layers of a draft model stay resident unless the map has a
        `draft_layers` section.
        """
        path = vllm_config.offload_config.experts.expert_map
        assert path is not None
        expert_map = _read_map(path)
        # Some proposers load their model with a copy of the target's configuration.
        is_draft = (
            model_config.runner_type == "draft"
            or model_config is not vllm_config.model_config
        )
        if is_draft and not expert_map.draft_layers:
            for layer in layers.values():
                _leave_resident(layer)
            return
        expert_map.check_layers(
            {name: x.moe_config.num_logical_experts for name, x in layers.items()},
            path,
            draft=is_draft,
        )
        if not is_draft:
            model = model_fingerprint(model_config, len(layers))
            expert_map.check_model(model, path)
        super().bind(layers, vllm_config, model_config, unloaded_bytes)
        entries = expert_map.draft_layers if is_draft else expert_map.layers
        dummy = vllm_config.load_config.load_format == "dummy"
        layout = process_layout(vllm_config.offload_config.experts)
        granted = layout.plan(
            layers,
            entries,
            _budget_bytes(vllm_config, unloaded_bytes),
            vllm_config.parallel_config.local_world_size,
        )
        progress = tqdm(
            total=len(layers),
            desc="Placing expert rows",
            bar_format=_PROGRESS,
            disable=not enable_tqdm(vllm_config.load_config.use_tqdm_on_load),
        )
        for name, layer in layers.items():
            provider = layer.expert_provider
            assert isinstance(provider, cls)
            provider._progress = progress
            provider._entry, provider._dummy = entries[name], dummy
            provider._granted = granted[name]
            if provider.deferred:
                release_layer_references(layer)

    def check(self, layer: "RoutedExperts") -> str | None:
        return (
            why_not_method(layer)
            or self._layout.why_not_layer(layer)
            or why_not_rows(layer, loaded=False)
        )

    def attach(self, layer: "RoutedExperts") -> None:
        names = expert_tensors(layer)
        if names is None or self._entry is None:
            raise ValueError(
                f"{self.layer_name}: its weights were loaded and the layer was never "
                "bound: this model loader does not build models through vLLM's "
                f"BaseModelLoader. Use --load-format {_LOAD_FORMATS[0]}."
            )
        if self.deferred and not (self.attached or self._dummy):
            _require_read(layer, names.loaded)
        if self._homes and self._homes == _addresses(layer, names.rows):
            return
        if reason := why_not_rows(layer, loaded=True) or why_not_scales(layer):
            raise ValueError(f"{self.layer_name}: after post-processing, {reason}")
        placed = self._layout.attach(layer, self._entry, self._granted)
        # The quantization config may hold the same Parameter objects, so the
        # objects stay and their storage changes.
        homes = placed.homes
        for parameter, home in zip(row_parameters(layer).values(), homes, strict=True):
            parameter.data = home
        if placed.run is not None:
            self._run = placed.run
            kernel = layer.quant_method.moe_kernel.impl
            kernel.run_experts = functools.partial(self.run, kernel.fused_experts)
        self._homes = _addresses(layer, names.rows)
        self._residency = placed.residency
        self.attached = True
        if self._progress is not None:
            self._progress.update()
            self._progress = None

    def run(
        self, experts: "FusedMoEExpertsModular", **arguments: Any
    ) -> "UnfinalizedMoEOutput | None":
        assert self._run is not None
        return self._run(**arguments)

    def why_not_reload(self) -> str | None:
        return self._layout.why_not_reload if self.attached else None

    def residency(self) -> ExpertResidency | None:
        return self._residency


def _addresses(layer: "RoutedExperts", names: Sequence[str]) -> dict[str, int]:
    parameters = {name: getattr(layer, name, None) for name in names}
    return {name: p.data_ptr() for name, p in parameters.items() if p is not None}


def _require_read(layer: "RoutedExperts", names: Sequence[str]) -> None:
    """Refuse a deferred layer whose rows the model wrote in another way."""
    if unread := unread_parameters(layer, names):
        raise ValueError(
            f"{layer.layer_name}: no weights reached {', '.join(unread)}: the model "
            "writes them without the parameter's weight_loader, which "
            "--expert-provider pinned_hot needs. Drop the flag."
        )


def _leave_resident(layer: "RoutedExperts") -> None:
    """Undo `stage` for a layer that turns out not to be served."""
    provider = layer.expert_provider
    if provider.deferred:
        undo_defer_loading(layer)
    layer.expert_provider = ResidentProvider(provider.config, provider.layer_name)


def _budget_bytes(vllm_config: VllmConfig, unloaded_bytes: int) -> int | None:
    """Bytes of `--expert-hbm-gib`; None to follow the map's cut.

    Raises:
        ValueError: `auto`, and nothing is left for the experts.

    """
    size = vllm_config.offload_config.experts.expert_hbm_gib
    if size is None:
        return None
    if size != "auto":
        return int(float(size) * (1 << 30))
    device = torch.accelerator.current_device_index()
    plan = plan_hbm(vllm_config, device, unloaded_bytes)
    sizes = (plan.kv_cache, plan.other_weights, plan.activations)
    parts = "%s of KV cache, %s of other weights, %s of activations (estimated)"
    rest = parts % tuple(map(format_bytes, sizes))
    if plan.experts < 0:
        raise ValueError(
            f"--expert-hbm-gib auto: {rest} exceed {format_bytes(plan.usable)} that "
            f"GPU {device} has left. Ask for a smaller KV cache or raise "
            "--gpu-memory-utilization."
        )
    logger.info(
        "GPU %d: %s for expert rows beside %s",
        device,
        format_bytes(plan.experts),
        rest,
    )
    return plan.experts
