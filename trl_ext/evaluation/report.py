"""The report of a run: a table for the terminal, curves as PNG, and one HTML file that needs nothing else."""

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.evaluation.generate_eval import Comparison, Scored
from trl_ext.files import write_atomic
from trl_ext.monitoring.run_folder import environment, read_metrics, write_json

if TYPE_CHECKING:
    from rich.table import Table

_HEADER = ("reward", "n", "before", "after", "change", "95 % of change")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { border-bottom: 1px solid #ddd; padding: .3rem .8rem; }
td { text-align: right; } td:first-child, td.text { text-align: left; } td.text { white-space: pre-wrap; }
img { max-width: 100%; } pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; }
"""


def comparison_cells(row: Comparison) -> tuple[str, ...]:
    """The cells of one reward: means ± standard deviation over prompts, the change and its interval."""
    # Fewer digits for large values keep the table within 80 columns.
    digits = 2 if max(abs(row.before), abs(row.after)) < 10 else 1
    return (
        row.name.removesuffix("_reward"),
        str(row.prompts),
        f"{row.before:.{digits}f} ± {row.before_spread:.{digits}f}",
        f"{row.after:.{digits}f} ± {row.after_spread:.{digits}f}",
        f"{row.difference:+.{digits}f}",
        f"{row.low:+.{digits}f} .. {row.high:+.{digits}f}",
    )


def comparison_table(rows: Sequence[Comparison]) -> "Table":
    """The comparison as a Rich table."""
    from rich.table import Table

    table = Table(title="Held-out prompts: mean ± standard deviation over n prompts")
    for name in _HEADER:
        table.add_column(name, justify="left" if name == "reward" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*comparison_cells(row), style="bold" if row.name == "overall" else None)
    return table


def curves_png(metrics: Sequence[dict[str, Any]]) -> bytes:
    """Training curves as PNG: one panel per reward (batch means), and KL and entropy where they were logged.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the curves need matplotlib: pip install 'trl-ext[quickstart]'") from error
    keys = sorted({key for line in metrics for key in line if key.startswith("rewards/") and key.endswith("/mean")})
    keys += [key for key in ("kl", "entropy") if any(line.get(key) is not None for line in metrics)]
    rows = max(1, (len(keys) + 2) // 3)
    # Figure without pyplot: no global state, no window system.
    figure = Figure(figsize=(11, 2.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for position, key in enumerate(keys, start=1):
        points = [(line["step"], float(line[key])) for line in metrics if line.get(key) is not None]
        axes = figure.add_subplot(rows, 3, position)
        axes.plot(*zip(*points, strict=True), marker=".")
        axes.set_title(key.removeprefix("rewards/").removesuffix("/mean"))
        axes.set_xlabel("step")
        axes.locator_params(axis="x", integer=True)
        axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def html_report(
    title: str,
    rows: Sequence[Comparison],
    before: Scored,
    after: Scored,
    curves: bytes,
    config: dict[str, Any],
    samples: int = 12,
) -> str:
    """One HTML page with everything inside; all text from outside (completions, prompts, config) is escaped.

    Args:
        title: heading.
        rows: the comparison.
        before: completions of the untrained policy.
        after: those of the trained one, on the same prompts.
        curves: a PNG.
        config: what the run was started with.
        samples: number of prompts to show, spread evenly over the held-out ones.
    """
    step = max(1, len(after.prompts) // samples)
    shown = range(0, len(after.prompts), step)
    examples = [(after.prompts[i], before.completions[i][0], after.completions[i][0]) for i in shown]
    image = base64.b64encode(curves).decode()
    settings = html.escape(json.dumps(config, indent=2, ensure_ascii=False, default=str))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
<h2>Held-out prompts, before and after</h2>
<p>Mean ± standard deviation over n prompts, each reward in its own unit; the interval is of the paired change
(bootstrap over prompts). "overall" is the mean of the rewards, each put on 0..1 by its range.</p>
{_html_table(_HEADER, [comparison_cells(row) for row in rows])}
<h2>Training curves</h2>
<p>Means over the completions of each step.</p>
<img alt="training curves" src="data:image/png;base64,{image}">
<h2>Completions on held-out prompts</h2>
{_html_table(("prompt", "before", "after"), examples, cell='<td class="text">')}
<h2>Environment</h2>
{_html_table(("package", "version"), list(environment().items()))}
<h2>Configuration</h2>
<pre>{settings}</pre>
</body></html>
"""


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]], cell: str = "<td>") -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "\n".join(
        "<tr>" + "".join(f"{cell}{html.escape(str(value))}</td>" for value in row) + "</tr>" for row in rows
    )
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def write_report(
    folder: Path,
    title: str,
    rows: Sequence[Comparison],
    before: Scored,
    after: Scored,
    config: dict[str, Any],
) -> Path:
    """Writes results.json, heldout.jsonl, curves.png and report.html into `folder`; returns the last one's path."""
    curves = curves_png(read_metrics(folder))
    write_json(folder / "results.json", {row.name: vars(row) for row in rows})
    write_atomic(folder / "heldout.jsonl", _heldout_lines(before, after))
    write_atomic(folder / "curves.png", curves)
    write_atomic(folder / "report.html", html_report(title, rows, before, after, curves, config))
    return folder / "report.html"


def _heldout_lines(before: Scored, after: Scored) -> str:
    lines = []
    for when, scored in (("before", before), ("after", after)):
        for i, prompt in enumerate(scored.prompts):
            for s, completion in enumerate(scored.completions[i]):
                values = {name: float(array[i, s]) for name, array in scored.rewards.items()}
                rewards = {name: value if value == value else None for name, value in values.items()}
                line = {"when": when, "prompt": prompt, "completion": completion, "rewards": rewards}
                lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)
