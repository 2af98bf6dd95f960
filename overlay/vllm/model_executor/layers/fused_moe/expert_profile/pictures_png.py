# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pictures as one PNG, drawn by matplotlib."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm.model_executor.layers.fused_moe.expert_profile.errors import (
    ExpertPlanError,
)
from vllm.model_executor.layers.fused_moe.expert_profile.pictures import (
    Coverage,
    Drift,
    HeatMap,
)


def draw_png(title: str, pictures: Sequence[HeatMap | Coverage | Drift]) -> bytes:
    """Draw pictures below each other.

    Args:
        title: Heading.
        pictures: What to draw.

    Returns:
        The bytes of a PNG.

    Raises:
        ExpertPlanError: matplotlib is not installed.

    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ExpertPlanError(
            f"--png needs matplotlib, which is not there ({error}). Run: pip install "
            "matplotlib"
        ) from None
    figure = Figure(figsize=(11, 4.2 * len(pictures)), layout="constrained")
    FigureCanvasAgg(figure)
    # A label is text, also if it has what would be mathematics.
    figure.suptitle(title, parse_math=False)
    axes = figure.subplots(len(pictures), squeeze=False)[:, 0]
    draw = {HeatMap: _heat_map, Coverage: _coverage, Drift: _drift}
    for axis, picture in zip(axes, pictures, strict=True):
        axis.set_title(picture.title, parse_math=False, fontsize=10)
        draw[type(picture)](figure, axis, picture)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110, metadata={"Software": None})
    return stream.getvalue()


def _heat_map(figure: Any, axis: Any, picture: HeatMap) -> None:
    use = np.log10(np.maximum(picture.relative_use, 1e-2))
    image = axis.imshow(use, aspect="auto", interpolation="nearest", cmap="viridis")
    bar = figure.colorbar(image, ax=axis, ticks=[-2, -1, 0, 1, 2])
    bar.ax.set_yticklabels(["≤ 0.01", "0.1", "1", "10", "100"])
    bar.set_label("× mean use")
    if picture.cuts is not None:
        layers = np.arange(len(picture.cuts))
        axis.plot(
            np.repeat(picture.cuts - 0.5, 2),
            (layers[:, None] + [-0.5, 0.5]).ravel(),
            color="#ff2d55",
        )
    axis.set_xlabel("place in the ranking")
    axis.set_ylabel("MoE layer")


def _coverage(figure: Any, axis: Any, picture: Coverage) -> None:
    scale = 1.0 if picture.row_gib is None else picture.row_gib
    for curve in picture.curves:
        axis.plot(curve.hot_rows * scale, curve.covered * 100, label=curve.label)
    if picture.hot_rows is not None:
        axis.axvline(picture.hot_rows * scale, color="#ff2d55")
    axis.set_xlabel(
        "hot rows, all layers"
        if picture.row_gib is None
        else "hot rows of one GPU, GiB"
    )
    axis.set_ylabel("selections covered, %")
    axis.grid(alpha=0.3)
    for text in axis.legend().get_texts():
        text.set_parse_math(False)


def _drift(figure: Any, axis: Any, picture: Drift) -> None:
    image = axis.imshow(
        picture.change,
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        vmin=-4,
        vmax=4,
    )
    bar = figure.colorbar(image, ax=axis, ticks=[-4, -2, 0, 2, 4])
    bar.ax.set_yticklabels(["÷ 16", "÷ 4", "same", "× 4", "× 16"])
    axis.set_xlabel(
        "place in the first ranking; hot rows in common "
        f"{picture.overlap.mean():.0%}, Spearman {picture.spearman.mean():.2f}"
    )
    axis.set_ylabel("MoE layer")
