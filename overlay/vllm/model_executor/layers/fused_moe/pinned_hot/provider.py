# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keep the experts that traffic uses in fast memory, all others next to it.

Layout `range`: an expert tensor stays one tensor with the shape, strides and
expert order the kernels know. Only the memory behind its pages is chosen, from
the expert map. No kernel, router or id changes, so neither do the results.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from vllm.config import ModelConfig, VllmConfig
from vllm.config.expert_provider import ExpertProviderConfig
from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
    ExpertResidency,
    ExpertWeightProvider,
    ResidentProvider,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.backing import (
    PlannedBytes,
    RangeBacking,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.deferred import (
    defer_loading,
    release_layer_references,
    undo_defer_loading,
    unread_parameters,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.device_backing import (
    DeviceBacking,
    device_backing,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.file_backing import file_backing
from vllm.model_executor.layers.fused_moe.pinned_hot.fingerprint import (
    model_fingerprint,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import (
    ExpertMap,
    ExpertMapError,
    LayerMap,
    load_expert_map,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.placement import (
    PageMask,
    RowTensor,
    hot_budget,
    hot_bytes_per_row,
    place_pages,
    row_heat,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.tensors import (
    expert_tensors,
    row_tensor,
    why_not_rows,
)
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

# Loaders that fill a model's parameters in place; the others bring their own
# storage, which would be re-homed only after the whole model is in memory.
_LOAD_FORMATS = ("auto", "hf", "safetensors", "mistral", "dummy")


# An engine validates once and then asks for every layer; the cache also makes all
# layers agree on one reading of the file.
@functools.cache
def _read_map(path: str) -> ExpertMap:
    return load_expert_map(path)


def _backing(config: ExpertProviderConfig) -> RangeBacking:
    """The backing of this process's platform and device."""
    if current_platform.is_cpu():
        return file_backing(config.expert_cold_dir)
    return device_backing(torch.accelerator.current_device_index())


def _loads_draft_model(vllm_config: VllmConfig) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and (
        speculative.use_eagle() or speculative.method == "draft_model"
    )


def _why_not_engine(vllm_config: VllmConfig) -> str | None:
    """Why no layer of this engine can be served, with the cure, or None."""
    model_config = vllm_config.model_config
    parallel = vllm_config.parallel_config
    offload = vllm_config.offload_config
    if model_config is None or not model_config.is_moe:
        return "the model has no MoE layers. Drop the flag."
    if current_platform.is_cuda():
        if reason := DeviceBacking.why_not_here():
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
    elif not current_platform.is_cpu():
        return (
            f"platform {current_platform.device_type!r} has no page backing; layout "
            "'range' runs on CUDA and on the CPU backend. Drop the flag."
        )
    if offload.experts.expert_layout == "split":
        return "--expert-layout split is not there yet. Use range or auto."
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
        self._homes: dict[str, int] = {}
        self._residency: ExpertResidency | None = None

    @property
    def _backing(self) -> RangeBacking:
        return _backing(self.config)

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
        self.deferred = defer_loading(layer, names.rows)

    @classmethod
    def bind(
        cls,
        layers: "dict[str, RoutedExperts]",
        vllm_config: VllmConfig,
        model_config: ModelConfig,
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
        super().bind(layers, vllm_config, model_config)
        entries = expert_map.draft_layers if is_draft else expert_map.layers
        dummy = vllm_config.load_config.load_format == "dummy"
        for name, layer in layers.items():
            assert isinstance(layer.expert_provider, cls)
            layer.expert_provider._entry = entries[name]
            layer.expert_provider._dummy = dummy
            if layer.expert_provider.deferred:
                release_layer_references(layer)
        backing = _backing(vllm_config.offload_config.experts)
        planned = _plan_bytes(layers, entries, backing.page_bytes)
        backing.check(planned, vllm_config.parallel_config.local_world_size)

    def check(self, layer: "RoutedExperts") -> str | None:
        return why_not_rows(layer)

    def attach(self, layer: "RoutedExperts") -> None:
        names = expert_tensors(layer)
        if names is None or self._entry is None:
            raise ValueError(
                f"{self.layer_name}: its weights were loaded and the layer was never "
                "bound: this model loader does not build models through vLLM's "
                f"BaseModelLoader. Use --load-format {_LOAD_FORMATS[0]}."
            )
        if self.deferred and not (self.attached or self._dummy):
            _require_read(layer, names.rows)
        parameters = {name: getattr(layer, name) for name in names.rows}
        if self._homes == {name: p.data_ptr() for name, p in parameters.items()}:
            return
        if reason := why_not_rows(layer):
            raise ValueError(f"{self.layer_name}: after post-processing, {reason}")
        entry, backing = self._entry, self._backing
        tensors = [row_tensor(parameter) for parameter in parameters.values()]
        heat = row_heat(entry.ranking, entry.share, entry.hot)
        budget = hot_budget(tensors, entry.hot_rows, backing.page_bytes)
        masks = place_pages(tensors, [heat] * len(tensors), budget, backing.page_bytes)
        ranges = [
            backing.build(parameter.data, mask, f"{self.layer_name}.{name}")
            for (name, parameter), mask in zip(parameters.items(), masks, strict=True)
        ]
        # The quantization config may hold the same Parameter objects, so the
        # objects stay and their storage changes.
        for parameter, home in zip(parameters.values(), ranges, strict=True):
            parameter.data = home
        self._homes = {name: p.data_ptr() for name, p in parameters.items()}
        self._residency = _residency(entry, tensors, masks, backing.page_bytes)
        self.attached = True

    def residency(self) -> ExpertResidency | None:
        return self._residency


def _residency(
    entry: LayerMap,
    tensors: Sequence[RowTensor],
    masks: Sequence[PageMask],
    page_bytes: int,
) -> ExpertResidency:
    cold_rows = {
        row
        for tensor, mask in zip(tensors, masks, strict=True)
        for row, hot in enumerate(hot_bytes_per_row(tensor, mask, page_bytes))
        if hot < tensor.row_bytes
    }
    hot_pages = sum(int(mask.sum()) for mask in masks)
    pages = sum(len(mask) for mask in masks)
    return ExpertResidency(
        hot_rows=len(entry.ranking) - len(cold_rows),
        cold_rows=len(cold_rows),
        hot_bytes=hot_pages * page_bytes,
        cold_bytes=(pages - hot_pages) * page_bytes,
        expected_cold_share=sum(
            share
            for expert, share in zip(entry.ranking, entry.share, strict=True)
            if expert in cold_rows
        ),
    )


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


def _plan_bytes(
    layers: "dict[str, RoutedExperts]",
    entries: Mapping[str, LayerMap],
    page_bytes: int,
) -> PlannedBytes:
    hot = total = largest = 0
    for name, layer in layers.items():
        names = expert_tensors(layer)
        assert names is not None
        tensors = [row_tensor(getattr(layer, x), names.bits) for x in names.rows]
        num_bytes = sum(tensor.num_bytes for tensor in tensors)
        total += num_bytes
        loaded = sum(row_tensor(getattr(layer, x)).num_bytes for x in names.rows)
        largest = max(largest, loaded + num_bytes)
        hot += hot_budget(tensors, entries[name].hot_rows, page_bytes)
    return PlannedBytes(hot=hot, total=total, largest_layer=largest)
