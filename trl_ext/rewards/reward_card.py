"""What a folder with a reward model says about itself beside its weights: `trl_ext_reward.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from trl_ext.files import write_atomic

CARD_FILE = "trl_ext_reward.json"
KINDS = ("single", "heads", "adapters", "models")


@dataclass(frozen=True)
class RewardCard:
    """How to score with a stored reward model as it was trained.

    Attributes:
        kind: "single", "heads" (M score heads on one trunk), "adapters" (M adapters with heads on one base), "models".
        size: number of members M.
        text_format: "chat" or "text", see `rendering.render`.
        mean, std: of each member on the calibration set, (M,); scores are standardised with them.
        temperature: divides a margin of standardised scores before the sigmoid of a calibrated preference; 1 = none.
        calibration: where the numbers came from, in words and counts.
    """

    kind: str = "single"
    size: int = 1
    text_format: str = "chat"
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)
    temperature: float = 1.0
    calibration: str = ""

    def save(self, folder: str | Path) -> None:
        """Write it into `folder`, atomically."""
        write_atomic(Path(folder) / CARD_FILE, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> RewardCard | None:
        """The card in `folder`, or None when it has none.

        Raises:
            ValueError: it is damaged, or of a newer version.
        """
        path = Path(folder) / CARD_FILE
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            known = {entry.name for entry in fields(cls)}
            if not isinstance(values, dict) or set(values) - known or values.get("kind") not in KINDS:
                raise ValueError(f"unknown content {values!r}")
            return cls(**values)
        except (json.JSONDecodeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({error}). Train the reward model again, or repair it.") from None
