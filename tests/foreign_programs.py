"""Environments of their own for other toolkits, so that slow tests can hold our readers against the real programs."""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

_MINUTES = 30  # torch alone takes long to install on a busy machine


def environment(name: str, requirements: Sequence[str], without_dependencies: Sequence[str] = ()) -> Path:
    """The Python of an environment with a toolkit in it, made at the first call and kept in the temporary folder.

    Args:
        name: of the toolkit. requirements: for pip, installed first, with what they need.
        without_dependencies: packages whose own requirements are too narrow; installed after those, alone.

    Returns:
        Path of the interpreter. Skips the test, with the reason, where the toolkit cannot be installed.
    """
    wanted = repr((sys.version_info[:2], list(requirements), list(without_dependencies)))
    digest = hashlib.sha256(wanted.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / "hf_vaswani_programs" / f"{name}-{digest}"
    python, done = folder / "bin" / "python", folder / "installed"
    if done.exists():
        return python
    try:
        _run(sys.executable, "-m", "venv", "--clear", folder)
        if requirements:
            _run(python, "-m", "pip", "install", "--quiet", *requirements)
        if without_dependencies:
            _run(python, "-m", "pip", "install", "--quiet", "--no-deps", *without_dependencies)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{name} could not be installed within {_MINUTES} minutes")
    except subprocess.CalledProcessError as error:
        said = (error.stderr or str(error)).strip().splitlines() or ["no message"]
        pytest.skip(f"{name} cannot be installed here: {said[-1]}")
    done.touch()
    return python


def run_program(python: Path, script: str, *arguments: object) -> str:
    """Run a script of the tests' folder inside such an environment; its standard output.

    Args:
        python: from `environment`. script: file name beside this one.
    """
    done = _run(python, Path(__file__).with_name(script), *arguments)
    return done.stdout


def _run(*command: object) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=True,
        timeout=60 * _MINUTES,
        env=clean | {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
