"""Self-contained HTML pages: plots as inline SVG, no outside links."""

import html
import io

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;width:100%}\
td,th{border-bottom:1px solid #ddd;padding:.4em .6em;text-align:left;vertical-align:top}
svg{max-width:100%;height:auto}small{color:#777}td{white-space:pre-wrap}"""


def new_figure(width: float, height: float):
    """A matplotlib figure that needs no screen and gives the same file for the same data."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "flatrlhf"
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def figure_svg(figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


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
            axis.plot(*zip(*points), label=name, marker="." if len(points) < 50 else None)
        axis.set_title(panel[0]) if len(panel) == 1 else axis.legend()
        axis.set_xlabel("step")
    for axis in axes[len(panels) :]:
        axis.axis("off")
    return figure_svg(figure)


def page(title: str, body: str) -> str:
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>{STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
{body}
</body></html>
"""


def table(header: list[str], rows: list[list[str]]) -> str:
    """Cells are escaped."""
    lines = ["<tr>" + "".join(f"<th>{html.escape(c)}</th>" for c in header) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"
