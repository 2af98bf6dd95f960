# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Providers decide which memory holds the expert weights of a MoE layer.

A provider is chosen once per engine (`--expert-provider`) and instantiated once
per layer. Its life follows the load of the model:

1. `validate` — before the model is built: is the configuration usable at all?
2. `stage` — the layer's parameters exist and are empty: how shall they be
   loaded?
3. `bind` — the whole model is built and no weight is loaded: which layers does
   the provider serve?
4. `attach` — this layer's weights are loaded and post-processed: re-home them.
5. `run` — once per forward pass, for a provider whose rows a kernel cannot find
   alone. Most never take part in a pass.

What an attached layer reads stays at its address until the layer is freed:
captured graphs hold the pointers. A weight reload therefore copies into the
attached tensors.

Unlike `vllm.model_executor.offloader`, which moves whole parameters of whole
decoder layers by position, a provider works on rows: it knows which dimension
counts experts and may place each row on its own.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.config import ModelConfig, VllmConfig, get_current_vllm_config_or_none
from vllm.config.expert_provider import ExpertProviderConfig

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.modular_kernel import (
        FusedMoEExpertsModular,
    )
    from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


@dataclass(frozen=True)
class ExpertResidency:
    """What one layer keeps where, after `attach`.

    Attributes:
        hot_rows: Experts every byte of which lies in fast memory.
        cold_rows: The other experts.
        hot_bytes: Bytes of expert tensors in fast memory, whole pages.
        cold_bytes: Bytes of expert tensors elsewhere, whole pages.
        straddling_bytes: Those of `hot_bytes` that are parts of cold rows.
        expected_cold_share: Share of the profiled selections that pick a cold
            row, 0 to 1; None when no profile is known.
        expected_cold_bytes: Cold bytes that a token of the profile reads on
            average, if no other token needs the same; None likewise.
        layout: How the two kinds of rows are laid out, for people.
        memories: What fast memory and the other one are, for people.
        cold_bytes_per_s: How fast the other memory is read; None if not measured.

    """

    hot_rows: int
    cold_rows: int
    hot_bytes: int
    cold_bytes: int
    straddling_bytes: int = 0
    expected_cold_share: float | None = None
    expected_cold_bytes: float | None = None
    layout: str | None = None
    memories: tuple[str, str] = ("fast memory", "slower memory")
    cold_bytes_per_s: float | None = None


class ExpertWeightProvider(ABC):
    """Owner of one MoE layer's expert weights.

    A reason returned by `check` is an error at start-up, never a silent
    fall-back to another provider.
    """

    name: ClassVar[str]
    """Value of `--expert-provider` that selects the class."""

    attached = False
    """Whether the provider has taken over weights that are not to be processed a
    second time. Set by providers whose layers are loaded one by one."""

    def __init__(self, config: ExpertProviderConfig, layer_name: str):
        self.config = config
        self.layer_name = layer_name

    @classmethod  # noqa: B027
    def validate(cls, vllm_config: VllmConfig) -> None:
        """Refuse a configuration before anything is built.

        Raises:
            ValueError: The provider cannot serve this engine, or a flag of the
                group cannot take effect with it.

        """

    def stage(self, layer: "RoutedExperts") -> None:  # noqa: B027
        """Prepare the layer's new, empty parameters for loading.

        All layers are staged before the first weight is read, so a provider whose
        model does not fit in memory takes the parameters' memory away here.
        """

    @classmethod
    def bind(
        cls,
        layers: "dict[str, RoutedExperts]",
        vllm_config: VllmConfig,
        model_config: ModelConfig,
        unloaded_bytes: int,
    ) -> None:
        """Settle which layers the provider serves, before any weight is loaded.

        The default checks every layer. A layer that is to stay as it is gets a
        `ResidentProvider`.

        Args:
            layers: The MoE layers of one model by layer name.
            vllm_config: The engine's configuration.
            model_config: The model they belong to; its `runner_type` is "draft"
                for the model of a speculative decoder.
            unloaded_bytes: Bytes of the model's other parameters that have no memory
                yet, since they are quantized while loading.

        Raises:
            ValueError: A layer cannot be served.

        """
        for layer_name, layer in layers.items():
            if reason := layer.expert_provider.check(layer):
                raise ValueError(
                    f"--expert-provider {cls.name} cannot serve layer "
                    f"{layer_name}: {reason}"
                )

    @abstractmethod
    def check(self, layer: "RoutedExperts") -> str | None:
        """Why this provider cannot serve the layer, or None if it can."""

    @abstractmethod
    def attach(self, layer: "RoutedExperts") -> None:
        """Take over the layer's post-processed expert tensors.

        Called again when the layer's weights were processed again; must then
        leave tensors that it already owns where they are.
        """

    @abstractmethod
    def residency(self) -> ExpertResidency | None:
        """Where the rows of the layer lie; None before `attach` and for layers
        that are left as they were loaded."""

    def why_not_reload(self) -> str | None:
        """Why the layer's weights cannot be loaded again, or None if they can."""
        return None

    @classmethod
    def needs_routed_ids(cls, config: ExpertProviderConfig) -> bool:
        """Whether layers must use kernels that are given expert ids.

        Asked while a layer is built, before its kernel is chosen: a kernel that
        routes by itself leaves no ids to place rows by.
        """
        return False

    def run(
        self,
        experts: "FusedMoEExpertsModular",
        **arguments: Any,
    ) -> "UnfinalizedMoEOutput | None":
        """Compute the layer's experts in place of `experts.apply`.

        Called only in layers whose provider has set
        `FusedMoEKernelModularImpl.run_experts` to it, bound to the experts.

        Args:
            experts: The layer's kernel.
            **arguments: Those of `FusedMoEExpertsModular.apply`.

        Returns:
            What `apply` would return.

        """
        return experts.apply(**arguments)


