"""Self-contained HTML pages: plots as inline SVG, no outside links."""

import html
import io

STYLE = """:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%}.texts{table-layout:fixed}
td,th{border-bottom:1px solid #8884;padding:.4em .6em;text-align:left;vertical-align:top;min-width:4.5em}
td,pre{white-space:pre-wrap}svg{max-width:100%;height:auto}
.figure{overflow-x:auto}small{color:#888}
@media(prefers-color-scheme:dark){body{background:#121212;color:#ddd}svg{filter:invert(1) hue-rotate(180deg)}}
@media(max-width:40em){body{font-size:12px;padding:0 .5em}td,th{padding:.3em .2em}}"""


def new_figure(width: float, height: float):
    """A matplotlib figure that needs no screen and gives the same file for the same data."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "flatrlhf"
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def figure_svg(figure) -> str:
    """Readable on a narrow screen too, where it can be pushed sideways."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    svg = buffer.getvalue()[buffer.getvalue().index("<svg") + 4 :]
    return f'<div class="figure"><svg style="min-width:{4 * figure.get_figwidth():g}em"{svg}</div>'


def legend_above(axis) -> None:
    """A legend that covers nothing that is drawn."""
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderaxespad=0)


def curves_svg(metrics: list[dict], panels: list[tuple[str, ...]], columns: int = 4) -> str:
    """Curves over steps: one panel for each tuple of metric names, those that were never logged left out."""
    panels = [tuple(name for name in panel if any(name in m for m in metrics)) for panel in panels]
    panels = [panel for panel in panels if panel]
    if not panels:
        return ""
    lines = -(-len(panels) // columns)
    figure = new_figure(4 * columns, 3 * lines)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis, panel in zip(axes, panels):
        for name in panel:
            points = [(m["step"], m[name]) for m in metrics if name in m]
            points = points[:: -(-len(points) // 2000)]  # more could not be seen
            axis.plot(*zip(*points), label=name, marker="." if len(points) < 50 else None)
        axis.set_title(panel[0]) if len(panel) == 1 else legend_above(axis)
        axis.set_xlabel("step")
    for axis in axes[len(panels) :]:
        axis.axis("off")
    return figure_svg(figure)


def first_and_last(metrics: list[dict]) -> str:
    """A table of each metric where it was logged first, and where last."""
    names = [name for name in dict.fromkeys(name for m in metrics for name in m) if name != "step"]
    logged = {name: [m for m in metrics if name in m] for name in names}
    rows = [
        [name, *(f"{m[name]:.4g} (step {m['step']})" for m in (seen[0], seen[-1]))] for name, seen in logged.items()
    ]
    return table(["", "first", "last"], rows)


def page(title: str, body: str) -> str:
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
{body}
</body></html>
"""


def folded(title: str, text: str) -> str:
    """Text as it is, which a click shows; escaped."""
    return f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"


def table(header: list[str], rows: list[list[str]], texts: bool = False) -> str:
    """Cells are escaped. texts: long ones, in columns of one width."""
    lines = ["<tr>" + "".join(f"<th>{html.escape(c)}</th>" for c in header) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows]
    return ('<table class="texts">' if texts else "<table>") + "".join(lines) + "</table>"
