# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Load a layer's expert rows when all of them have been read, one layer at a time.

The rows' parameters have no memory until then: vLLM's layerwise loading, made for
quantizing while loading, buffers the checkpoint's tensors (safetensors, read lazily,
lie in the page cache), and once a layer is complete makes its parameters, fills and
post-processes them. A checkpoint in layer order has one layer in work at a time.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.reload.meta import (
    materialize_layer,
    to_meta_tensor,
)
from vllm.model_executor.model_loader.reload.sanitize import sanitize_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


def defer_loading(layer: "RoutedExperts", names: Iterable[str], zeroed: bool) -> bool:
    """Take the memory from some of a new layer's parameters until they are read.

    Args:
        layer: A layer whose parameters were just created.
        names: Parameters to defer.
        zeroed: Whether they were created as zeros and may not be read in full.

    Returns:
        False if the layer's quantization method had deferred it already.

    """
    if layer.quant_method.uses_meta_device:
        return False
    for name in names:
        parameter = to_meta_tensor(getattr(layer, name))
        if zeroed:
            parameter.weight_loader = _clear_first(parameter.weight_loader)
        layer.register_parameter(name, parameter)
    # The loader then finishes layers whose checkpoint lacks padding or biases.
    layer.quant_method.uses_meta_device = True
    initialize_online_processing(layer)
    return True


def _clear_first(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a weight loader so that it fills zeros, not uninitialised memory."""
    # The wrapper outlives the layer in vLLM's records for reloads, which drop a
    # bound loader's layer but cannot see into a closure.
    method = weakref.WeakMethod(load) if inspect.ismethod(load) else lambda: load

    def clear_and_load(parameter: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # vLLM first runs a loader on the meta device to count what it writes.
        if not parameter.is_meta and not hasattr(parameter, "_cleared"):
            parameter.data.zero_()
            parameter._cleared = True
        loader = method()
        assert loader is not None
        return loader(parameter, *args, **kwargs)

    clear_and_load.__signature__ = inspect.signature(load)  # type: ignore[attr-defined]
    return clear_and_load


def unread_parameters(layer: "RoutedExperts", names: Iterable[str]) -> list[str]:
    """Parameters of a deferred layer that no checkpoint tensor was loaded into.

    To be called before vLLM forgets what it read, which is when a layer is done.
    """
    read = {name for name, _ in get_layerwise_info(layer).loaded_weights}
    return [name for name in names if name not in read]


def release_layer_references(layer: "RoutedExperts") -> None:
    """Let a deferred layer be freed with its model.

    vLLM keeps a description of every layer's parameters for reloads, taken after
    the layers were deferred: with their wrapped loaders, which hold the layer.
    """
    for tensor in get_layerwise_info(layer).restore_metadata[0].values():
        tensor.weight_loader = _get_original_loader(tensor)
        sanitize_layer_refs(tensor, layer)


def undo_defer_loading(layer: "RoutedExperts") -> None:
    """Give a deferred layer its parameters back and load it as stock does."""
    info = get_layerwise_info(layer)
    materialize_layer(layer, info)
    for parameter in get_layer_tensors(layer).values():
        parameter.weight_loader = _get_original_loader(parameter)
    layer.quant_method.uses_meta_device = False
    info.reset()
