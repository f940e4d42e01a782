"""The embedded model's text: Python sources that any machine with these packages has, and the files held out from it.

Training text is the running interpreter's standard library and installed distributions under permissive licences, without tests,
vendored packages, generated files, data and near-duplicates (line de-duplication in the manner of Lee et al., arXiv 2107.06499,
by whole lines). HELD_OUT_MODULES and HELD_OUT_DISTRIBUTIONS are held out, and so is every file that copies from them.

Needs nothing but the standard library, so that the demo, evaluations and benchmarks can ask for `held_out_files()` anywhere.
"""

import dataclasses
import importlib.metadata
import logging
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# The first is the demo's prompt.
HELD_OUT_MODULES = ("argparse", "tarfile", "statistics", "difflib", "shlex", "textwrap", "configparser", "heapq", "dataclasses", "zipfile")
HELD_OUT_DISTRIBUTIONS = ("typer", "click", "jaxtyping", "safetensors", "tqdm")

# Under MIT, BSD, Apache-2.0, PSF and similar licences, each of which is checked again where the corpus is read. The first of two
# near-duplicates is kept.
DISTRIBUTIONS = (
    *("numpy", "scipy", "pandas", "matplotlib", "scikit-learn", "statsmodels", "sympy", "mpmath", "networkx", "xarray"),
    *("scikit-image", "rich", "pytest", "Pygments", "aiohttp", "anyio", "httpx", "httpcore", "requests", "urllib3", "werkzeug"),
    *("Jinja2", "Markdown", "markdown-it-py", "pip", "setuptools", "wheel", "packaging", "build", "scikit-build-core", "meson"),
    *("Cython", "pybind11", "nanobind", "pydantic", "attrs", "PyYAML", "python-dateutil", "pyparsing", "simplejson", "six"),
    *("tabulate", "toolz", "sortedcontainers", "wrapt", "psutil", "filelock", "fsspec", "cloudpickle", "joblib"),
    *("threadpoolctl", "execnet", "pytest-xdist", "pytest-benchmark", "coverage", "absl-py", "etils", "humanize", "idna"),
    *("h11", "yarl", "multidict", "prometheus_client", "protobuf", "portalocker", "multipledispatch", "jax", "jaxlib", "flax"),
    *("optax", "orbax-checkpoint", "chex", "treescope", "equinox", "diffrax", "optimistix", "lineax", "numpyro", "einops"),
    *("opt_einsum", "narwhals", "pyarrow", "h5py", "patsy", "formulaic", "seaborn", "contourpy", "fonttools", "pillow"),
    *("imageio", "tifffile", "numba", "llvmlite", "numba-cuda", "cupy-cuda13x", "cuda-core", "triton", "onnx", "onnx-ir"),
    *("onnxscript", "onnxruntime", "torch", "torchvision", "torchaudio", "torchmetrics", "torchdiffeq", "pytorch-lightning"),
    *("lightning", "lightning-utilities", "torch-geometric", "timm", "e3nn", "gpytorch", "linear-operator", "botorch"),
    *("accelerate", "peft", "sentence-transformers", "huggingface_hub", "tokenizers", "tensorboard", "sacrebleu", "tiktoken"),
    "transformers",
)

PERMISSIVE = re.compile(r"\b(MIT|BSD|0BSD|Apache|PSF|ISC|HPND|Python Software Foundation)\b")
COPYLEFT = re.compile(r"GPL|GNU|MPL|Mozilla|EUPL|CC-BY|Proprietary|NVIDIA", re.IGNORECASE)
SKIPPED_FOLDERS = {
    *("test", "tests", "testing", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "encodings", "ensurepip"),
    *("_vendor", "_vendored", "vendor", "vendored", "extern", "externals", "third_party", "thirdparty", "_click"),
    *("site-packages", "dist-packages", "__pycache__"),
}
GENERATED = re.compile(r"(auto|automatically|been|is|file)[ -]?generated|generated (by|from|using)|do not (edit|modify)", re.IGNORECASE)
_SYNTAX_FREE = bytes(range(ord("A"), ord("Z") + 1)) + bytes(range(ord("a"), ord("z") + 1)) + b"_ \t\r\n"

FILE_BYTES = (1_000, 300_000)
DISTRIBUTION_BYTES = 30_000_000
CORPUS_BYTES = 220_000_000
LONG_LINE = 24  # characters without indentation: a line this long is seldom repeated by chance
SEEN_SHARE = 0.5  # a file with more of its long lines in earlier files is a near-duplicate
HELD_OUT_SHARE = 0.1  # a file with more of its long lines in held-out files is a copy
STANDARD_LIBRARY = "standard library"


