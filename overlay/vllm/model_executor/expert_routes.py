# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What model runners and the loader call; does nothing unless routes are recorded.

Imported in every engine and by the loader, which the MoE package imports, so nothing
of that package can be imported here before it is needed.
"""

from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from torch import nn

from vllm.config import ModelConfig, VllmConfig

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.expert_profile.recorder import (
        RouteRecorder,
    )

_RECORDERS: "WeakKeyDictionary[nn.Module, RouteRecorder]" = WeakKeyDictionary()


class _ModelRunner(Protocol):
    def get_model(self) -> nn.Module: ...


def bind_route_recorder(
    model: nn.Module, vllm_config: VllmConfig, model_config: ModelConfig
) -> None:
    """Listen at the routers of a built target model if its routes are recorded.

    Args:
        model: The built model; no weight is loaded and nothing is compiled yet.
        vllm_config: The engine's configuration.
        model_config: The model's own configuration. Draft models are not recorded.

    Raises:
        ValueError: A layer's routes cannot be counted.

    """
    if vllm_config.observability_config.expert_profile.expert_profile_out is None:
        return
    # Some proposers load their model with a copy of the target's configuration.
    if (
        model_config.runner_type == "draft"
        or model_config is not vllm_config.model_config
    ):
        return
    from vllm.model_executor.layers.fused_moe.expert_profile.recorder import (
        RouteRecorder,
    )

    _RECORDERS[model] = RouteRecorder(model, vllm_config)


def route_recorder(model: nn.Module) -> "RouteRecorder | None":
    """The recorder of a model, None if its routes are not recorded."""
    return _RECORDERS.get(model)


def begin_routes(
    runner: _ModelRunner,
    num_scheduled_tokens: np.ndarray,
    num_computed_tokens: np.ndarray,
    num_prompt_tokens: np.ndarray,
    requests: np.ndarray | slice = slice(None),
) -> None:
    """Say whose rows the next forward pass has; no other pass is counted.

    Args:
        runner: The model runner.
        num_scheduled_tokens: Rows of each request of the batch, in batch order,
            `(num_reqs,)`.
        num_computed_tokens: Tokens of it that earlier passes computed, `(≥ num_reqs,)`.
        num_prompt_tokens: Length of its prompt, by index into `requests`.
        requests: Where `num_prompt_tokens` has the batch's requests, `(num_reqs,)`.

    """
    if not _RECORDERS:
        return
    if (recorder := _RECORDERS.get(runner.get_model())) is not None:
        num_reqs = len(num_scheduled_tokens)
        recorder.begin(
            num_scheduled_tokens,
            num_computed_tokens[:num_reqs],
            num_prompt_tokens[requests][:num_reqs],
        )


def end_routes(runner: _ModelRunner) -> None:
    """Stop counting: the forward pass has been launched."""
    if not _RECORDERS:
        return
    if (recorder := _RECORDERS.get(runner.get_model())) is not None:
        recorder.end()
