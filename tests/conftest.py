"""Running the command line within a test, and a model for it."""

import gc
import importlib.util
import json
import os
import signal
from pathlib import Path

import jax
import pytest
import sharing
from checkpoints import hf_config, write_checkpoint
from safetensors.numpy import load_file

from qspec_jax import demo
from qspec_jax.bench.architectures import ARCHITECTURES
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.cli import main
from qspec_jax.decoding.compiled import Compiled

MAPS, MEMORY = Path("/proc/self/maps"), Path("/proc/self/statm")
MAX_MAPS, MAX_PAGES = 10_000, 1 << 20  # that a process holds from one module to the next; pages are of 4 KB


def pytest_configure(config):
    sharing.begin(config)
    gc.set_threshold(50_000, 20, 100)  # JAX traces into so many small objects that looking for cycles among them took a seventh of the time
    # The lines of Python that each operation came from took a twentieth of the time to trace and to compile.
    jax.config.update("jax_include_full_tracebacks_in_locations", False)
    jax.config.update("jax_traceback_in_locations_limit", 0)
    flags = []
    # On a CPU these older emitters of XLA compile in two thirds of the time. A program in one piece takes less again than in pieces for
    # several threads, of which each compiles the same helpers again. Newer XLA has not all these flags, and ends a process over others.
    if jax.__version_info__ < (0, 11):
        flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    # On a GPU, trying several kernels for each operation takes two thirds and more of the time to compile. Asking JAX for its devices would
    # fix the flags before they are set.
    if any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        flags.append("--xla_gpu_autotune_level=0")
    if flags:  # the last one counts where a flag is set twice
        os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background jobs; what tests start would ignore it too
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without a GPU, modules of which every test needs one are left out, unless the command names them: they are a fifth of all cases."""
    if collection_path.name.endswith("_gpu.py") and jax.default_backend() != "gpu":
        return "pytestmark = [pytest.mark.gpu, needs_gpu]" in collection_path.read_text() or None
    return None


def pytest_collection_finish():
    """What modules hold lives to the end, so that no search for cycles needs to look at it again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """The longest tests come first: else one of two workers would be left alone with them at the end."""
    items.sort(key=lambda item: item.name != "test_with_simulated_devices")


@pytest.fixture(scope="module", autouse=True)
def _compiles_fast(request):
    """On a CPU LLVM optimizes little: most of the time goes to compiling, and what is tested holds however it is done. Modules with the
    mark `optimized` are compiled as for people, but for the flags above. The same holds in processes that are started."""
    fast = jax.default_backend() == "cpu" and not request.node.get_closest_marker("optimized")
    jax.config.update("jax_disable_most_optimizations", fast)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(fast))
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session", autouse=True)
def _lowers_in_one_context():
    sharing.lower_in_one_context()


@pytest.fixture(scope="module", autouse=True)
def _forget_programs(request):
    """Between modules JAX forgets programs if they are many or the process is large. A process may map no more than some 65,000 pieces of
    memory, and each program takes several: XLA crashes where they run out. Programs of modules with the mark `optimized` are others."""
    optimized = request.node.get_closest_marker("optimized") is not None
    if optimized:
        _begin_again()
    yield
    Compiled.forget()
    if optimized or _holds_much():
        _begin_again()


def _holds_much() -> bool:
    if not MAPS.exists():  # as outside of Linux
        return True
    return MAPS.read_bytes().count(b"\n") > MAX_MAPS or int(MEMORY.read_text().split()[1]) > MAX_PAGES


def _begin_again():
    jax.clear_caches()
    sharing.lower_in_one_context()


@pytest.fixture
def run(capsys):
    """Runs a command line in this process: exit code, standard output, standard error."""

    def call(*arguments) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return call


@pytest.fixture
def fails(run):
    """A command line that must end with exit code 2, no output, and one line that contains each of `words`."""

    def check(arguments, *words):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        lines = [line for line in err.splitlines() if line]
        assert len(lines) == 1, err
        assert lines[0].startswith("qspec: error: ")
        assert "Traceback" not in err
        for word in words:
            assert str(word) in lines[0]

    return check


@pytest.fixture
def one_layer(monkeypatch):
    """The tiny architecture with one layer of its two, which compiles in half the time."""
    monkeypatch.setitem(ARCHITECTURES, "tiny", ARCHITECTURES["tiny"] | {"num_hidden_layers": 1})


@pytest.fixture
def short_loops(monkeypatch):
    """`qspec bench decode` with short loops, and without measuring the read bandwidth, which has tests of its own."""
    monkeypatch.setattr("qspec_jax.bench.decode.read_bandwidth", lambda *, repeats: 20.0)
    monkeypatch.setattr("qspec_jax.bench.timing.LOOP_TRIPS", (2, 2))
    monkeypatch.setattr("qspec_jax.bench.timing.BATCH_SECONDS", 1e-3)


@pytest.fixture
def paged(monkeypatch):
    """Rows of a batch share pages on a CPU too."""
    monkeypatch.setattr("qspec_jax.decoding.slots.PAGED", ("cpu", "gpu"))


@pytest.fixture(scope="module")
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A random model of 128 positions and one layer, which compiles fastest, with the embedded model's tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("model"), hf_config(vocab_size=4096, num_hidden_layers=1), tokenizer=demo.MODEL)


@pytest.fixture(scope="module")
def model(directory):
    """That model, loaded."""
    return load_model(directory)


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory) -> Path:
    """The embedded model with its first layer alone, for what shows how things are done: its seven take most of the time to compile."""
    config = json.loads((demo.MODEL / "config.json").read_text()) | {"num_hidden_layers": 1}
    tensors = load_file(demo.MODEL / "model.safetensors")
    first = {name: tensor for name, tensor in tensors.items() if ".layers." not in name or ".layers.0." in name}
    return write_checkpoint(tmp_path_factory.mktemp("model"), config, tensors=first, tokenizer=demo.MODEL)


@pytest.fixture
def source(tmp_path) -> Path:
    """A random model of two layers, to convert."""
    return write_checkpoint(tmp_path / "hf", hf_config())
