"""The quickstart's prompts as a folder that `--dataset_name` can load: `dataset_name: embedded` in recipes."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from datasets_builders.quickstart_prompts import build_quickstart_prompts
from trl_ext.models.embedded import default_cache_folder

# Part of the folder's name: raise it whenever the prompts change.
VERSION = 1


def prepare_embedded_prompts(cache_dir: Path | None = None) -> Path:
    """Write `train.jsonl` and `test.jsonl` once, and return their folder.

    Args:
        cache_dir: where to keep it; by default `$TRL_EXT_HOME`, else `trl_ext` in the user's cache folder.

    Returns:
        A folder for `datasets.load_dataset`. Safe to call from several processes at once: each writes a folder of its
        own and the first to finish moves it into place.

    Raises:
        ImportError: reasoning-gym or if-verifiable is not installed.
    """
    folder = (cache_dir or default_cache_folder()) / "data" / f"embedded-prompts-v{VERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    train, test = build_quickstart_prompts()
    temporary = Path(tempfile.mkdtemp(prefix=".prompts-", dir=folder.parent))
    for name, rows in (("train", train), ("test", test)):
        _write(temporary / f"{name}.jsonl", list(rows))
    try:
        os.rename(temporary, folder)
    except OSError:  # another process was faster, and wrote the same
        shutil.rmtree(temporary)
    return folder


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
