"""Tries a wheel where no checkout is near: what it holds, and the program, the library and the embedded model out of it.

    python tests/try_wheel.py dist

What the package needs is that of this Python; only the package itself comes from the wheel.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("qspec_jax", "pallas_kernels", "convert")
CODE = """
import pathlib, qspec_jax, pallas_kernels, convert
from qspec_jax import demo, generate, load, GenerationConfig
assert pathlib.Path(qspec_jax.__file__).is_relative_to({site!r}), qspec_jax.__file__
model, tokenizer = load(demo.MODEL)
out = generate(model, ["import os"], config=GenerationConfig(max_new_tokens=4), tokenizer=tokenizer)
assert len(out.token_ids[0]) == 4
"""


def tracked() -> set[str]:
    """The files of the packages, as git has them."""
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        sys.exit(f"what the packages should hold is asked of git, in a checkout: {listed.stderr.strip()}")
    return set(listed.stdout.split())


def main(folder: Path) -> None:
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    if missing := sorted(tracked() - held):
        sys.exit(f"{wheel.name}: {', '.join(missing)} missing")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = tracked() | {"README.md", "LICENSE", "pyproject.toml"}
    if missing := sorted(wanted - held):
        sys.exit(f"{sdist.name}: {', '.join(missing)} missing")
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch, "site").resolve()
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(site)]
        subprocess.run([*install, str(wheel)], check=True)
        environment = os.environ | {"PYTHONPATH": str(site)}

        def run(*arguments: str) -> None:
            done = subprocess.run([sys.executable, *arguments], cwd=scratch, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"outside the repository it fails: {done.stderr}")

        run("-c", CODE.format(site=str(site)))
        run("-m", "qspec_jax.cli", "--version")
    print(f"{wheel.name} and {sdist.name}: whole; the wheel works outside the repository")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