class ResidentProvider(ExpertWeightProvider):
    """Leave the expert weights where the loader put them."""

    name = "resident"

    @classmethod
    def validate(cls, vllm_config: VllmConfig) -> None:
        """Refuse the group's other flags, which have no effect here."""
        if given := vllm_config.offload_config.experts.given_options():
            raise ValueError(
                f"{', '.join(given)} has no effect with --expert-provider "
                f"{cls.name}: add --expert-provider pinned_hot or drop the flag."
            )

    def check(self, layer: "RoutedExperts") -> str | None:
        return None

    def attach(self, layer: "RoutedExperts") -> None:
        return None

    def residency(self) -> ExpertResidency | None:
        return None


_REGISTRY: dict[str, str | type[ExpertWeightProvider]] = {
    ResidentProvider.name: ResidentProvider
}


def register_expert_provider(
    name: str, provider: str | type[ExpertWeightProvider]
) -> None:
    """Make a provider selectable with `--expert-provider NAME`.

    Out-of-tree providers call this from a `vllm.general_plugins` entry point,
    which runs in every process of the engine.

    Args:
        name: Value of the flag.
        provider: The class, or "module:Class" to import it on first use.

    Raises:
        ValueError: The name is taken by another provider.

    """
    if _REGISTRY.setdefault(name, provider) != provider:
        raise ValueError(
            f"expert provider {name!r} is registered already as {_REGISTRY[name]}: "
            "choose another name."
        )


def expert_provider_class(name: str) -> type[ExpertWeightProvider]:
    """Look a provider up by its `--expert-provider` name.

    Raises:
        ValueError: No such provider; names the known ones.

    """
    provider = _REGISTRY.get(name)
    if provider is None:
        raise ValueError(
            f"--expert-provider {name!r} is unknown; available: "
            f"{', '.join(sorted(_REGISTRY))}."
        )
    if isinstance(provider, str):
        module_name, _, class_name = provider.partition(":")
        provider = getattr(importlib.import_module(module_name), class_name)
    return provider


def create_expert_provider(layer_name: str) -> ExpertWeightProvider:
    """Make the provider of a layer that is being built.

    Args:
        layer_name: Name of the layer within the model.

    Returns:
        An instance of the configured provider; a `ResidentProvider` for a layer
        built outside any engine configuration.

    """
    vllm_config = get_current_vllm_config_or_none()
    config = (
        ExpertProviderConfig()
        if vllm_config is None
        else vllm_config.offload_config.experts
    )
    return expert_provider_class(config.expert_provider)(config, layer_name)


def format_bytes(num_bytes: float) -> str:
    """Write a size for people: GiB with two digits, below one GiB in MiB."""
    unit, name = (1 << 30, "GiB") if num_bytes >= 1 << 30 else (1 << 20, "MiB")
    return f"{num_bytes / unit:.2f} {name}"


def describe_residency(residencies: Iterable[ExpertResidency]) -> str:
    """Write the start-up block about the residency of a model's layers."""
    layers = list(residencies)

    def total(name: str) -> int:
        return sum(getattr(layer, name) for layer in layers)

    fast, slow = layers[0].memories
    hot_bytes, cold_bytes = total("hot_bytes"), total("cold_bytes")
    lines = [
        f"{len(layers)} layers" + (f", {layers[0].layout}" if layers[0].layout else ""),
        f"{total('hot_rows')} rows hot: {format_bytes(hot_bytes)} in {fast}",
        f"{total('cold_rows')} rows cold: {format_bytes(cold_bytes)} in {slow}",
    ]
    if straddling := total("straddling_bytes"):
        lines[1] += f", {format_bytes(straddling)} of them parts of cold rows"
    shares = [
        x.expected_cold_share for x in layers if x.expected_cold_share is not None
    ]
    if shares:
        lines.append(
            f"{sum(shares) / len(shares):.2%} of the profiled selections are cold"
        )
        per_token = sum(layer.expected_cold_bytes or 0 for layer in layers)
        lines[-1] += f", {format_bytes(per_token)} a token"
        if speed := layers[0].cold_bytes_per_s:
            milliseconds = per_token / speed * 1e3
            lines[-1] += f" or {milliseconds:.2f} ms at {speed / 1e9:.1f} GB/s"
    return "\n    ".join(lines)
