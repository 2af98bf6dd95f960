"""The pictures of `vllm expert-map show`, as a browser and a reader see them."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipe.system import BROWSER, require_packages
from recipe.tree import patched_tree

pytestmark = pytest.mark.cpu

DRAW = Path(__file__).with_name("draw.py")
WIDTH, HEIGHT = 1200, 2400
PICTURES = 4
LIMIT_S = 120
Browse = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page and the picture."""
    folder = tmp_path_factory.mktemp("pictures")
    env = os.environ | {"PYTHONPATH": str(patched_tree("cpu"))}
    done = subprocess.run(
        [sys.executable, "-B", str(DRAW), str(folder)],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def browse(drawn: Path) -> Browse:
    """Open the page in headless Chromium, which has no network."""
    require_packages(BROWSER)

    def call(*options: str) -> subprocess.CompletedProcess[str]:
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu"]
        command += ["--hide-scrollbars", f"--user-data-dir={drawn / 'browser'}"]
        command += [
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--proxy-server=127.0.0.1:9",
        ]
        command += [f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=20000"]
        command += ["--enable-logging=stderr", *options, f"file://{drawn}/page.html"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    return call


@pytest.fixture(scope="module")
def dom(browse: Browse) -> str:
    """The document after its scripts ran."""
    done = browse("--dump-dom")
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not [line for line in console if "Uncaught" in line or "rror" in line]
    return done.stdout


def pixels(path: Path) -> Any:
    """A picture as `(height, width, 3)`."""
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def test_page_needs_nothing_but_itself(drawn: Path) -> None:
    """No reference to another place is loaded, and drawing again gives the same."""
    page = (drawn / "page.html").read_text()
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", page)
    assert "@import" not in page.split("</style>")[0]
    assert page == (drawn / "again.html").read_text()


def test_every_picture_is_drawn(dom: str) -> None:
    """Use, coverage and two drifts, with axes, the cut and a legend."""
    assert dom.count('class="main-svg"') >= 2 * PICTURES
    assert dom.count('class="hm"') == PICTURES - 1
    for text in ("place in the ranking", "MoE layer", "selections covered, %", "GiB"):
        assert text in dom
    assert "hot rows     480 of 768, " in dom


def test_label_is_text_and_not_markup(dom: str) -> None:
    """A label comes from a file that somebody else may have written."""
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title and title[1] == "Expert map map.json"
    body = dom[dom.index("<h1>") :]
    assert "<b>$x" not in body
    assert "<h2>Drift: the map's traffic to &lt;/script&gt;" in body
    legend = re.findall(r'class="legendtext"[^>]*>([^<]*)<', body)
    assert legend[:2] == ["the map's traffic", "code"]
    assert legend[2].startswith("&lt;/script&gt;&lt;script&gt;document.title=")


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_screenshot_is_readable(drawn: Path, browse: Browse, scheme: str) -> None:
    """Background follows the reader's setting, text stands out, colours are there."""
    picture = drawn / f"{scheme}.png"
    options = [] if scheme == "light" else ["--blink-settings=preferredColorScheme=0"]
    browse(f"--screenshot={picture}", *options)
    shot = pixels(picture)
    assert shot.shape == (HEIGHT, WIDTH, 3)
    background = shot[5, 5]
    assert (background > 240).all() if scheme == "light" else (background < 40).all()
    # The axis titles are drawn by plotly, left of the heat map.
    heading, axes = shot[20:420, 40:700], shot[420:1000, 40:110]
    for area in (heading, axes):
        assert abs(area - background).max() > 150
    heat_map = shot[430:560, 120:1000].reshape(-1, 3)
    assert len({tuple(pixel) for pixel in heat_map.tolist()}) > 50


def test_png_has_every_picture(drawn: Path) -> None:
    """Drawn by another library from the same numbers."""
    picture = pixels(drawn / "page.png")
    height, width, _ = picture.shape
    assert width > 1000 and height > 400 * PICTURES
    for band in range(PICTURES):
        part = picture[height * band // PICTURES : height * (band + 1) // PICTURES]
        assert len({tuple(pixel) for pixel in part.reshape(-1, 3).tolist()}) > 50
