"""How good a reward model is: accuracy, calibration and disagreement on pairs it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import trl

from trl_ext.files import write_atomic
from trl_ext.formulas.metrics import expected_calibration_error, wilson_interval
from trl_ext.formulas.reward_model import brier_score
from trl_ext.monitoring.run_folder import write_json
from trl_ext.rewards.ensemble import RewardEnsemble

BINS = 10


@dataclass(frozen=True)
class RewardReport:
    """Numbers over P pairs.

    Attributes:
        pairs: P, those that the ensemble could score. unscored: those it could not.
        accuracy: share of pairs whose chosen answer has the higher *reduced* score; a tie counts half. interval: its
            Wilson 95 % interval. member_accuracy: the same of each member alone.
        calibration_error, brier: of sigmoid(margin / temperature), margin = mean over members of the standardised
            scores; see `expected_calibration_error` and `brier_score`.
        temperature: the one in use.
        disagreement: standard deviation over members of a standardised score, mean over answers; 0 for one member.
        disagreement_elsewhere: the same on other texts, None without them. A useful ensemble disagrees more there.
        reliability: rows of (stated confidence, how often right, pairs) per bin that has pairs.
    """

    pairs: int
    unscored: int
    accuracy: float
    interval: tuple[float, float]
    member_accuracy: list[float]
    calibration_error: float
    brier: float
    temperature: float
    disagreement: float
    disagreement_elsewhere: float | None
    reliability: list[tuple[float, float, int]]

    def save(self, folder: str | Path) -> None:
        """Write `reward_eval.json` and `reliability.png` (needs matplotlib)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "reward_eval.json", asdict(self))
        write_atomic(folder / "reliability.png", reliability_diagram(self))


def evaluate_reward(
    ensemble: RewardEnsemble, rows: Sequence[dict[str, Any]], elsewhere: Sequence[dict[str, Any]] | None = None
) -> RewardReport:
    """Score pairs with an ensemble (or a single model loaded as one).

    Args:
        rows: `prompt`, `chosen`, `rejected` in either of TRL's formats; without `prompt`, the common beginning is it.
            They must not be pairs that it was trained on: the report would be about memory.
        elsewhere: `prompt` and `completion` of texts unlike the training data, for the disagreement there.

    Raises:
        ValueError: no pair could be scored.
    """
    pairs = [row if "prompt" in row else row | trl.extract_prompt(row) for row in rows]
    prompts = [row["prompt"] for row in pairs]
    chosen = ensemble.member_scores(prompts, [row["chosen"] for row in pairs])  # (M, P)
    rejected = ensemble.member_scores(prompts, [row["rejected"] for row in pairs])
    reduced = ensemble.combine(chosen) - ensemble.combine(rejected)  # (P,)
    scored = reduced.isfinite()
    if not scored.any():
        raise ValueError(f"None of {len(pairs)} pairs could be scored: every score is NaN.")
    difference = (chosen - rejected)[:, scored]
    margins = difference.nanmean(0) / ensemble.temperature
    wins = _wins(reduced[scored]).sum().item()
    return RewardReport(
        pairs=int(scored.sum()),
        unscored=int((~scored).sum()),
        accuracy=wins / int(scored.sum()),
        interval=wilson_interval(wins, int(scored.sum())),
        member_accuracy=[_wins(row[row.isfinite()]).mean().item() for row in difference],
        calibration_error=expected_calibration_error(margins, BINS).item(),
        brier=brier_score(margins).item(),
        temperature=ensemble.temperature,
        disagreement=_disagreement(torch.cat([chosen, rejected], dim=1)),
        disagreement_elsewhere=_disagreement_on(ensemble, elsewhere) if elsewhere else None,
        reliability=_reliability(margins),
    )


def _wins(margins: torch.Tensor) -> torch.Tensor:
    return (margins.sign() + 1) / 2


def _disagreement(scores: torch.Tensor) -> float:
    known = scores[:, scores.isfinite().all(0)]
    return known.std(0, correction=0).mean().item() if known.shape[1] else float("nan")


def _disagreement_on(ensemble: RewardEnsemble, rows: Sequence[dict[str, Any]]) -> float:
    prompts, completions = [row["prompt"] for row in rows], [row["completion"] for row in rows]
    return _disagreement(ensemble.member_scores(prompts, completions))


def _reliability(margins: torch.Tensor) -> list[tuple[float, float, int]]:
    """Per bin of the confidence max(p, 1 - p) in [0.5, 1]: its mean, how often it was right, and the pairs."""
    confidence = margins.abs().sigmoid()
    index = ((confidence - 0.5) * 2 * BINS).clamp(max=BINS - 1).long()
    rows = []
    for bin_index in index.unique().tolist():
        inside = index == bin_index
        rows.append((confidence[inside].mean().item(), _wins(margins[inside]).mean().item(), int(inside.sum())))
    return rows


def reliability_diagram(report: RewardReport) -> bytes:
    """PNG: how often a preference was right against how sure it was; on the diagonal it is calibrated."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(3.6, 3.6), layout="constrained")
    axis.plot([0.5, 1], [0.5, 1], ":", color="black", linewidth=1)
    confidence, right, pairs = zip(*report.reliability, strict=True)
    axis.plot(confidence, right, "o-", color="tab:blue", linewidth=1)
    for x, y, count in zip(confidence, right, pairs, strict=True):
        axis.annotate(str(count), (x, y), fontsize=7, xytext=(3, -9), textcoords="offset points")
    axis.set(xlim=(0.49, 1.01), ylim=(-0.02, 1.02), xlabel="stated confidence", ylabel="share right (pairs beside it)")
    axis.set_title(f"calibration error {report.calibration_error:.3f}, accuracy {report.accuracy:.3f}", fontsize=9)
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    pyplot.close(figure)
    return drawn.getvalue()
