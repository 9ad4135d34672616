"""Installs agents from their registries, once, into `runs/agents`."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# A second run installs nothing.
CACHE = Path(__file__).parents[2] / "runs" / "agents"
_SESSIONS = Path(__file__).parent / "sessions"
_NPM = CACHE / "npm"


def node_program(name: str, packages: Sequence[str]) -> list[str]:
    """Returns the command of a program of npm packages in their newest versions."""
    program = _NPM / "node_modules" / ".bin" / name
    if not program.exists():
        _install_node(packages)
    if not _starts(program):  # npm may leave out the steps that a package wants after its installation
        _call("npm", "rebuild", "--prefix", str(_NPM), "--foreground-scripts", *packages)
    return [str(program)]


def node_script(name: str, packages: Sequence[str]) -> list[str]:
    """Returns the command of a script of `sessions`, beside the packages that it imports."""
    if not all((_NPM / "node_modules" / package).exists() for package in packages):
        _install_node(packages)
    return ["node", str(shutil.copy(_SESSIONS / f"{name}.mjs", _NPM))]


def python_script(name: str, packages: Sequence[str]) -> list[str]:
    """Returns the command of a script of `sessions`, in an environment with the packages that it imports."""
    return [str(_python(CACHE / "python", packages) / "python"), str(_SESSIONS / f"{name}.py")]


def python_program(name: str, packages: Sequence[str]) -> list[str]:
    """Returns the command of a program that has an environment of its own, since it pins what it depends on."""
    return [str(_python(CACHE / name, packages) / name)]


def _python(environment: Path, packages: Sequence[str]) -> Path:
    """Returns the folder of an environment's programs. Installs what it lacks."""
    marker = environment / f"{packages[0].partition('[')[0]}.installed"
    if not marker.exists():
        _call(sys.executable, "-m", "venv", str(environment))
        _call(str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--upgrade", *packages)
        marker.touch()
    return environment / "bin"


def _install_node(packages: Sequence[str]) -> None:
    _NPM.mkdir(parents=True, exist_ok=True)
    newest = [f"{package}@latest" for package in packages]
    _call("npm", "install", "--no-fund", "--no-audit", "--prefix", str(_NPM), *newest)


def _call(*arguments: str) -> None:
    subprocess.run(arguments, check=True, stdin=subprocess.DEVNULL)


def _starts(program: Path) -> bool:
    return subprocess.run([program, "--version"], capture_output=True, stdin=subprocess.DEVNULL).returncode == 0
