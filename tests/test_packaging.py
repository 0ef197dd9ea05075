"""The wheel and the lock file."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REQUIREMENT = re.compile(r"[a-z0-9][a-z0-9.-]*==[^ ;]+( ; .+)?")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # No index and no isolation: the build must need nothing that is not installed.
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True)
    (path,) = folder.glob("trl_ext-*.whl")
    return path


def test_wheel_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for name in ("trl_ext/py.typed", "trl_ext/_launch/setup.sh", "trl_ext/_launch/grpo.py", "trl_ext/cli.py"):
        assert name in names
    launch = {path.relative_to(ROOT / "launch").as_posix() for path in (ROOT / "launch").rglob("*.yaml")}
    assert {f"trl_ext/_launch/{name}" for name in launch} <= names
    assert {name.split("/")[0] for name in names} <= {"trl_ext", "datasets_builders", "trl_ext-0.1.0.dist-info"}
    assert not [name for name in names if "__pycache__" in name]
    assert any(name.endswith("licenses/trl_ext/LICENSE") for name in names)


def test_installed_wheel_finds_its_launch_files(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import trl_ext.scripts as s; print(s.launch_folder())"
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env={"PYTHONPATH": ""})
    assert Path(output.stdout.strip()) == tmp_path / "trl_ext" / "_launch"


def test_console_script(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read("trl_ext-0.1.0.dist-info/entry_points.txt").decode()
    assert "trl-ext = trl_ext.cli:main" in entry_points


def lock_lines() -> list[str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_lock_has_only_pins_and_no_torch() -> None:
    for line in lock_lines():
        assert REQUIREMENT.fullmatch(line), line
        name = line.split("==")[0]
        assert name not in ("torch", "triton"), line
        assert not name.startswith("nvidia-"), line
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"://|file:|index-url|find-links|\+cpu", text)


def test_lock_pins_every_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = [requirement for group in groups for requirement in group]
    names = {re.split(r"[<>=]", requirement)[0].lower().replace("_", "-") for requirement in declared}
    pinned = {line.split("==")[0] for line in lock_lines()}
    assert names - pinned == {"torch"}


def test_setup_installs_a_torch_that_the_project_accepts() -> None:
    (pin,) = re.findall(r'torch_requirement="torch==([0-9.]+)"', (ROOT / "launch" / "setup.sh").read_text())
    assert tuple(map(int, pin.split("."))) >= (2, 13)
