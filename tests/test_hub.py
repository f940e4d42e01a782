"""Checkpoints by their names on the Hub, which a server on this machine plays."""

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from checkpoints import hf_config, write_checkpoint
from huggingface_hub import constants

from qspec_jax import demo
from qspec_jax.checkpoints import hub
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.errors import InputError

COMMIT = "0123456789" * 4


class Hub(http.server.ThreadingHTTPServer):
    """Has one repository, org/name, with the files of a folder, and counts what is asked for."""

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.asked = folder, []


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path, files = self.path.split("?")[0], sorted(path for path in self.server.folder.rglob("*") if path.is_file())
        names = [file.relative_to(self.server.folder).as_posix() for file in files]
        if path in ("/api/models/org/name/revision/main", "/api/models/org/name/revision/v1"):
            self._answer(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}).encode())
        elif path == f"/api/models/org/name/tree/{COMMIT}":
            tree = [{"type": "file", "path": n, "oid": "0" * 40, "size": f.stat().st_size} for n, f in zip(names, files)]
            self._answer(json.dumps(tree).encode())
        elif (name := path.removeprefix(f"/org/name/resolve/{COMMIT}/")) in names:
            self.server.asked += [name] if self.command == "GET" else []
            self._answer((self.server.folder / name).read_bytes())
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

    do_HEAD = do_GET

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    source = write_checkpoint(tmp_path / "repository", hf_config(), shards=2)
    shutil.copy(demo.MODEL / "tokenizer.json", source)
    for left in ("modeling_own.py", "pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors"):
        (source / left).parent.mkdir(exist_ok=True)
        (source / left).write_text("raise SystemExit")
    with Hub(source) as hub:
        threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True).start()
        yield hub
        hub.shutdown()


@pytest.fixture
def here(run, tmp_path, monkeypatch):
    """Runs a command in this process, with settings of huggingface_hub, which reads its environment variables only when it is imported."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments, **settings) -> tuple[int, str, str]:
        hub._fetched.cache_clear()
        settings |= {"HF_HUB_CACHE": str(tmp_path / "home" / "hub")}
        if "ENDPOINT" in settings:
            url = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
            settings |= {"HUGGINGFACE_CO_URL_TEMPLATE": settings["ENDPOINT"] + url}
        with monkeypatch.context() as patch:
            for name, value in settings.items():
                patch.setattr(constants, name, value)
            return run(*arguments)

    yield call
    hub._fetched.cache_clear()


def test_a_name_is_converted_and_verified(server, here, tmp_path):
    endpoint = f"http://127.0.0.1:{server.server_port}"
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_ENDPOINT": endpoint}
    command = [sys.executable, "-m", "qspec_jax.cli", "convert", "org/name@v1", "out", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "") and json.loads(ran.stdout)["source"] == f"org/name@{COMMIT}"
    shards = [path.name for path in server.folder.glob("model-*.safetensors")]
    assert sorted(server.asked) == sorted(["config.json", "tokenizer.json", "model.safetensors.index.json", *shards])
    direct, converted = load_model(server.folder).weights(), load_model(tmp_path / "out").weights()
    assert all((direct[path] == converted[path]).all() for path in direct) and direct.keys() == converted.keys()
    # From now on without a network.
    code, out, _ = here("verify", f"org/name@{COMMIT}", "out", HF_HUB_OFFLINE=True)
    assert code == 0 and "all as in the source" in out
    code, out, _ = here("info", f"org/name@{COMMIT}", HF_HUB_OFFLINE=True)
    assert code == 0 and "LlamaForCausalLM" in out
    # The server has no such repository, and what is here goes first.
    code, _, err = here("convert", "org/other", "again", ENDPOINT=endpoint)
    assert code == 2 and "org/other: no such directory" in err and "RepositoryNotFoundError" in err
    shutil.copytree(server.folder, tmp_path / "org" / "other")
    assert here("convert", "org/other", "again", ENDPOINT=endpoint)[0] == 0


def test_weights_that_the_index_has_in_a_folder_are_fetched(server, here):
    shard, index = "model-00002-of-00002.safetensors", server.folder / "model.safetensors.index.json"
    (server.folder / "weights").mkdir()
    (server.folder / shard).rename(server.folder / "weights" / shard)
    (server.folder / "weights" / "other.safetensors").write_text("")
    index.write_text(index.read_text().replace(shard, f"weights/{shard}"))
    code, out, err = here("info", "org/name", "--json", ENDPOINT=f"http://127.0.0.1:{server.server_port}")
    assert (code, err) == (0, "") and json.loads(out)["num_layers"] == 2
    assert f"weights/{shard}" in server.asked and not any("other" in name or "original" in name for name in server.asked)


def test_without_a_network(here, tmp_path):
    for how, remedy in (
        ({"HF_HUB_OFFLINE": True}, "(HF_HUB_OFFLINE is set) and is not in the local cache; unset it, or give a directory"),
        ({"ENDPOINT": "http://127.0.0.1:9"}, "is not in the local cache; connect this machine to the network, or give a directory"),
    ):
        code, out, err = here("convert", "org/name", "out", **how)
        assert (code, out) == (2, "") and not (tmp_path / "out").exists()
        assert len(err.splitlines()) == 1 and "org/name: no such directory, and it cannot be fetched from the" in err and remedy in err


@pytest.mark.parametrize("name", ["nowhere", "/nowhere/model", "../org/name", "a/b/c", "org/name@", "org/na me"])
def test_what_is_no_name_is_not_asked_for(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "_fetched", lambda name: pytest.fail(f"{name} was asked for"))
    with pytest.raises(
        InputError, match="no such directory or file; a Hugging Face checkpoint directory, a GGUF file or ORG/NAME on the Hub is needed"
    ):
        hub.local(name)
