"""The machine and the versions a benchmark ran with: printed above every result and stored in it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "trl", "transformers")


def describe() -> dict[str, Any]:
    """CPU model, usable cores, memory in GiB and versions; None for what the system does not tell."""
    import trl_ext

    return {
        "cpu": _proc_value("/proc/cpuinfo", "model name") or platform.processor() or None,
        "cores": _usable_cores(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
            "trl_ext": trl_ext.__version__,
        },
    }


def print_header(command: str) -> None:
    """The command and the machine, two lines."""
    machine = describe()
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items())
    print(f"$ {command}")
    print(f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}; {versions}\n")


def _proc_value(file: str, key: str) -> str | None:
    """The first value of a `key : value` file."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _usable_cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))  # less than the machine has, inside a container or under taskset
    return os.cpu_count()


def _memory_gib() -> float | None:
    total = _proc_value("/proc/meminfo", "MemTotal")
    if total is not None:
        return round(int(total.split()[0]) / 2**20, 1)  # the file counts in KiB
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
