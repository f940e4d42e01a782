"""Several processes that work as one: `--distributed`, with two of them on CPUs, where each has two simulated devices."""

import json
import os
import re
import socket
import subprocess
import sys

import jax
import pytest
import sharing
import simulated_devices

from qspec_jax.decoding import processes

pytestmark = pytest.mark.system


def start(number: int, port: int, *arguments, **environment) -> subprocess.Popen:
    """The command as one of two processes."""
    names = dict(zip((processes.ADDRESS, processes.PROCESSES, processes.NUMBER), (f"localhost:{port}", "2", str(number))))
    command = [sys.executable, "-m", "qspec_jax.cli", *map(str, arguments), "--distributed"]
    environment = simulated_devices.environment(2) | sharing.environment() | names | environment
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(autouse=True)
def single_precision():
    """Again, after `--dtype float64`, which holds for a whole process."""
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def both():
    """Runs a command in two processes at once: exit codes, outputs and errors of each."""

    def run(*arguments, of_second=None) -> list[tuple[int, str, str]]:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        started = [start(i, port, *(of_second or arguments if i else arguments)) for i in range(2)]
        try:
            ended = [(process.communicate(timeout=300), process.returncode) for process in started]
        finally:
            for process in started:
                process.kill()
        return [(code, out, told(err)) for (out, err), code in ended]

    return run


def told(err: str) -> str:
    """What the program says on standard error, without Gloo's lines, whose pieces its threads may mix."""
    of_gloo = r"\[Gloo\] Rank |is connected to|peer ranks\. Expected number of connected peer ranks is :|\d|\s"
    return "".join(line for line in err.splitlines(keepends=True) if re.sub(of_gloo, "", line))


def test_generate(both, run, directory):
    settings = ["--draft", "sparse:budget=0.5,weight_bits=16", "--group-size", 8, "--max-new-tokens", 20, "--dtype", "float64", "--json"]
    command = ["generate", "--model", directory, "--prompt", "def f(x):\n    return x\n" * 3, *settings]
    _, alone, _ = run(*command)
    (code, out, err), (other_code, other_out, other_err) = both(*command)
    assert (code, other_code, other_out, other_err) == (0, 0, "", ""), (err, other_err)
    assert json.loads(out)["token_ids"] == json.loads(alone)["token_ids"]


def test_batch(both, run, directory, tmp_path):
    """Only the first writes; and what is done already is not done again by any."""
    lines = [{"prompt": "abc" * i, "max_new_tokens": 4 + i, "temperature": 0.8 * (i % 2)} for i in range(1, 6)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = ["--model", directory, "--batch-size", 2, "--draft", "quantspec:weight_bits=16", "--dtype", "float64", "--json"]
    code, out, err = run("batch", tmp_path / "in.jsonl", tmp_path / "alone.jsonl", *settings)
    assert code == 0, err
    (code, out, err), (other_code, other_out, other_err) = both("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", *settings)
    assert (code, other_code, other_out, other_err) == (0, 0, "", ""), (err, other_err)
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "alone.jsonl").read_text()
    assert json.loads(out)["prompts"] == 5
    # What fails in one ends both: here the first, whose output exists by now.
    found = both("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", *settings)
    assert [(code, out) for code, out, _ in found] == [(2, "")] * 2
    assert "exists already" in found[0][2] and found[1][2] == "qspec: error: --distributed: process 0 failed; see its standard error\n"


def test_one_without_the_checkpoint(both, directory, tmp_path):
    command = lambda model: ["generate", "--model", model, "--prompt", "a"]
    found = both(*command(directory), of_second=command(tmp_path / "nothing"))
    assert [code for code, _, _ in found] == [2, 2]
    assert "process 1 failed; see its standard error" in found[0][2] and str(tmp_path / "nothing") in found[1][2]


def test_other_options(both, directory):
    """Their programs would not go together, and each would wait for the other."""
    command = lambda tokens: ["generate", "--model", directory, "--prompt", "a", "--max-new-tokens", tokens]
    found = both(*command(8), of_second=command(16))
    words = "qspec: error: --distributed: process 1 has been given other options than process 0; all should have the same\n"
    assert [(code, out, err) for code, out, err in found] == [(2, "", words)] * 2


NAMES = processes.ADDRESS, processes.PROCESSES, processes.NUMBER


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES set, but not JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID"),
        (dict(zip(NAMES, ("a:1", "2", "two"))), "JAX_PROCESS_ID 'two' should be a whole number"),
        (dict(zip(NAMES, ("a:1", "2", "2"))), "JAX_PROCESS_ID 2 should be less than JAX_NUM_PROCESSES, 2"),
        (dict(zip(NAMES, ("node0", "2", "0"))), "JAX_COORDINATOR_ADDRESS 'node0' should be a host, a colon and a port"),
        (dict(zip(NAMES, ("node0:port", "2", "0"))), "JAX_COORDINATOR_ADDRESS 'node0:port' should be"),
    ],
)
def test_what_is_said_of_others(fails, directory, monkeypatch, names, words):
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    fails(["generate", "--model", directory, "--prompt", "a", "--distributed"], words)


def test_nobody_has_started_it(directory):
    command = [sys.executable, "-m", "qspec_jax.cli", "generate", "--model", directory, "--prompt", "a", "--distributed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 2 and done.stderr.startswith("qspec: error: --distributed: neither Slurm nor Open MPI"), done.stderr


def test_what_does_not_go_with_it(fails, directory, tmp_path):
    command = ["batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--model", directory, "--distributed"]
    fails([*command, "--ray", "local"], "it cannot be combined with --ray or --tensor-parallel")
    fails([*command, "--batch-size", "auto"], "--batch-size should be a number")