@dataclasses.dataclass(frozen=True)
class Document:
    """A source file. source: the distribution it belongs to, or `STANDARD_LIBRARY`."""

    source: str
    path: Path
    text: str


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training documents, files of one folder side by side. description: what was read and left out (for training.json)."""

    documents: list[Document]
    description: dict[str, Any]


def held_out_files() -> list[Path]:
    """The held-out source files on this machine, argparse first; distributions only where they are installed."""
    return [path for paths in held_out_by_name().values() for path in paths]


def held_out_by_name() -> dict[str, list[Path]]:
    """The held-out source files by module or distribution, in the order of the constants; what this machine lacks is left out."""
    root, found = Path(sysconfig.get_path("stdlib")), {}
    for name in HELD_OUT_MODULES:
        found[name] = [root / f"{name}.py"] if (root / f"{name}.py").exists() else _python_files(root / name)
    for name in HELD_OUT_DISTRIBUTIONS:
        found[name] = _distribution_files(name)
    return {name: paths for name, paths in found.items() if paths}


def read_corpus(distributions: Sequence[str] = DISTRIBUTIONS, *, max_bytes: int = CORPUS_BYTES) -> Corpus:
    """Reads, cleans and de-duplicates the standard library and these distributions; folders are shuffled, files are not.

    Distributions that are missing here, or whose metadata names no permissive licence, are logged and skipped.

    Args:
        distributions: names of installed packages.
        max_bytes: the size from which further folders are left out.
    """
    sources: dict[str, dict[str, Any]] = {STANDARD_LIBRARY: {"version": sysconfig.get_python_version(), "licence": "PSF-2.0"}}
    for name in distributions:
        if (known := _check_distribution(name)) is not None:
            sources[name] = known
    rng, filter_, kept = random.Random(0), _Filter(), {}
    with ThreadPoolExecutor(32) as pool:
        for name, source in sources.items():
            folders: dict[Path, list[Document]] = {}
            size = 0
            for path, raw in pool.map(_read, _shuffled_folders(_source_files(name), rng)):
                text = filter_.accept(path, raw) if size < DISTRIBUTION_BYTES else None
                if text is not None:
                    folders.setdefault(path.parent, []).append(Document(name, path, text))
                    size += len(raw)
            source |= {"files": sum(map(len, folders.values())), "bytes": size}
            kept |= folders
    order = list(kept)
    rng.shuffle(order)
    documents, size = [], 0
    for folder in order:
        if size < max_bytes:
            documents += kept[folder]
            size += sum(len(d.text.encode()) for d in kept[folder])
    description = {
        "bytes": size,
        "files": len(documents),
        "left_out_files": dict(filter_.left_out),
        "held_out": {name: len(paths) for name, paths in held_out_by_name().items()},
        "sources": {name: source for name, source in sources.items() if source["files"]},
    }
    return Corpus(documents, description)


class _Filter:
    """Accepts each file of hand-written source code that shares little with the held-out files and with those before it. Counts what it
    turns away, by reason."""

    def __init__(self):
        self.left_out: Counter[str] = Counter()
        self.seen: set[int] = set()
        self.held_out: set[int] = set()
        for path in held_out_files():
            self.held_out |= _long_lines(path.read_text(encoding="utf-8"))

    def accept(self, path: Path, raw: bytes) -> str | None:
        text, reason = self.judge(path, raw)
        if reason:
            self.left_out[reason] += 1
        return text

    def judge(self, path: Path, raw: bytes) -> tuple[str | None, str]:
        if not FILE_BYTES[0] <= len(raw) <= FILE_BYTES[1]:
            return None, "size"
        if path.name.startswith("test_") or path.name in ("conftest.py",):
            return None, "test"
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            return None, "not utf-8"
        if len(raw) > 100 * (raw.count(b"\n") + 1) or len(raw.translate(None, _SYNTAX_FREE)) > 0.4 * len(raw):
            return None, "data"
        if GENERATED.search(text, 0, 1000) or "<|endoftext|>" in text:
            return None, "generated"
        lines = _long_lines(text)
        if len(lines & self.held_out) > HELD_OUT_SHARE * len(lines):
            return None, "shares lines with held-out files"
        if len(lines & self.seen) > SEEN_SHARE * len(lines):
            return None, "near-duplicate"
        self.seen |= lines
        return text, ""


def _long_lines(text: str) -> set[int]:
    return {hash(line) for line in map(str.strip, text.splitlines()) if len(line) >= LONG_LINE}


def _read(path: Path) -> tuple[Path, bytes]:
    try:
        return path, path.read_bytes()
    except OSError:
        return path, b""


def _source_files(name: str) -> list[Path]:
    if name != STANDARD_LIBRARY:
        return _distribution_files(name)
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in _python_files(root) if path.relative_to(root).parts[0].removesuffix(".py") not in HELD_OUT_MODULES]


def _python_files(root: Path) -> list[Path]:
    return _wanted((path.relative_to(root), path) for path in root.rglob("*.py"))


def _distribution_files(name: str) -> list[Path]:
    try:
        files = importlib.metadata.distribution(name).files or ()
    except importlib.metadata.PackageNotFoundError:
        return []
    return _wanted((Path(f), Path(f.locate())) for f in files if f.suffix == ".py")


def _wanted(files: Iterable[tuple[Path, Path]]) -> list[Path]:
    return sorted(path for relative, path in files if SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1]))


def _shuffled_folders(paths: list[Path], rng: random.Random) -> list[Path]:
    """Shuffles folders and keeps the order within each, so that a source too large for its limit is sampled by folder."""
    folders: dict[Path, list[Path]] = {}
    for path in paths:
        folders.setdefault(path.parent, []).append(path)
    order = list(folders)
    rng.shuffle(order)
    return [path for folder in order for path in folders[folder]]


def _check_distribution(name: str) -> dict[str, Any] | None:
    """Version and licence of an installed distribution whose metadata names a permissive licence and no copyleft one."""
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        log.info("not installed, skipped: %s", name)
        return None
    classifiers = [c for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")]
    # The License field may hold a licence's whole text, with those of bundled libraries: its head says which.
    head = (metadata.get("License") or "")[:200]
    licence = metadata.get("License-Expression") or "; ".join(c.split(" :: ")[-1] for c in classifiers) or head
    if not PERMISSIVE.search(licence) or COPYLEFT.search(licence):
        log.info("licence not known to be permissive, skipped: %s (%s)", name, licence or "none stated")
        return None
    return {"version": metadata["Version"], "licence": " ".join(licence.split())}
