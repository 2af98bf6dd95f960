# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Errors that say what is wrong and how to cure it, so no trace is needed."""

from vllm.model_executor.layers.fused_moe.expert_profile.profile_file import (
    ExpertProfileError,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import ExpertMapError


class ExpertPlanError(ValueError):
    """Cannot do what was asked; says which value stands in the way, and the cure."""


EXPLAINED = (ExpertMapError, ExpertPlanError, ExpertProfileError)
