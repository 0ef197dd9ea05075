"""Writing files so that a kill at any moment leaves the old content or the new, never half of it."""

import os
from pathlib import Path


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write `data` (text as UTF-8) so that `path` holds either its old content or all of the new.

    The temporary file carries the process id, so ranks that write to one folder do not meet. Missing folders are made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(temporary, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())  # a rename that survives a power cut while the bytes do not would leave an empty file
    os.replace(temporary, path)
