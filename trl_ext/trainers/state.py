"""The file in a checkpoint that holds what TRL's own files do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trl_ext.files import write_atomic

STATE_FILE = "trl_ext_state.json"


def save_state(folder: str | Path, state: dict[str, Any]) -> None:
    """Write `state` atomically: a reader sees the old file or the new one, never half of it."""
    write_atomic(Path(folder) / STATE_FILE, json.dumps(state, indent=2, sort_keys=True) + "\n")


def load_state(folder: str | Path) -> dict[str, Any] | None:
    """The state of a checkpoint, or None when it has none.

    Raises:
        ValueError: the file is there but damaged.
    """
    path = Path(folder) / STATE_FILE
    if not path.exists():
        return None
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}). Delete it to restart from the config's values.") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} is damaged (not a mapping). Delete it to restart from the config's values.")
    return state
