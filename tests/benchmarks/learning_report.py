"""What `learning` says of its runs: a table, a JSON file with every curve, and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from statistics import fmean, pstdev, stdev
from typing import Any

from tests.benchmarks.learning_arms import Arm, Run

Groups = dict[Arm, list[Run]]
# Dashes on top, so that two arms that coincide can both be seen.
STYLES = (("tab:blue", "-"), ("tab:orange", "-"), ("tab:green", "--"))
LEARNT = 0.9  # of the scale of a reward
SMOOTH = 5  # steps


def start_of(curve: Sequence[float]) -> float:
    """Mean of the first 10 % of the steps."""
    return fmean(curve[: max(len(curve) // 10, 1)])


def end_of(curve: Sequence[float]) -> float:
    """Mean of the last 10 % of the steps."""
    return fmean(curve[-max(len(curve) // 10, 1) :])


def last_half(curve: Sequence[float]) -> float:
    """Mean of the last half of the steps."""
    return fmean(curve[len(curve) // 2 :])


def steps_until(curve: Sequence[float], level: float) -> int:
    """Steps until the mean of the last `SMOOTH` steps reaches `level`; the length of the run if it never does."""
    for step in range(SMOOTH, len(curve) + 1):
        if value_at(curve, step) >= level:
            return step
    return len(curve)


def value_at(curve: Sequence[float], step: int) -> float:
    """Mean of the `SMOOTH` steps up to `step`, counted from 1."""
    return fmean(curve[max(step - SMOOTH, 0) : step])


def spread(values: Iterable[float], digits: int = 3) -> str:
    """`mean ± std [min .. max]` over seeds."""
    known = list(values)
    deviation = stdev(known) if len(known) > 1 else 0.0
    return f"{fmean(known):.{digits}f} ± {deviation:.{digits}f} [{min(known):.{digits}f} .. {max(known):.{digits}f}]"


def curves(runs: Sequence[Run], metric: str) -> list[list[float]]:
    """One curve per seed."""
    return [run.curves[metric] for run in runs]


# ---- tables ------------------------------------------------------------------------------------------------------


def gdpo_table(groups: Groups) -> list[list[str]]:
    """Both rewards: start, end and how long each took; and how far the small one is when the large one is learnt."""
    rows = [["large reward", "rule", "small: start", "small: end", "steps to 0.9", "large: start", "large: end"]]
    rows[0] += ["steps to 90", "small when large is at 90", "share of small at the start"]
    for arm, runs in groups.items():
        row = [arm.group, arm.name]
        for name, scale in (("small", 1.0), (arm.group, 100.0)):
            seeds = curves(runs, f"rewards/{name}/mean")
            digits = 3 if scale == 1.0 else 1
            row += [spread(map(start_of, seeds), digits), spread(map(end_of, seeds), digits)]
            row.append(spread((steps_until(curve, LEARNT * scale) for curve in seeds), 0))
        pairs = [(run.curves["rewards/small/mean"], run.curves[f"rewards/{arm.group}/mean"]) for run in runs]
        row.append(spread(value_at(small, steps_until(large, LEARNT * 100.0)) for small, large in pairs))
        share = "gdpo/small/share"
        row.append(spread(map(start_of, curves(runs, share))) if share in arm.metrics else "n/a")
        rows.append(row)
    return rows


def kl_table(groups: Groups) -> list[list[str]]:
    """The measured KL over the last half of the run, against the target: its mean, and how far single steps stray."""
    rows = [["beta", "target", "kl, last half", "kl / target", "seeds within 20 %"]]
    rows[0] += ["deviation within a run / target", "beta: end", "reward: end"]
    for arm, runs in groups.items():
        measured = [last_half(curve) for curve in curves(runs, "kl")]
        row = [arm.name.split()[0], "none" if arm.target is None else f"{arm.target}", spread(measured)]
        if arm.target is None:
            row += ["", "", ""]
        else:
            ratios = [value / arm.target for value in measured]
            row += [spread(ratios), f"{sum(abs(ratio - 1) <= 0.2 for ratio in ratios)} of {len(ratios)}"]
            row.append(spread(pstdev(curve[len(curve) // 2 :]) / arm.target for curve in curves(runs, "kl")))
        row.append(spread(map(end_of, curves(runs, "kl_coef"))))
        row.append(spread(map(end_of, curves(runs, "rewards/halves/mean"))))
        rows.append(row)
    return rows


def entropy_table(groups: Groups) -> list[list[str]]:
    """Entropy and reward, start and end."""
    rows = [["trainer", "bonus", "entropy: start", "entropy: end", "reward: start", "reward: end"]]
    for arm, runs in groups.items():
        row = [arm.trainer, arm.name]
        for metric, digits in (("entropy", 2), ("rewards/halves/mean", 3)):
            seeds = curves(runs, metric)
            row += [spread(map(start_of, seeds), digits), spread(map(end_of, seeds), digits)]
        rows.append(row)
    return rows


TABLES: dict[str, Callable[[Groups], list[list[str]]]] = {
    "gdpo": gdpo_table,
    "kl": kl_table,
    "entropy": entropy_table,
}


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


# ---- pictures ----------------------------------------------------------------------------------------------------


def draw(axis: Any, runs: Sequence[Run], metric: str, label: str, style: tuple[str, str]) -> None:
    """Mean over seeds of the smoothed curves, in a band from the lowest to the highest seed."""
    smooth = [
        [fmean(curve[max(step - SMOOTH + 1, 0) : step + 1]) for step in range(len(curve))]
        for curve in curves(runs, metric)
    ]
    columns = list(zip(*smooth, strict=True))
    steps = range(1, len(columns) + 1)
    colour, line = style
    axis.plot(steps, [fmean(column) for column in columns], line, label=label, color=colour, linewidth=1.2)
    axis.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.2, linewidth=0)


def panels(name: str, groups: Groups) -> list[list[tuple[str, list[Arm], str]]]:
    """Rows of panels: title, the arms in it, and the metric."""
    arms = list(groups)
    if name == "kl":
        chosen = [[arm for arm in arms if arm.target in (None, target)] for target in (0.1, 0.4)]
        metrics = (("kl (nats per token)", "kl"), ("beta", "kl_coef"), ("reward", "rewards/halves/mean"))
        return [[(f"{title}, target {part[-1].target}", part, metric) for title, metric in metrics] for part in chosen]
    rows = []
    pair: tuple[tuple[str, str], tuple[str, str]]
    for group in dict.fromkeys(arm.group for arm in arms):
        part = [arm for arm in arms if arm.group == group]
        if name == "gdpo":
            pair = (("small reward (scale 1)", "rewards/small/mean"), (group, f"rewards/{group}/mean"))
        else:
            pair = ((f"{group}: entropy (nats)", "entropy"), (f"{group}: reward", "rewards/halves/mean"))
        rows.append([(title, part, metric) for title, metric in pair])
    return rows


def picture(name: str, groups: Groups) -> bytes:
    """The PNG of one comparison."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    grid = panels(name, groups)
    figure, axes = pyplot.subplots(
        len(grid), len(grid[0]), figsize=(4.2 * len(grid[0]), 2.8 * len(grid)), squeeze=False, layout="constrained"
    )
    for row, row_axes in zip(grid, axes, strict=True):
        for (title, arms, metric), axis in zip(row, row_axes, strict=True):
            for arm, style in zip(arms, STYLES, strict=False):
                draw(axis, groups[arm], metric, arm.name, style)
            if metric == "kl":
                axis.axhline(arms[-1].target, color="black", linestyle=":", linewidth=1)
            if metric in ("kl", "kl_coef"):
                axis.set_yscale("log")
            axis.set_title(title, fontsize=9)
            axis.set_xlabel("step", fontsize=8)
            axis.tick_params(labelsize=7)
    for row_axes in axes:
        row_axes[0].legend(fontsize=7)
    drawn, small = BytesIO(), BytesIO()
    figure.savefig(drawn, format="png", dpi=80)
    pyplot.close(figure)
    # A palette takes a third of the bytes.
    Image.open(drawn).convert("RGB").quantize(64).save(small, format="png", optimize=True)
    return small.getvalue()


# ---- files -------------------------------------------------------------------------------------------------------


def as_json(name: str, runs: Sequence[Run], header: dict[str, Any]) -> bytes:
    """Settings, table and every curve; each entry and each run on a line of its own."""
    head = {"comparison": name, **header, "table": TABLES[name](by_arm(runs))}
    lines = []
    for run in runs:
        arm = {"group": run.arm.group, "arm": run.arm.name, "trainer": run.arm.trainer, "options": run.arm.options}
        lines.append(json.dumps(arm | {"seed": run.seed, "seconds": round(run.seconds, 1), "curves": run.curves}))
    entries = [f'"{key}": {json.dumps(value, ensure_ascii=False)}' for key, value in head.items()]
    entries.append('"runs": [\n' + ",\n".join(lines) + "\n]")
    return ("{\n" + ",\n".join(entries) + "\n}\n").encode()


def by_arm(runs: Iterable[Run]) -> Groups:
    """The runs of each arm, in the order of the seeds."""
    groups: Groups = {}
    for run in runs:
        groups.setdefault(run.arm, []).append(run)
    return {arm: sorted(same, key=lambda run: run.seed) for arm, same in groups.items()}
