# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Gauges of where expert rows lie.

An engine knows once it has loaded; it sends the numbers with its ready message and
the front end, which serves `/metrics`, exports them.
"""

from typing import TYPE_CHECKING

from prometheus_client import Gauge

from vllm.config import VllmConfig

if TYPE_CHECKING:
    from vllm.v1.executor import Executor
    from vllm.v1.worker.worker_base import WorkerBase

Residency = dict[str, float]
"""Sums over the MoE layers of one rank, by name of the field."""

# By index of the engine; kept from its ready message until the metrics exist.
_BY_ENGINE: dict[int, Residency] = {}

_GAUGES = {
    "vllm:expert_rows": (
        "Expert rows of one rank by where they lie.",
        {"hot": "hot_rows", "cold": "cold_rows"},
    ),
    "vllm:expert_bytes": (
        "Bytes of expert pages of one rank by where they lie.",
        {"hot": "hot_bytes", "cold": "cold_bytes"},
    ),
    "vllm:expert_expected_cold_bytes": (
        "Cold bytes that a token of the profiled traffic reads on one rank.",
        {"cold": "expected_cold_bytes"},
    ),
}


def _of_worker(worker: "WorkerBase") -> Residency | None:
    from vllm.model_executor.model_loader.expert_weights import expert_residencies

    layers = expert_residencies(worker.get_model())
    if not layers:
        return None
    names = [name for _, states in _GAUGES.values() for name in states.values()]
    return {
        name: float(sum(getattr(layer, name) or 0 for layer in layers))
        for name in names
    }


def collect_expert_residency(
    vllm_config: VllmConfig, executor: "Executor"
) -> Residency | None:
    """Ask the first worker where its expert rows lie; None with stock placement."""
    if vllm_config.offload_config.experts.expert_provider == "resident":
        return None
    return executor.collective_rpc(_of_worker)[0]


def remember_expert_residency(engine: int, residency: Residency | None) -> None:
    """Keep what an engine reported.

    Args:
        engine: Index of the engine.
        residency: What it reported; None changes nothing.

    """
    if residency is not None:
        _BY_ENGINE[engine] = residency


def export_expert_residency(vllm_config: VllmConfig) -> None:
    """Make the gauges of every engine that reported."""
    if not _BY_ENGINE:
        return
    model_name = vllm_config.model_config.served_model_name
    for name, (documentation, states) in _GAUGES.items():
        gauge = Gauge(
            name,
            documentation,
            labelnames=["model_name", "engine", "memory"],
            multiprocess_mode="mostrecent",
        )
        for engine, residency in _BY_ENGINE.items():
            for state, field in states.items():
                gauge.labels(model_name, str(engine), state).set(residency[field])
