"""The model in lm-evaluation-harness: what transformers answers there, whatever the batch, and each context read once."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import jax
import numpy as np
import pytest
from harness_samples import NAMES, TASKS, answers
from lm_eval.tasks import manager
from lm_eval.tasks._index import TaskIndex
from runs import random_model
from tiers import in_system

from qspec_jax import demo
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.requests import with_tokenizer
from qspec_jax.errors import InputError, warn_once
from qspec_jax.evaluate import cache_views, harness, harness_report, perplexity, scoring
from qspec_jax.evaluate.harness import QspecLM, batches_of

GOLDEN = Path(__file__).with_name("goldens") / "harness.json"
# What torch, and what else a GPU-less machine lacks, would say; `datasets` leaves files open where it reads them again.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def loaded():
    return dict(model=load_model(demo.MODEL, dtype="float32"), tokenizer=load_tokenizer(demo.MODEL))


@pytest.fixture(scope="module")
def first_layer(shallow):
    """For what shows how things are done: answers of all layers are compared with those of transformers."""
    return dict(model=load_model(shallow, dtype="float32"), tokenizer=load_tokenizer(shallow))


@pytest.fixture(scope="module")
def loaded_tiny(model, tokenizer):
    """A random model of one layer, where any answer will do."""
    return dict(model=model, tokenizer=tokenizer)


def of(loaded, **settings) -> QspecLM:
    return QspecLM(demo.MODEL, progress=False, **loaded, **settings)


def asked(*args) -> SimpleNamespace:
    return SimpleNamespace(args=args)


@pytest.mark.system
@pytest.mark.parametrize("names", [("qspec_last", "qspec_lines"), NAMES], ids=len)
def test_answers_are_those_of_transformers(loaded, names):
    """make_harness_golden.py has them, with torch."""
    expected, found = json.loads(GOLDEN.read_text()), answers(of(loaded, cache="full", draft="none"), None, str(demo.MODEL), names)
    assert found.keys() == set(names) and expected.keys() == set(NAMES)
    compared = 0
    for task in names:
        for ours, theirs in zip(json.loads(json.dumps(found[task])), expected[task], strict=True):
            if isinstance(theirs[0][0], str):
                assert ours == theirs
            elif task == "qspec_rolling":
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)  # the sum over a whole text
            else:
                assert [greedy for ((_, greedy),) in ours] == [greedy for ((_, greedy),) in theirs]
                np.testing.assert_allclose([x for ((x, _),) in ours], [x for ((x, _),) in theirs], rtol=0, atol=1e-4)
            compared += 1
    assert compared == (40 if names == NAMES else 18)
    assert len({greedy for sample in expected["qspec_last"] for ((_, greedy),) in sample}) == 2  # some are, some are not


@pytest.mark.system
def test_scores_through_the_cache(first_layer, monkeypatch):
    """Other ways to read the cache give other scores, which are those of eval perplexity; batches and neighbours change nothing."""
    context = "def mean(values):\n" * 60
    pairs = [(context, "    return 1\n"), (context, "    total = 0\n"), ("x = ", "1\n"), ("", "import os\n"), (context, "    return 1\n")]
    contexts, score = [], scoring.score
    monkeypatch.setattr(
        harness, "score", lambda model, prompts, *args, **more: contexts.append(len(prompts)) or score(model, prompts, *args, **more)
    )
    found = {}
    for cache in perplexity.DEFAULT_CACHES:
        lm = of(first_layer, cache=cache, batch_size=4)
        found[cache] = [x for x, _ in lm.loglikelihood([asked(*pair) for pair in pairs])]
        assert contexts == [4]  # of the five pairs four differ, in three contexts, rounded up
        contexts.clear()
    alone = [of(first_layer, batch_size=1).loglikelihood([asked(*pair)])[0][0] for pair in pairs[:3]]
    np.testing.assert_allclose(found["int8"][:3], alone, atol=2e-4)
    prompt, continuation = lm._encode_pair(*pairs[0])
    expected = scoring.token_logprobs(first_layer["model"], [prompt], [continuation], cache_views.cache_view("int8").cache).sum()
    assert found["int8"][0] == pytest.approx(expected, abs=2e-4)
    difference = lambda cache: np.abs(np.subtract(found[cache], found["full"])).sum()
    assert 1e-4 < difference("int8") < difference("int4")


def test_what_several_continuations_share_is_read_once():
    long, short = tuple(range(9)), (1, 2)
    pairs = [(short, (5,)), (long, (1,)), (long, (2, 3)), (short, (6, 7)), (long, (4,))]
    batches = list(batches_of(pairs, 3))
    assert batches == [[(long, (2, 3)), (long, (1,)), (long, (4,))], [(short, (6, 7)), (short, (5,))]]
    assert [len(batch) for batch in batches_of([(long, (i,)) for i in range(7)], 3)] == [3, 3, 1]


@pytest.mark.system
@pytest.mark.parametrize(
    ("cache", "reads"),
    [
        ("int8", 4),
        ("specache", 7),
        ("h2o", 4),
        ("full", 4),
        ("kivi:group=8", 4),
        ("int4", 7),
    ],
)
def test_more_continuations_than_rows_are_forks_of_one_state(float64, loaded_tiny, monkeypatch, cache, reads):
    """In exact arithmetic the scores are those of batches with their contexts, and each context is read once where states can be."""
    model = random_model("float64", num_hidden_layers=1, max_position_embeddings=64)
    random = np.random.default_rng(0)
    lengths = {30: (1, 9, 2, 5, 1), 21: (3, 12, 1), 24: (40, 40, 40)}  # the last are as long as a window, and too long for a state
    tokens = lambda count: tuple(random.integers(0, 64, count).tolist())
    contexts = {count: tokens(count) for count in lengths}
    asked = [(None, contexts[count], tokens(new)) for count, own in lengths.items() for new in own]
    lm = QspecLM("random", model=model, tokenizer=loaded_tiny["tokenizer"], cache=cache, batch_size=2, progress=False)
    read, prefill, score = [], harness.prefill, harness.score
    monkeypatch.setattr(harness, "prefill", lambda model, tokens, **more: read.append(tokens) or prefill(model, tokens, **more))
    monkeypatch.setattr(
        harness, "score", lambda model, prompts, *args, **more: read.extend(prompts) or score(model, prompts, *args, **more)
    )
    found = lm._loglikelihood_tokens(asked)
    assert len(read) == reads and set(read) == set(contexts.values())
    monkeypatch.setattr(QspecLM, "_forked", lambda *_: iter(()))
    expected = lm._loglikelihood_tokens(asked)
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], rtol=1e-12)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.system
def test_windows_and_generation(first_layer):
    lm = of(first_layer, cache="full", max_length=64, max_gen_toks=8)
    text = "def add(a, b):\n    return a + b\n\n\n" * 12
    (whole,) = lm.loglikelihood_rolling([asked(text)])
    tokens = lm.tok_encode(text)
    windows = [
        (lm.prefix_token_id, tokens[:64]),
        *((tokens[i - 1], tokens[i : i + 64]) for i in range(64, len(tokens) - len(tokens) % 64, 64)),
    ]
    by_hand = [scoring.token_logprobs(lm.model, [[first]], [rest], cache_views.cache_view("full").cache).sum() for first, rest in windows]
    assert len(tokens) > 2 * 64 and whole < sum(by_hand) < 0  # and the last window, which has more context
    with pytest.raises(InputError, match=r"a continuation of \d+ tokens is longer than max_length, 64"):
        lm.loglikelihood([asked("x", text)])
    requests = [asked(text, {"until": ["\n\n"], "max_gen_toks": 8}), asked("import ", {"until": [], "do_sample": True, "temperature": 1.0})]
    requests.append(asked("for i in", {"until": ("<|endoftext|>", ":"), "top_k": -1}))
    found = lm.generate_until(requests)
    assert "\n\n" not in found[0] and ":" not in found[2] and len(found[1]) > 4
    alone = of(first_layer, cache="full", max_length=64, max_gen_toks=8, batch_size=1).generate_until(requests)
    assert found == alone
    assert found[1] != of(first_layer, cache="full", max_length=64, max_gen_toks=8, seed=1).generate_until(requests)[1]
    # The tokenizer's EOS, and special tokens that it names nowhere, end a row as well.
    ended = of(first_layer, cache="full", max_length=64, max_gen_toks=8)
    ended.tokenizer = load_tokenizer(demo.MODEL)
    line, ids = ended.tok_encode("\n", add_special_tokens=False), tuple(ended.tok_encode("b\n", add_special_tokens=False))
    ended.tokenizer.eos_token = ended.tokenizer.convert_ids_to_tokens(line[0])
    ended._special["b"] = ids[0]
    config = ended._request(0, "x", {"until": ["b\n"]}).config
    assert config.stop_token_ids == (ids,) and line[0] in with_tokenizer(config, ended.model, ended.tokenizer).eos_token_ids
    assert of(first_layer, cache="int4", max_gen_toks=8).config.draft == "none"
    with pytest.raises(InputError, match="max_gen_toks 64 should be less than max_length, 64"):
        lm.generate_until([asked("x", {"until": [], "max_gen_toks": 64})])


@pytest.mark.system
def test_generation_over_the_upper_plane(first_layer):
    lm = of(first_layer, cache="int4", max_gen_toks=8)
    assert len(lm.generate_until([asked("import ", {"until": ["\n\n"]}), asked("for i in", {"until": (":",)})])) == 2


@pytest.mark.parametrize(
    ("context", "continuation", "left"),
    [
        ("import o", "s\n", 1),  # the last token of the context is part of the next one
        ("x = f(", "))", 3),
        ("impo", "rt os", 0),  # all of them are: what is read first is what a text without a context is read after
        *in_system(
            ("   ", "return x", 0),  # blanks belong to the continuation
            ("for i in", " range(3):", 3),  # nothing merges
        ),
    ],
)
def test_tokens_that_merge_are_scored(first_layer, context, continuation, left):
    """The tokens of both texts together, after those that the context alone begins with as well."""
    lm = of(first_layer, cache="full")
    whole = lm.tok_encode(context + continuation)
    pair = whole[:left] or [lm.prefix_token_id], whole[left:]
    assert lm._encode_pair(context, continuation) == pair and (left == 0 or lm.tok_encode(context.rstrip())[:left] == whole[:left])
    ((found, _),) = lm.loglikelihood([asked(context, continuation)])
    by_hand = scoring.token_logprobs(lm.model, [pair[0]], [pair[1]], cache_views.cache_view("full").cache).sum()
    assert found == pytest.approx(by_hand, abs=1e-4) and found < -0.1


@pytest.mark.parametrize(("context", "continuation"), [("x = 1", ""), ("", ""), ("", "<|endoftext|>")])
def test_nothing_to_score_is_no_best_score(first_layer, context, continuation):
    lm = of(first_layer)
    with pytest.raises(InputError, match=r"the continuation .* has no token of its own to score"):
        lm.loglikelihood([asked("x = ", "1\n"), asked(context, continuation)])
    with pytest.raises(InputError, match=r"the continuation .* has no token of its own to score"):
        lm._loglikelihood_tokens([((context, continuation), [1], [])])


def test_tokenizers_that_strip_a_continuation(first_layer):
    """A continuation of which the tokenizer keeps nothing."""
    lm = of(first_layer)
    lm.tok_encode = lambda text, **_: list(map(ord, text.strip()))
    with pytest.raises(InputError, match=r"the continuation '\\n' after 'a b' has no token of its own"):
        lm.loglikelihood([asked("a b", "\n")])


# What the model hf of lm_eval 0.4.13 gives the processors of transformers 5.24, by what a task says and what generation_config.json does.
@pytest.mark.parametrize(
    ("stored", "said", "taken"),
    [
        ({}, {}, {}),
        ({}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 50}),
        ({}, {"temperature": 0.7, "do_sample": True}, {"temperature": 0.7, "top_k": 50}),
        ({}, {"temperature": 0.7, "do_sample": False}, {}),
        ({}, {"temperature": 0.0, "top_p": 0.5}, {}),
        ({}, {"temperature": 0.7, "top_k": 0}, {"temperature": 0.7}),
        ({}, {"temperature": 1, "top_k": None, "top_p": 0.8}, {"temperature": 1.0, "top_p": 0.8}),
        ({}, {"temperature": 0.5, "min_p": 0.2, "top_k": -1}, {"temperature": 0.5, "min_p": 0.2}),
        ({}, {"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 50, "top_p": 0.9}),
        ({"top_k": 20, "min_p": 0.1}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 20, "min_p": 0.1}),
        ({"repetition_penalty": 1.1}, {"do_sample": False}, {"repetition_penalty": 1.1}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": None}, {}),
        # These two alone hf refuses, as it gives `generate` a temperature of 0.
        ({}, {"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        ({"temperature": 0.6, "top_k": 0}, {"do_sample": True}, {"temperature": 0.6}),
    ],
)
def test_settings_of_a_task_are_those_of_transformers(loaded_tiny, tmp_path, stored, said, taken):
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    config = QspecLM(tmp_path, progress=False, **loaded_tiny)._request(0, "x", {"until": "\n", "max_gen_toks": 4} | said).config
    off = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: getattr(config, name) for name in off} == off | taken


def test_the_settings_taken_are_logged_once(loaded_tiny, tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.95}))
    lm = QspecLM(tmp_path, progress=False, **loaded_tiny)
    warn_once.cache_clear()
    for text in ("x", "y"):
        lm._request(0, text, {"until": [], "max_gen_toks": 4, "temperature": 0.25})
    assert [record.getMessage() for record in caplog.records] == [
        "generation: sampled, temperature 0.25 (of the task), top_k 50 (transformers' default), top_p 0.95 (of generation_config.json)"
    ]
    caplog.clear()
    lm._request(0, "x", {"until": [], "max_gen_toks": 4, "do_sample": True})
    assert "lm_eval's hf refuses" in caplog.records[0].getMessage() and caplog.records[0].levelname == "WARNING"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"do_sample": True, "temperature": 0.0}, "temperature 0.0 should be a number above 0"),
        ({"temperature": "warm"}, "temperature 'warm' should be a number"),
        ({"temperature": 0.5, "top_k": "ten"}, "top_k 'ten' should be a whole number"),
        ({"do_sample": "no"}, "do_sample 'no' should be true or false"),
        ({"until": 5}, "until 5 should be a string or a list of strings"),
        ({"until": [None]}, "should be a string or a list of strings"),
        ({"max_gen_toks": "many"}, "max_gen_toks should be a whole number"),
    ],
)
def test_settings_of_a_task_that_are_refused(loaded_tiny, said, words):
    with pytest.raises(InputError, match=words):
        QspecLM("no directory", progress=False, **loaded_tiny)._request(0, "x", {"until": [], "max_gen_toks": 4} | said)


@pytest.mark.system
def test_tokenizers_without_bos_and_eos(loaded_tiny):
    """Whatever has a context is answered as with them; what would be read after one of them is refused."""
    lm, without = of(loaded_tiny, max_gen_toks=4), of(loaded_tiny, max_gen_toks=4)
    without.tokenizer = load_tokenizer(demo.MODEL)
    without.tokenizer.bos_token = without.tokenizer.eos_token = None
    assert without.eot_token_id is None
    pair, prompt = asked("def f(x):\n    return", " x\n"), asked("import", {"until": ["\n"]})
    assert without.loglikelihood([pair]) == lm.loglikelihood([pair])
    assert without.generate_until([prompt]) == lm.generate_until([prompt])
    words = "its tokenizer has neither BOS nor EOS"
    for ask, request in (
        (without.loglikelihood, asked("", "import os")),
        (without.loglikelihood, asked("impo", "rt")),
        (without.loglikelihood_rolling, asked("import os\n")),
        (without.generate_until, asked("", {"until": ["\n"]})),
    ):
        with pytest.raises(InputError, match=words):
            ask([request])


def test_git_says_nothing_outside_a_repository(loaded_tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "one.jsonl").write_text(json.dumps({"code": "import", "word": " os"}) + "\n")
    task = (TASKS / "qspec_last.yaml").read_text().replace("qspec_last", "outside").replace("tests/harness_tasks/last.jsonl", "one.jsonl")
    (tmp_path / "outside.yaml").write_text(task)
    index = TaskIndex.build
    monkeypatch.setattr(
        "lm_eval.tasks.manager.TaskIndex",
        lambda: SimpleNamespace(build=lambda paths: index([path for path in paths if path == tmp_path])),
    )
    report = harness_report.run(of(loaded_tiny), ["outside"], include_path=[tmp_path])
    assert [row.metric for row in report.results] == ["perplexity", "acc"] and "git" not in capfd.readouterr().err
    # One sample has no standard error.
    assert [row.error for row in report.results] == [None, None]


def test_templates(first_layer):
    lm = of(first_layer)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    with pytest.raises(InputError, match="its tokenizer has no chat template"):
        lm.apply_chat_template(turns)
    tokenizer = load_tokenizer(demo.MODEL)
    lm.tokenizer = tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}<{{ m.role }}>{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert lm.apply_chat_template(turns) == "<user>Hello<assistant>"
    assert (
        lm.apply_chat_template([*turns, {"role": "assistant", "content": "Hi"}], add_generation_prompt=False) == "<user>Hello<assistant>Hi"
    )
    assert lm.tok_encode("<|endoftext|>x") == [lm.prefix_token_id, *lm.tok_encode("x")]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cache": "fp8"}, "cache 'fp8' should be one of full, int8, .*, int4"),
        ({"batch_size": "auto"}, "batch_size auto should be a whole number, at least 1"),
        ({"max_length": 9000}, "max_length 9000 should be from 2 to 8191"),
        ({"draft": "quantspec:budget=1"}, "'budget=1' should be one of"),
        ({"draft": "auto"}, "draft auto chooses for one run of prompts"),
        ({"draft": "small-model:model=/nowhere"}, "/nowhere"),
    ],
)
def test_settings_that_are_refused(first_layer, settings, words):
    with pytest.raises(InputError, match=words):
        of(first_layer, **settings)


def test_command(run, fails, shallow, tmp_path, monkeypatch):
    broken, wrong = tmp_path / "broken", tmp_path / "wrong"
    broken.mkdir()
    wrong.mkdir()
    (broken / "mine.yaml").write_text('task: mine\ndoc_to_text: "{{code\\}}"\n')
    last = (TASKS / "qspec_last.yaml").read_text()
    (wrong / "yours.yaml").write_text(last.replace("qspec_last", "yours").replace("{{code}}", "{{cod.e}}"))
    # Of some 16,000 files, which each of twelve commands would read, those of tasks that are asked for.
    parts = lambda path: [path / "hellaswag", path / "ruler"] if path == Path(manager.__file__).parent else [path]
    build = functools.cache(TaskIndex.build)
    monkeypatch.setattr(
        "lm_eval.tasks.manager.TaskIndex",
        lambda: SimpleNamespace(build=lambda paths: build(tuple(part for path in paths for part in parts(path)))),
    )
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code, said, err = run("eval", "harness", "qspec_last", "--model", shallow, "--include-path", TASKS, "--limit", 4, "--json")
    assert code == 0 and err == ""
    report = json.loads(said)
    assert [(row["task"], row["metric"]) for row in report["results"]] == [("qspec_last", "perplexity"), ("qspec_last", "acc")]
    assert report["cache"] == "int8" and report["draft"] == "quantspec" and report["results"][1]["samples"] == 4
    for arguments, *words in (
        (["qspec_none"], "there is no task 'qspec_none', nor one like it, among the "),
        (["qspec_last", "--include-path", tmp_path / "none"], "no such directory; include_path (--include-path) should name one"),
        (["qspec_last", "--metadata", "[1]"], "--metadata '[1]' should be a JSON object"),
        (["qspec_last", "--limit", "0"], "limit 0 should be above 0"),
        (["qspec_last", "--num-fewshot", "50", "--include-path", TASKS], "lm_eval failed on qspec_last: ValueError: "),
        (["qspec_needle", "--include-path", TASKS], "lm_eval failed on qspec_needle: KeyError: 'max_seq_lengths'"),
        (["hellaswag"], "the data of hellaswag cannot be read"),
        (["niah_single_1"], "niah_single_1 cannot be read", "pip install"),
        (["mine", "--include-path", broken], broken / "mine.yaml", "lm_eval cannot read a task from it"),
        (["yours", "--include-path", wrong], "lm_eval failed on yours: ", "cod"),
        (["mine", "--include-path", wrong], f"{wrong} has yours"),
    ):
        fails(["eval", "harness", *arguments, "--model", shallow], *words)


def test_it_is_registered():
    from lm_eval.api.registry import get_model

    assert get_model("qspec") is QspecLM and jax.devices()
