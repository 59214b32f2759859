"""The installed packages have their own names: an application may have a `router.py`, a `backends/` and a `tests/`."""

import os
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

import pytest

from tests.support.paths import ROOT

PACKAGES: Final = ("a2m_router", "a2m_store", "a2m_rag", "a2m_chaos")

PROGRAM: Final = """
from pathlib import Path
from a2m_router import blocking

Path("federation.toml").write_text('''
state = "router.db"
[tiers.working]
kind = "working"
command = ["a2m-store", "working.db"]
''')
with blocking.open_federation("federation.toml") as memory:
    memory.remember("one")
    print([record.content for record in memory.timeline().records])
"""


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """Return the folder of an application with modules named like this repository's folders.

    Importing one of them ends the program.
    """
    for name in ("router", "backends", "tests", "bench", "scripts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('{name} of the application')")
    return tmp_path


def run(application: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=application, env=environ, capture_output=True, text=True, check=False)


def test_an_application_with_the_names_of_our_folders_uses_a_federation(application: Path) -> None:
    done = run(application, "-c", PROGRAM)
    assert (done.stdout, done.stderr) == ("['one']\n", "")


@pytest.mark.parametrize("module", ["a2m_router", "a2m_router.conformance"])
def test_what_is_run_as_a_module_is_ours(application: Path, module: str) -> None:
    done = run(application, "-m", module, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")


def test_what_fails_as_a_module_ends_as_the_command_does(application: Path) -> None:
    done = run(application, "-m", "a2m_router", "--config", "nothing.toml", "--check")
    assert done.returncode == 1
    assert "there is no such file" in done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_nothing_of_the_application(application: Path, package: str) -> None:
    every = f"import pkgutil, importlib, {package}\n" + (
        f"for each in pkgutil.walk_packages({package}.__path__, '{package}.'):\n"
        "    if not each.name.endswith('__main__'):\n"
        "        importlib.import_module(each.name)\n"
    )
    done = run(application, "-c", every)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_else_is_installed_at_the_top() -> None:
    scripts = distribution("a2m-router").entry_points
    assert {script.module.partition(".")[0] for script in scripts} <= set(PACKAGES)
    sources = [path for root in ("router", "backends") for path in (ROOT / root).rglob("*.py")]
    assert {path.relative_to(ROOT).parts[1] for path in sources} == set(PACKAGES)


def test_the_wheel_holds_the_packages_and_they_run_from_it(tmp_path: Path) -> None:
    """An editable installation would also work if the wheel were empty."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    sources = {path.relative_to(ROOT / top) for top in ("router", "backends") for path in (ROOT / top).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == {path.as_posix() for path in sources}
    program = f"""
import sys
sys.path.insert(0, {str(wheel)!r})
import a2m_router, a2m_store
print(a2m_router.__file__, a2m_store.__file__)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(where.startswith(str(wheel)) for where in done.stdout.split())
