"""The page of a trace in a browser: it shows the figures of the statistics, and a click or a key another round."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from runs import random_model, random_prompts
from test_trace import CASES
from web_driver import browser

from qspec_jax import GenerationConfig, generate

RIGHT = "\ue014"  # the arrow key


@pytest.fixture(scope="module")
def generation(tokenizer):
    """Two rows of a random model, sampled with a draft that lists groups."""
    config = GenerationConfig(max_new_tokens=30, group_size=8, ignore_eos=True, **CASES["sampled"])
    model, key = random_model(jnp.float32, num_hidden_layers=1, spread=0.4), jax.random.key(3)
    return generate(model, random_prompts([40, 21]), config=config, key=key, tokenizer=tokenizer, trace=True)


def shown(round_, trace):
    """The words of verdict that the page has for a round."""
    accepted, drafts = round_.judged_accepted, len(round_.drafts)
    rejected = ["rejected"] if accepted < drafts else []
    return ["accepted"] * accepted + rejected + ["not judged"] * (drafts - accepted - len(rejected)) + ["own"]


@pytest.mark.system
def test_the_page_in_a_browser(generation, tmp_path):
    trace, stats = generation.trace, generation.stats
    hostile = "</script><script>throw 1</script>\u2028"
    names = trace.names | {trace.rows[0].rounds[0].own_token: hostile}
    dataclasses.replace(trace, names=names).save(tmp_path / "trace.html")
    address = (tmp_path / "trace.html").as_uri()
    verdicts = "return [...document.querySelectorAll('#round tbody tr')].map((line) => line.dataset.verdict)"
    with browser() as page:
        page.open(address)
        first, second = stats.rows
        figure = lambda name: float(page.run(f"return document.getElementById('figure-{name}').dataset.value"))
        expected = {
            "new-tokens": first.new_tokens,
            "rounds": first.num_spec_steps,
            "accepted": first.num_accepted_draft_tokens,
            "length": first.mean_acceptance_length,
            "flushes": first.flushes,
        }
        assert {name: figure(name) for name in expected} == pytest.approx(expected)
        assert figure("decode") == pytest.approx(stats.decode_s, rel=1e-2)
        assert hostile.strip("\u2028") in page.texts("#round tbody")[0]
        assert "".join(page.run("return [...document.querySelectorAll('#text .token')].map((node) => node.textContent)")).count("#") == (
            sum(not piece for piece in trace.rows[0].pieces) + "".join(trace.rows[0].pieces).count("#")
        )
        rounds = trace.rows[0].rounds
        rejecting = next(i for i, each in enumerate(rounds) if i and each.judged_accepted < len(each.drafts))
        page.click(f"#round-{rejecting + 1}")
        assert page.texts("#round h2") == [f"Round {rejecting + 1} of {len(rounds)}"]
        assert page.run(verdicts) == shown(rounds[rejecting], trace)
        line = page.texts("#round tbody tr")[rounds[rejecting].judged_accepted]
        draft = rounds[rejecting].drafts[rounds[rejecting].judged_accepted]
        assert f"{draft.uniform:.3f} \u2265" in line and f"{draft.q:.3f}\t{draft.p:.3f}" in line
        page.press(RIGHT)
        assert page.run("return location.hash") == f"#row=0&round={rejecting + 2}"
        assert page.run(verdicts) == shown(rounds[rejecting + 1], trace)
        by_place = page.run("return [...document.querySelectorAll('#places tbody tr')].map((line) => ({ ...line.dataset }))")
        assert [sum(int(each[name]) for each in by_place) for name in ("drafted", "accepted")] == [
            first.num_draft_tokens,
            first.num_accepted_draft_tokens,
        ]
        assert len(page.texts("#reads canvas")) == 2
        page.open(address + "#row=1&round=2")
        page.run("return 0")
        assert figure("rounds") == second.num_spec_steps
        assert page.texts("#round h2") == [f"Round 2 of {second.num_spec_steps}"]
        assert page.problems() == []
        assert page.run("return performance.getEntriesByType('resource').length") == 0


def test_the_page_without_a_draft(tmp_path):
    config = GenerationConfig(max_new_tokens=3, draft="none", group_size=8, ignore_eos=True)
    model = random_model(jnp.float32, num_hidden_layers=1, spread=0.4)
    generate(model, random_prompts([5]), config=config, trace=True).trace.save(tmp_path / "trace.html")
    with browser() as page:
        page.open((tmp_path / "trace.html").as_uri())
        assert page.run("return [...document.querySelectorAll('#round th')].map((head) => head.textContent)") == [
            "",
            "token",
            "p",
            "",
            "target's most likely",
        ]
        assert page.texts("#round .head + p") == ["New token 2."]
        assert page.problems() == []
