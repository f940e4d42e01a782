"""--generation-config: which sampling settings `generate` and `batch` take from a checkpoint, and what they say of it."""

import json
import shutil

import pytest

STORED = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.2}
FROM_FILE = "temperature 0.6 (of generation_config.json), top_k 50 (transformers' default), top_p 0.9 (of generation_config.json)"


@pytest.fixture(scope="module")
def sampling(directory, tmp_path_factory):
    """The tiny model, whose generation_config.json samples."""
    folder = tmp_path_factory.mktemp("model") / "sampling"
    shutil.copytree(directory, folder)
    (folder / "generation_config.json").write_text(json.dumps(STORED))
    return folder


@pytest.fixture
def taken(run, monkeypatch):
    """The settings of a command's config that come from there, and what is logged."""

    def call(*arguments):
        configs = []
        monkeypatch.setattr("qspec_jax.cli.generate.checked_prompts", lambda model, prompts, config, *_: configs.append(config) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run("generate", "--prompt", "import", "--draft", "none", *arguments)
        (config,) = configs
        return tuple(getattr(config, name) for name in ("temperature", "top_k", "top_p", "repetition_penalty"))

    return call


@pytest.mark.parametrize(
    ("options", "expected", "said"),
    [
        ((), (0, 0, 1, 1), "generation_config.json is not taken (generation: sampled, " + FROM_FILE),
        (("--generation-config", "model"), (0.6, 50, 0.9, 1.2), "generation: sampled, " + FROM_FILE),
        (
            ("--generation-config", "model", "--temperature", "0"),
            (0, 0, 1, 1.2),
            "generation: greedy, repetition_penalty 1.2 (of generation_config.json)",
        ),
        (("--generation-config", "model", "--top-k", "7"), (0.6, 7, 0.9, 1.2), "top_k 7 (of the command)"),
        (("--temperature", "0.5"), (0.5, 0, 1, 1), None),
        (("--temperature", "0"), (0, 0, 1, 1), None),
    ],
)
def test_what_is_taken_and_said(options, expected, said, sampling, taken, caplog):
    assert taken("--model", sampling, *options) == expected
    assert len(caplog.messages) == (said is not None) and all(said in message for message in caplog.messages)


@pytest.mark.parametrize("stored", [{"temperature": 0.0}, {"top_p": 0}, {"top_k": "50"}, {"repetition_penalty": 0}])
def test_a_value_that_is_not_taken_may_be_wrong(stored, sampling, tmp_path, taken, caplog):
    folder = tmp_path / "wrong"
    shutil.copytree(sampling, folder)
    (folder / "generation_config.json").write_text(json.dumps(STORED | stored))
    assert taken("--model", folder) == (0, 0, 1, 1)
    assert "generation_config.json is not taken; --generation-config model takes it" in caplog.text


def test_a_temperature_that_is_given_needs_no_hint(sampling, taken, caplog):
    for options in (("--temperature", "0"), ("--generation-config", "model", "--temperature", "0")):
        taken("--model", sampling, *options)
    assert [record.getMessage() for record in caplog.records] == ["generation: greedy, repetition_penalty 1.2 (of generation_config.json)"]


def test_a_greedy_checkpoint_says_nothing(directory, taken, caplog):
    assert taken("--model", directory) == (0, 0, 1, 1) and not caplog.text


def test_a_wrong_value_is_refused(sampling, tmp_path, fails):
    folder = tmp_path / "wrong"
    shutil.copytree(sampling, folder)
    (folder / "generation_config.json").write_text(json.dumps(STORED | {"top_p": 2}))
    fails(["generate", "--model", folder, "--prompt", "a", "--generation-config", "model"], "generation_config.json: top_p 2 should be")
