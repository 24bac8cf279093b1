"""A picture as a PNG file, through matplotlib, which only this file needs."""

from __future__ import annotations

from os import PathLike

from pipeline.schedules.drawing.svg import PAPER, Picture

_DOTS_PER_POINT = 2


def write_png(picture: Picture, path: str | PathLike[str]) -> None:
    """Write a picture as PNG, two dots a point. The same picture gives the same bytes, with one matplotlib.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        raise RuntimeError(
            "a PNG needs matplotlib: pip install matplotlib, or pip install '.[draw]' in the project's folder; an SVG "
            "needs nothing"
        ) from None
    inches = picture.width / 72, picture.height / 72
    figure = Figure(figsize=inches, dpi=72 * _DOTS_PER_POINT, facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.axis("off")
    for x, y, width, height, fill in picture.boxes:
        axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, linewidth=0))
    for words in picture.words:
        axes.text(
            words.x,
            words.y,
            words.text,
            fontsize=words.size * 0.92,  # matplotlib's own font is wider than what browsers choose
            color=words.fill,
            ha="center" if words.anchor == "middle" else "left",
            va="center_baseline",
            weight="bold" if words.bold else "normal",
        )
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})
