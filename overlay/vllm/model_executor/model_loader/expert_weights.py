# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The loader's side of the expert weight providers.

Model modules import the loader and MoE layers import model modules, so nothing
of the MoE package can be imported here before it is needed.
"""

from typing import TYPE_CHECKING

from torch import nn

from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
        ExpertResidency,
    )
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

logger = init_logger(__name__)


def _provided_layers(model: nn.Module) -> "dict[str, RoutedExperts]":
    return {
        module.layer_name: module  # type: ignore[misc]
        for module in model.modules()
        if hasattr(module, "expert_provider")
    }


def _unloaded_bytes(model: nn.Module, layers: "dict[str, RoutedExperts]") -> int:
    """Bytes of the parameters outside MoE layers that are on the meta device."""
    experts = {id(p) for layer in layers.values() for p in layer.parameters()}
    return sum(
        parameter.numel() * parameter.element_size()
        for parameter in model.parameters()
        if parameter.is_meta and id(parameter) not in experts
    )


def bind_expert_providers(
    model: nn.Module, vllm_config: VllmConfig, model_config: ModelConfig
) -> None:
    """Let the configured provider settle which layers of a built model it serves.

    Args:
        model: The built model; no weight is loaded yet.
        vllm_config: The engine's configuration.
        model_config: The model's own configuration, the draft's for a draft.

    Raises:
        ValueError: A layer cannot be served.

    """
    name = vllm_config.offload_config.experts.expert_provider
    layers = _provided_layers(model)
    if name == "resident" and not layers:
        return
    from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
        expert_provider_class,
    )

    provider = expert_provider_class(name)
    provider.bind(layers, vllm_config, model_config, _unloaded_bytes(model, layers))


def expert_weights_attached(module: nn.Module) -> bool:
    """Whether a provider owns the module's weights and has had them processed."""
    provider = getattr(module, "expert_provider", None)
    return provider is not None and provider.attached


def attach_expert_weights(module: nn.Module) -> None:
    """Hand a module's processed expert weights to its provider, if it has one."""
    provider = getattr(module, "expert_provider", None)
    if provider is not None:
        provider.attach(module)


def require_reloadable_experts(model: nn.Module) -> None:
    """Refuse to load a model's weights again if a provider cannot take them.

    Raises:
        ValueError: Names the layer and the cure; nothing has been touched.

    """
    for name, layer in _provided_layers(model).items():
        if reason := layer.expert_provider.why_not_reload():
            raise ValueError(f"{name}: its weights cannot be reloaded: {reason}")


def expert_residencies(model: nn.Module) -> "list[ExpertResidency]":
    """Where the rows of each MoE layer lie that a provider has placed."""
    return [
        residency
        for layer in _provided_layers(model).values()
        if (residency := layer.expert_provider.residency()) is not None
    ]


def log_expert_residency(model: nn.Module) -> None:
    """Log one start-up block about where the model's expert rows lie."""
    if residencies := expert_residencies(model):
        from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
            describe_residency,
        )

        logger.info("Expert weights: %s", describe_residency(residencies))
