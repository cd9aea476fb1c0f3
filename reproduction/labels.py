"""Names beside the points of a figure, where they cover least."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def name_points(ax: "Axes", names: Sequence[tuple[str, float, float]], *, colors: Sequence[str], size: float) -> None:
    """Write (name, x, y) beside its point: on no other name, on as little that is drawn as can be, nearest to its own.

    Call it last: it looks at what the axes hold.
    """
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()  # the layout decides where things are
    drawn = _drawn_pixels(ax)
    own = ax.transData.transform(np.array([(x, y) for _, x, y in names]).reshape(-1, 2))
    taken: list[Any] = [text.get_window_extent() for text in ax.texts]
    for i, (name, x, y) in enumerate(names):
        extent = np.array(Text(0, 0, name, fontsize=size, figure=figure).get_window_extent().size)
        tries: list[tuple[tuple[float, ...], int, Any, Any]] = []
        for far in (1.0, 2.2, 3.6, 5.0):
            for right, up in ((1, 1), (1, -1), (-1, 1), (-1, -1), (1, 0), (-1, 0), (0, 1.4), (0, -1.4)):
                corner = own[i] + 8 * far * figure.dpi / 72 * np.array([right, up])
                corner -= extent * (1 - np.sign([right, up])) / 2
                box = Bbox([corner, corner + extent]).padded(2)
                outside = not (ax.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and ax.bbox.y0 <= box.y0)
                middle = np.array([box.x0 + box.x1, box.y0 + box.y1]) / 2
                nearer = np.linalg.norm(own - middle, axis=1) < np.linalg.norm(own[i] - middle)
                covered = np.all((drawn > box.min) & (drawn < box.max), axis=1)
                cost = float(4 * covered.sum() + 20 * nearer.sum() + 10 * far)
                tries.append(((box.count_overlaps(taken), outside, cost), len(tries), box, (far, right, up)))
        _, _, box, (far, right, up) = min(tries, key=lambda tried: tried[:2])
        taken.append(box)
        ax.annotate(
            name,
            (x, y),
            xytext=(8 * far * right, 8 * far * up),
            textcoords="offset points",
            ha={1: "left", -1: "right", 0: "center"}[right],
            va="bottom" if up > 0 else "top" if up else "center",
            fontsize=size,
            color=colors[i],
            zorder=5,
            arrowprops={"arrowstyle": "-", "color": colors[i], "linewidth": 0.5} if far > 1 else None,
        )


def _drawn_pixels(ax: "Axes") -> NDArray[np.float64]:
    """(n, 2) places, in pixels, along all lines, error bars and markers of the axes."""
    found = [np.zeros((0, 2))]
    bars = [segment for drawn in ax.collections for segment in getattr(drawn, "get_segments", list)()]
    paths = [ax.transData.transform(segment) for segment in bars]
    for line in ax.lines:
        path = line.get_transform().transform(np.asarray(line.get_xydata()))
        if line.get_linestyle() == "None":
            found.append(np.repeat(path, 6, axis=0))  # a marker is about so many places wide
        else:
            paths.append(path)
    for path in paths:
        along = np.append(0.0, np.cumsum(np.linalg.norm(np.diff(path, axis=0), axis=1)))
        places = np.arange(0.0, along[-1] + 1, 3.0)
        found.append(np.column_stack([np.interp(places, along, column) for column in path.T]))
    return np.concatenate(found)
