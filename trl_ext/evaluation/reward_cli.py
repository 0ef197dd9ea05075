"""`trl-ext reward-eval`: pairs from a file or a data set, the report in a folder and as a table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from datasets import load_dataset

from trl_ext.evaluation.reward_eval import RewardReport, evaluate_reward
from trl_ext.rewards.ensemble import RewardEnsemble


def run_reward_eval(options: argparse.Namespace) -> str:
    """Evaluate, save, and return the table.

    Raises:
        ValueError: the data hold no pairs, or the model is no reward model of ours.
    """
    ensemble = RewardEnsemble.load(options.model, reduce=options.reduce, coef=options.coef)
    rows = read_rows(options.data, options.split)[: options.limit]
    missing = {"chosen", "rejected"} - set(rows[0] if rows else ())
    if missing:
        raise ValueError(f"{options.data} has no {sorted(missing)} in its rows, which must be pairs.")
    elsewhere = read_rows(options.elsewhere, "train") if options.elsewhere else None
    report = evaluate_reward(ensemble, rows, elsewhere)
    report.save(options.out)
    return f"{table(report)}\n{options.out}/reward_eval.json, {options.out}/reliability.png"


def read_rows(name: str, split: str) -> list[dict[str, Any]]:
    """Rows of a .json or .jsonl file, or of a split of a data set."""
    path = Path(name)
    if path.suffix in (".json", ".jsonl") and path.is_file():
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines() if line]
    return list(load_dataset(name, split=split))


def table(report: RewardReport) -> str:
    """Two columns of text."""
    low, high = report.interval
    lines = {
        "pairs (not scored)": f"{report.pairs} ({report.unscored})",
        "accuracy (95 % interval)": f"{report.accuracy:.3f} ({low:.3f} .. {high:.3f})",
        "accuracy of members": ", ".join(f"{value:.3f}" for value in report.member_accuracy),
        "calibration error": f"{report.calibration_error:.3f}",
        "Brier score": f"{report.brier:.3f}",
        "temperature": f"{report.temperature:.3g}",
        "disagreement": f"{report.disagreement:.3f}",
    }
    if report.disagreement_elsewhere is not None:
        lines["disagreement elsewhere"] = f"{report.disagreement_elsewhere:.3f}"
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())
