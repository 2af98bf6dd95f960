# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a decode step costs with some expert rows in host memory.

A step routes M tokens: B streams of 1 + k, if k draft tokens are verified. A token
selects expert e with probability q_e = top_k x (share of the layer's selections), so
the step reads the expert with probability 1 - (1 - q_e)^M. Tokens are taken as
independent; draft tokens of one stream are rather alike, so they read a little less
than this says.

A layer runs two kernels, on `w13_weight` and on `w2_weight`. Each works through its
experts in blocks, and a cold expert's blocks start somewhere within the hot work: with
n cold experts at uniform places the first starts, on average, after 1/(n+1) of it. From
there the link is busy for c = n x (bytes of one outside HBM) / (link bandwidth). What
sticks out beyond the hot work h adds to the step:

    E[max(0, start + c - h)] = c - h n/(n+1)                       for c >= h
                             = h (c/h)^(n+1) / (n+1)               for c < h

which follows from P(start > s) = (1 - s/h)^n. So one cold expert hides for the most
part behind much hot work (M = 16), and hardly behind little (M = 1). The expectation
over n is taken with the exact distribution of a sum of independent events.

A step with few tokens can be shorter on the GPU than the host takes to start it. Then
the measured step says what the host takes, and reads that stay below it cost nothing:
the step is the longer of the measured one and the GPU's estimate with its cold reads.

Nothing is fitted to cold reads. `kernel_efficiency` and `layer_us` are from steps with
every row in HBM, measured on an H200 (MXFP4 on Marlin, 384 experts of 5120 x 2304).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm.model_executor.layers.fused_moe.expert_profile.row_bytes import ExpertRow

Floats = npt.NDArray[np.float64]

_GIGA = 1e9


@dataclass(frozen=True)
class Hardware:
    """What moves bytes.

    Attributes:
        hbm_gbps: What a plain read of HBM achieves, GB/s.
        host_gbps: What a GPU achieves reading host memory in place, GB/s.
        kernel_efficiency: Share of `hbm_gbps` that the expert kernels achieve.
        layer_us: Time of a layer beside its expert reads (attention, router, norms,
            starts of kernels), in microseconds.

    """

    hbm_gbps: float
    host_gbps: float
    kernel_efficiency: float = 0.62
    layer_us: float = 80.0


MEASURED = {"h200": Hardware(hbm_gbps=3850, host_gbps=51.2)}
"""Bandwidths that were measured, by the name of the hardware."""


@dataclass(frozen=True)
class Step:
    """One decode step.

    Attributes:
        streams: Requests that decode at the same time, B.
        draft_tokens: Draft tokens verified with each, k.
        accepted: How many of them are accepted, on average.

    """

    streams: int
    draft_tokens: int = 0
    accepted: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens routed in the step, M."""
        return self.streams * (1 + self.draft_tokens)

    def tokens_per_s(self, step_ms: float) -> float:
        """Tokens that all streams together get per second."""
        return self.streams * (1 + self.accepted) / step_ms * 1e3


@dataclass(frozen=True)
class Prediction:
    """A step under one placement.

    Attributes:
        step_ms: Time of the step.
        resident_ms: Time of the same step with every row in HBM.
        unique: Different experts read, summed over the layers.
        cold: Those of them that are not hot.
        host_bytes: Bytes read over the link.

    """

    step_ms: float
    resident_ms: float
    unique: float
    cold: float
    host_bytes: float

    @property
    def fetch_tax(self) -> float:
        """What the link adds to the resident step, as a share of it."""
        return self.step_ms / self.resident_ms - 1


def read_probability(counts: npt.NDArray, top_k: int, tokens: int) -> Floats:
    """Probability that a step reads an expert.

    Args:
        counts: `(num_layers, num_experts)` selections of the traffic.
        top_k: Experts per token.
        tokens: Tokens of the step, M.

    Returns:
        `(num_layers, num_experts)`; 0 in a layer without selections.

    """
    counts = np.asarray(counts, dtype=np.float64)
    total = np.maximum(counts.sum(axis=1, keepdims=True), 1e-300)
    selected = np.minimum(top_k * counts / total, 1.0)
    return 1 - (1 - selected) ** tokens


def count_distribution(probability: Floats) -> Floats:
    """Distribution of how many of some independent events happen.

    Args:
        probability: `(num_layers, n)` of each event.

    Returns:
        `(num_layers, m + 1)`: probability of 0 … m events, where m is the largest
        number of events of a layer that can happen.

    """
    # Events that cannot happen are moved behind the others and left out.
    probability = -np.sort(-probability, axis=1)
    probability = probability[:, probability.any(axis=0)]
    num_layers, number = probability.shape
    result = np.zeros((num_layers, number + 1))
    result[:, 0] = 1
    for happens in probability.T:
        happens = happens[:, None]
        result[:, 1:] = result[:, 1:] * (1 - happens) + result[:, :-1] * happens
        result[:, 0] *= 1 - happens[:, 0]
    return result


def exposed(hot_us: Floats, cold_us: Floats) -> Floats:
    """Time by which cold reads stick out of hot work.

    Args:
        hot_us: `(num_layers, 1)` time of the kernel's hot work.
        cold_us: `(num_layers, N + 1)` time of the link for 0 … N cold experts.

    Returns:
        `(num_layers, N + 1)`; the module's docstring has the formula.

    """
    number = np.arange(cold_us.shape[1])
    hot_us = np.maximum(hot_us, 1e-12)
    within = np.minimum(cold_us / hot_us, 1.0)
    hidden = hot_us * within ** (number + 1) / (number + 1)
    beyond = cold_us - hot_us * number / (number + 1)
    return np.where(cold_us < hot_us, np.where(number, hidden, 0.0), beyond)


def resident_us(
    probability: Floats, row: ExpertRow, hardware: Hardware
) -> tuple[Floats, Floats]:
    """Times of the two expert kernels of each layer with every row in HBM.

    Returns:
        `(num_layers,)` each, microseconds, of `w13_weight` and of `w2_weight`.

    """
    unique = probability.sum(axis=1)
    bandwidth = hardware.hbm_gbps * hardware.kernel_efficiency * _GIGA
    return unique * row.w13 / bandwidth * 1e6, unique * row.w2 / bandwidth * 1e6


def predict(
    counts: npt.NDArray,
    host_bytes: npt.NDArray[np.int64],
    top_k: int,
    row: ExpertRow,
    step: Step,
    hardware: Hardware,
    resident_ms: float | None = None,
) -> Prediction:
    """Predict a decode step.

    Args:
        counts: `(num_layers, num_experts)` selections of the traffic that is served.
        host_bytes: `(num_layers, 2, num_experts)`: what of each expert's two rows lies
            outside HBM.
        top_k: Experts per token.
        row: Size of an expert.
        step: Tokens of the step.
        hardware: Bandwidths.
        resident_ms: Measured time of the step with every row in HBM; the GPU's
            estimate if None.

    """
    probability = read_probability(counts, top_k, step.tokens)
    parts = resident_us(probability, row, hardware)
    gpu_ms = (sum(parts).sum() + len(probability) * hardware.layer_us) / 1e3
    if resident_ms is None:
        resident_ms = gpu_ms
    gpu_ms = min(gpu_ms, resident_ms)
    is_cold = host_bytes.sum(axis=1) > 0
    reads_cold = np.where(is_cold, probability, 0.0)
    distribution = count_distribution(reads_cold)
    cold = reads_cold.sum(axis=1)
    extra_us = 0.0
    link_bytes = 0.0
    for index, hot_us in enumerate(parts):
        expected = (reads_cold * host_bytes[:, index]).sum(axis=1)
        link_bytes += expected.sum()
        mean_bytes = expected / np.maximum(cold, 1e-300)
        one_us = mean_bytes / (hardware.host_gbps * _GIGA) * 1e6
        cold_us = one_us[:, None] * np.arange(distribution.shape[1])
        late = exposed(hot_us[:, None], cold_us)
        extra_us += (distribution * late).sum()
    return Prediction(
        step_ms=float(max(resident_ms, gpu_ms + extra_us / 1e3)),
        resident_ms=float(resident_ms),
        unique=float(probability.sum()),
        cold=float(cold.sum()),
        host_bytes=float(link_bytes),
    )


def positional_host_bytes(
    num_layers: int, num_experts: int, row: ExpertRow, budget_bytes: int
) -> npt.NDArray[np.int64]:
    """What offloading by position leaves outside HBM: whole tensors, first ones first.

    Args:
        num_layers: MoE layers.
        num_experts: Experts of a layer.
        row: Size of an expert.
        budget_bytes: Bytes to move to the host at most; a tensor that does not fit in
            what is left stays in HBM.

    Returns:
        `(num_layers, 2, num_experts)` int64.

    """
    result = np.zeros((num_layers, 2, num_experts), dtype=np.int64)
    for layer in range(num_layers):
        for index, row_bytes in enumerate((row.w13, row.w2)):
            size = row_bytes * num_experts
            if size <= budget_bytes:
                result[layer, index] = row_bytes
                budget_bytes -= size
    return result
