# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pictures as one HTML page that needs nothing else, drawn by plotly."""

import html
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

# System colours follow the reader's light or dark setting; plotly draws text as SVG,
# which takes its colour from here too.
_STYLE = """
:root { color-scheme: light dark; }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
       font: 16px/1.5 system-ui, sans-serif; background: Canvas; color: CanvasText; }
h1 { font-size: 1.4rem; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 0; }
pre { font: 13px/1.5 ui-monospace, monospace; overflow-x: auto; }
p { margin: .3rem 0; }
.js-plotly-plot text { fill: CanvasText !important; }
.js-plotly-plot .hoverlayer text { fill: #fff !important; }
"""
_GRID = "rgba(128,128,128,0.3)"
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Colours that are told apart with colour-blind eyes, on light and on dark."""


def draw_html(
    title: str, facts: str, pictures: Sequence[HeatMap | Coverage | Drift]
) -> str:
    """Draw pictures.

    Args:
        title: Heading of the page.
        facts: Plain text to stand above the pictures.
        pictures: What to draw.

    Returns:
        The text of the page, the same for the same arguments.

    Raises:
        ExpertPlanError: plotly is not installed.

    """
    try:
        import plotly.graph_objects as go
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ExpertPlanError(
            f"--html needs plotly, which is not there ({error}). Run: pip install "
            "plotly"
        ) from None
    draw = {HeatMap: _heat_map, Coverage: _coverage, Drift: _drift}
    parts = []
    for number, picture in enumerate(pictures):
        figure, note = draw[type(picture)](go, picture)
        parts.append(
            f"<h2>{html.escape(picture.title)}</h2>\n<p>{html.escape(note)}</p>"
        )
        parts.append(
            figure.to_html(
                full_html=False,
                include_plotlyjs=False,
                div_id=f"picture-{number}",
                config={"displayModeBar": False, "responsive": True},
            )
        )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n"
        f"<script>{get_plotlyjs()}</script></head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n<pre>{html.escape(facts)}</pre>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _layout(height: int, x: str, y: str, **more: Any) -> dict[str, Any]:
    axis = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": _GRID}
    return {
        "template": "none",
        "height": height,
        "margin": {"l": 70, "r": 20, "t": 20, "b": 50},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": axis | {"title": {"text": x}},
        "yaxis": axis | {"title": {"text": y}} | more.pop("yaxis", {}),
        "legend": {"bgcolor": "rgba(0,0,0,0)"},
        **more,
    }


def _height(layers: int) -> int:
    return min(max(14 * layers, 140), 900) + 90


def _layers_axis(layers: int) -> dict[str, Any]:
    return {
        "range": [layers - 0.5, -0.5],
        "dtick": 1 if layers <= 20 else 5,
        "showgrid": False,
    }


def _cells(picture: HeatMap | Drift) -> list[list[str]]:
    return [
        [f"{html.escape(name, quote=False)}<br>expert {expert}" for expert in row]
        for name, row in zip(picture.layer_names, picture.experts.tolist(), strict=True)
    ]


def _heat_map(go: Any, picture: HeatMap) -> tuple[Any, str]:
    layers = len(picture.layer_names)
    # Colour by the logarithm: use falls by orders of magnitude.
    use = np.maximum(picture.relative_use, 1e-2)
    figure = go.Figure(
        go.Heatmap(
            z=np.log10(use).tolist(),
            text=_cells(picture),
            customdata=picture.relative_use.tolist(),
            hovertemplate="%{text}<br>%{customdata:.2f} × mean use<extra></extra>",
            colorscale="Viridis",
            colorbar={
                "title": {"text": "× mean use"},
                "tickvals": [-2, -1, 0, 1, 2],
                "ticktext": ["≤ 0.01", "0.1", "1", "10", "100"],
            },
        )
    )
    note = "Experts of each layer from most to least used."
    if picture.cuts is not None:
        figure.add_scatter(
            x=np.repeat(picture.cuts - 0.5, 2).tolist(),
            y=(np.arange(layers)[:, None] + [-0.5, 0.5]).ravel().tolist(),
            mode="lines",
            line={"color": "#ff2d55", "width": 2},
            name="cut",
            hoverinfo="skip",
        )
        note += " Left of the red line is hot."
    figure.update_layout(
        _layout(
            _height(layers), "place in the ranking", "MoE layer",
            yaxis=_layers_axis(layers),
        )
    )  # fmt: skip
    return figure, note


def _coverage(go: Any, picture: Coverage) -> tuple[Any, str]:
    scale, unit = (1.0, "hot rows, all layers")
    if picture.row_gib is not None:
        scale, unit = picture.row_gib, "hot rows of one GPU, GiB"
    figure = go.Figure()
    for number, curve in enumerate(picture.curves):
        figure.add_scatter(
            x=(curve.hot_rows * scale).tolist(),
            y=(curve.covered * 100).tolist(),
            mode="lines",
            name=html.escape(curve.label, quote=False),
            line={"color": _LINES[number % len(_LINES)], "width": 2},
            hovertemplate="%{x:.4g}: %{y:.2f} %<extra></extra>",
        )
    note = "Share of the selections that are of hot rows, as more rows are hot."
    if picture.hot_rows is not None:
        figure.add_vline(x=picture.hot_rows * scale, line={"color": "#ff2d55"})
        note += " The red line is the map's cut."
    figure.update_layout(_layout(400, unit, "selections covered, %"))
    figure.update_layout(showlegend=True)
    return figure, note


def _drift(go: Any, picture: Drift) -> tuple[Any, str]:
    layers = len(picture.layer_names)
    figure = go.Figure(
        go.Heatmap(
            z=picture.change.tolist(),
            text=_cells(picture),
            hovertemplate="%{text}<br>2^%{z:.1f} × its use<extra></extra>",
            colorscale="RdBu",
            reversescale=True,
            zmin=-4,
            zmax=4,
            colorbar={
                "title": {"text": "change"},
                "tickvals": [-4, -2, 0, 2, 4],
                "ticktext": ["÷ 16", "÷ 4", "same", "× 4", "× 16"],
            },
        )
    )
    figure.update_layout(
        _layout(
            _height(layers), "place in the first ranking", "MoE layer",
            yaxis=_layers_axis(layers),
        )
    )  # fmt: skip
    note = (
        "Experts in the first one's order; red is used more by the second, blue less. "
        f"Hot rows in common: {picture.overlap.mean():.0%}. Spearman: "
        f"{picture.spearman.mean():.2f} (means over the layers)."
    )
    return figure, note
