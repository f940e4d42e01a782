"""The public names have types that a program can be checked against; nothing of it is run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import qspec_jax

ROOT = Path(__file__).parent.parent


@pytest.mark.system
def test_a_program_against_the_public_names_is_clean(tmp_path):
    config = {"include": [str(ROOT / "tests" / "typed_use.py")], "extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "-p", tmp_path, "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "0 errors" in done.stdout, done.stdout


def test_what_is_imported_lazily_is_what_the_types_say():
    names = sorted(name for found in qspec_jax._MODULES.values() for name in found)
    assert qspec_jax.__all__ == names and all(hasattr(qspec_jax, name) for name in names)
    assert all((ROOT / package / "py.typed").exists() for package in ("qspec_jax", "pallas_kernels", "convert"))
