"""Imports run one way, stay lazy, and make `trl_ext` a stand-in for `trl`."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trl

import trl_ext

ROOT = Path(trl_ext.__file__).resolve().parents[1]
PACKAGE = ROOT / "trl_ext"
OUTSIDE = ("launch", "datasets_builders")
# Modules under trl_ext that may import launch or datasets_builders: {"iterative/driver.py"} would be an entry.
MAY_IMPORT_OUTSIDE: set[str] = set()
# TRL's private helpers imported by name outside of the seams.
PRIVATE_IMPORTS = {"cli.py": {"trl.cli.commands.training._subtract_subsequence"}}


def imports_of(path: Path) -> Iterator[str]:
    """Absolute names that a file imports, also inside functions and through `import_module("...")`."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (above, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def is_within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def files(*parts: str) -> list[Path]:
    """Python files of the named modules or packages of trl_ext; all of them without a name."""
    found = [path for part in parts or (".",) for path in sorted((PACKAGE / part).rglob("*.py"))]
    found += [PACKAGE / f"{part}.py" for part in parts if (PACKAGE / f"{part}.py").is_file()]
    assert found, f"no file in {parts}"
    return found


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


class TestDirection:
    def test_the_scan_sees_every_kind_of_import(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Catches: a scan that finds nothing and passes."""
        source = "import a.b\nfrom c import d as e\ndef f():\n    from . import g\n    from ..h import i\n"
        source += "importlib.import_module('j')\n__import__('k')\n"
        path = tmp_path / "trl_ext" / "x" / "y.py"
        path.parent.mkdir(parents=True)
        path.write_text(source, encoding="utf-8")
        monkeypatch.setitem(globals(), "ROOT", tmp_path)
        assert sorted(imports_of(path)) == ["a.b", "c.d", "j", "k", "trl_ext.h.i", "trl_ext.x.g"]

    @pytest.mark.parametrize("path", files("formulas"), ids=relative)
    def test_formulas_import_torch_and_themselves_only(self, path: Path) -> None:
        """Catches: a formula that needs a config, a trainer, or a library."""
        allowed = ("torch", "trl_ext.formulas", "__future__", *sys.stdlib_module_names)
        assert not [name for name in imports_of(path) if not is_within(name, *allowed)]

    @pytest.mark.parametrize("path", files("formulas"), ids=relative)
    def test_formulas_use_no_torch_nn(self, path: Path) -> None:
        """Tensors only; `torch.nn.functional` is allowed."""
        names = [name for name in imports_of(path) if is_within(name, "torch.nn")]
        assert all(is_within(name, "torch.nn.functional") for name in names)
        assert "nn.Module" not in path.read_text(encoding="utf-8")

    def test_seams_import_formulas_at_most(self) -> None:
        """And the helper that needs nothing itself."""
        names = [name for path in files("seams") for name in imports_of(path)]
        ours = [name for name in names if is_within(name, "trl_ext", *OUTSIDE)]
        allowed = ("trl_ext.formulas", "trl_ext.temporarily", "trl_ext.seams")
        assert ours and not [name for name in ours if not is_within(name, *allowed)]
        assert not [
            name for name in imports_of(PACKAGE / "temporarily.py") if is_within(name, "trl_ext", "torch", "trl")
        ]

    @pytest.mark.parametrize("path", files("trainers"), ids=relative)
    def test_trainers_import_nothing_above_them(self, path: Path) -> None:
        """Catches: a trainer that knows rounds, scripts or data sets."""
        above = [f"trl_ext.{name}" for name in ("iterative", "cli", "scripts")] + list(OUTSIDE)
        assert not [name for name in imports_of(path) if is_within(name, *above)]

    @pytest.mark.parametrize("path", files(), ids=relative)
    def test_launch_and_datasets_builders_are_never_imported(self, path: Path) -> None:
        """Catches: a package that works from a checkout only."""
        outside = [name for name in imports_of(path) if is_within(name, *OUTSIDE)]
        assert not outside or relative(path) in MAY_IMPORT_OUTSIDE

    @pytest.mark.parametrize("path", [path for path in files() if path.parent.name != "seams"], ids=relative)
    def test_private_names_of_trl_are_imported_where_listed(self, path: Path) -> None:
        """Catches: one more private helper that the next TRL release may rename."""
        private = {name for name in imports_of(path) if name.startswith("trl.") and "._" in name}
        assert private == PRIVATE_IMPORTS.get(relative(path), set())


class TestLaziness:
    def test_import_loads_neither_torch_nor_trl(self) -> None:
        """`trl-ext --help` in a moment. Catches: an eager import in `__init__`."""
        heavy = run_python(
            "import sys, trl_ext; trl_ext.__version__;"
            "print([name for name in ('torch', 'trl', 'transformers', 'datasets', 'numpy') if name in sys.modules])"
        )
        assert heavy == "[]"

    def test_formulas_load_torch_only(self) -> None:
        """Catches: a formula package whose `__init__`, or whose parent's, pulls in the trainers."""
        names = [f"trl_ext.formulas.{path.stem}" for path in files("formulas") if path.stem != "__init__"]
        heavy = run_python(
            f"import sys, importlib; [importlib.import_module(name) for name in {names}];"
            "print([name for name in ('trl', 'transformers', 'datasets', 'peft', 'accelerate') if name in sys.modules])"
        )
        assert heavy == "[]"


PUBLIC = [name for name in dir(trl) if not name.startswith("_") and not inspect.ismodule(getattr(trl, name))]


SUBMODULES = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
SHARED_SUBMODULES = sorted(SUBMODULES & set(dir(trl)))


class TestStandIn:
    def test_the_list_of_public_names_is_not_empty(self) -> None:
        assert {"GRPOTrainer", "DPOConfig", "SFTTrainer", "apply_chat_template", "TrlParser"} <= set(PUBLIC)

    @pytest.mark.parametrize("name", PUBLIC)
    def test_every_public_name_of_trl_is_here(self, name: str) -> None:
        """Ours where there is one, a subclass of TRL's; else TRL's own object. Catches: a stale list of names."""
        ours, theirs = getattr(trl_ext, name), getattr(trl, name)
        if name in trl_ext.__all__:
            assert ours is not theirs and issubclass(ours, theirs)
            assert ours.__module__.startswith("trl_ext.")
            assert ours.__name__ == name
        else:
            assert ours is theirs

    def test_ours_and_theirs(self) -> None:
        from trl_ext import GRPOTrainer, SFTTrainer

        assert GRPOTrainer.__module__ == "trl_ext.trainers.grpo_trainer"
        assert issubclass(GRPOTrainer, trl.GRPOTrainer)
        assert SFTTrainer is trl.SFTTrainer

    def test_all_is_complete_and_importable(self) -> None:
        """Catches: a class in the lazy table that `from trl_ext import *` or a type checker does not see."""
        assert sorted(trl_ext.__all__) == sorted(trl_ext._OURS)
        source = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
        typed = {
            alias.name: node.module
            for node in ast.walk(source)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("trl_ext.")
            for alias in node.names
        }
        assert typed == trl_ext._OURS
        for name, module in trl_ext._OURS.items():
            assert getattr(trl_ext, name).__module__ == module

    def test_dir_lists_both(self) -> None:
        assert set(trl_ext.__all__) | set(PUBLIC) <= set(dir(trl_ext))

    def test_an_unknown_name_names_both_packages(self) -> None:
        """Catches: an error that blames TRL alone, and `from trl_ext import Typo` that yields something."""
        with pytest.raises(AttributeError, match=r"trl_ext.*trl \d.*'NoSuchTrainer'"):
            trl_ext.NoSuchTrainer  # noqa: B018
        with pytest.raises(ImportError, match="NoSuchTrainer"):
            from trl_ext import NoSuchTrainer  # noqa: F401

    def test_private_names_are_not_taken_from_trl(self) -> None:
        assert hasattr(trl, "_import_structure")
        with pytest.raises(AttributeError, match="trl_ext"):
            trl_ext._import_structure  # noqa: B018

    @pytest.mark.parametrize("name", SHARED_SUBMODULES)
    def test_our_submodules_are_ours(self, name: str) -> None:
        """In a fresh process, where it is not loaded. Catches: `from trl_ext import models` giving trl.models."""
        assert run_python(f"from trl_ext import {name}; print({name}.__name__)") == f"trl_ext.{name}"
