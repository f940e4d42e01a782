"""The settings of a call to generate, checked where they are made."""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping

from qspec_jax.caches.cache import Gives
from qspec_jax.caches.registry import CACHES, CacheConfig
from qspec_jax.decoding import config_values as values
from qspec_jax.drafts.draft import Draft, DraftSettings, needs_of
from qspec_jax.drafts.registry import AUTO, DRAFTS, NONE, USUAL, first_gamma_of, is_cascade, parse_draft
from qspec_jax.errors import BitsRefused, InputError
from qspec_jax.models.uniform import WIDTH

log = logging.getLogger(__name__)

AUTOREGRESSIVE = "autoregressive"  # what reports call decoding without a draft
TOKENS, BITS = "tokens", "bits"
EXACT = AUTO, TOKENS, BITS  # values of `exact`
CACHES_WITH_BITS = ("full", "int8")  # without a part in host memory
MAX_DRAFTS_WITH_BITS = WIDTH - 1
GAMMA = 4  # the default of num_speculative_tokens
# How each field is read; None is read as the default.
READERS: dict[str, values.Reader] = {
    **dict.fromkeys(("max_new_tokens", "num_return_sequences", "top_k", "min_new_tokens", "top_logprobs"), values.whole),
    **dict.fromkeys(("num_speculative_tokens", "group_size"), values.optional(values.whole)),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "min_draft_confidence"), values.number),
    **dict.fromkeys(("adaptive", "ignore_eos", "output_logprobs"), values.flag),
    "scheme": values.text,
    "exact": values.text,
    "draft": values.draft,
    "draft_cost": values.optional(values.number),
    "cache": values.optional(values.text),
    "logit_bias": values.biases,
    "banned_token_ids": values.ids,
    "eos_token_ids": values.optional(values.ids),
    "stop": values.texts,
    "stop_token_ids": values.sequences,
}


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """What to generate and how.

    A field may be given as Hugging Face takes it: a single id or text for several, lists, numbers of numpy, and None for the default
    (`qspec_jax.decoding.config_values`).

    Attributes:
        max_new_tokens: the maximum number of tokens generated for a prompt.
        num_return_sequences: samples of each prompt, which is read once. Each draws with its own key, the first as if it were alone.
        draft: proposes tokens that the target verifies. The text NAME or NAME:SETTING=VALUE,... of one (`qspec_jax.drafts.registry`), its
            settings, or a draft that `make_draft` returned; "none" decodes one token at a time; "auto" resolves to the draft that pays by
            stored costs (`qspec_jax.decoding.resolve`), and to "none" over a cache that takes no drafts.
        cache: the target's KV cache, NAME or NAME:SETTING=VALUE,...: "int8" (hierarchical, both 4-bit planes), "full" (full precision), or,
            lossy, "kivi", "specache", "streaming-llm" and "h2o" (`qspec_jax.caches.registry`). None: "full" with draft "none", else "int8".
        num_speculative_tokens: the paper's gamma, the maximum number of draft tokens per round. None: 4, or chosen
            with draft "auto" and with the text of a cascade.
        adaptive: each row drafts as many tokens as pay by its past acceptance, at most num_speculative_tokens.
        draft_cost: for adaptive, the time of a draft step divided by that of a verification (`qspec bench decode` measures both). None: the
            stored cost for the row's length (`qspec_jax.decoding.resolve`).
        min_draft_confidence: a row stops drafting in a round when the draft's top-token probability is below this; 0 disables it.
        temperature: of sampling; 0 is greedy.
        top_k: sample from this number of most likely tokens; 0 disables it.
        top_p: sample from the most likely tokens with this total probability; 1 disables it.
        min_p: sample from tokens with at least this share of the top token's probability; 0 disables it.
        repetition_penalty: divides or multiplies the logits of tokens seen before (`qspec_jax.decoding.logits_processors`); 1 disables it.
        min_new_tokens: the number of new tokens before which no EOS is generated.
        logit_bias: numbers added to logits, by token id.
        banned_token_ids: token ids that are never generated.
        eos_token_ids: token ids that end a row. None: the checkpoint's.
        ignore_eos: whether rows go on after an EOS.
        stop: strings that end a row; the first one and the text after it are cut off.
        stop_token_ids: sequences of new tokens that end a row, and are kept.
        output_logprobs: whether the target's log-probabilities of the new tokens are returned, before processors, temperature and filters.
        top_logprobs: the number of most likely tokens whose log-probabilities are returned for each position.
        group_size: tokens of a KV group, for caches that have groups. None: the cache's default.
        scheme: the quantizer of the int8 cache, "int8_first" or "paper".
        exact: "tokens" are the target's in exact arithmetic: passes of other shapes round differently, so near ties may be broken
            differently. "bits": greedy tokens are those of one-by-one decoding of the prompt alone to the last one, and samples those of
            the same request alone (docs/exact.md says where it is refused, and what it costs). "auto": bits where a single greedy prompt
            has them at hardly any cost, which is on Hopper GPUs (`qspec_jax.decoding.auto_exact`), and tokens elsewhere.
    """

    max_new_tokens: int = 256
    num_return_sequences: int = 1
    draft: str | DraftSettings | Draft = AUTO
    cache: str | None = None
    num_speculative_tokens: int | None = None
    adaptive: bool = False
    draft_cost: float | None = None
    min_draft_confidence: float = 0.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    banned_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[tuple[int, ...], ...] = ()
    output_logprobs: bool = False
    top_logprobs: int = 0
    group_size: int | None = None
    scheme: str = CacheConfig.scheme
    exact: str = AUTO

    def __post_init__(self):
        def check(ok: bool, what: str):
            if not ok:
                raise InputError(what)

        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                value = field.default_factory() if field.default is dataclasses.MISSING else field.default
            object.__setattr__(self, field.name, READERS[field.name](field.name, value))
        if self.draft == AUTO and not self.cache_config.takes_drafts:
            object.__setattr__(self, "draft", NONE)
        if self.draft != AUTO:
            if isinstance(self.draft, str):
                parse_draft(self.draft)  # which raises InputError for what is no draft
            if self.num_speculative_tokens is None and not is_cascade(self.draft):
                object.__setattr__(self, "num_speculative_tokens", GAMMA)
        check(self.exact in EXACT, f"exact {self.exact!r:.60} should be one of {', '.join(EXACT)}")
        self._check_compatible(check)
        if self.exact == BITS:
            self._check_bits()
        check(self.max_new_tokens >= 1, f"max_new_tokens {self.max_new_tokens} should be at least 1")
        check(self.num_return_sequences >= 1, f"num_return_sequences {self.num_return_sequences} should be at least 1")
        gamma = self.num_speculative_tokens
        check(gamma is None or 0 <= gamma < 2**31, f"num_speculative_tokens (gamma) {gamma} should be 0 or more, and less than 2**31")
        check(0 <= self.temperature <= 1e6, f"temperature {self.temperature} should be from 0 to 1e6")
        check(0 <= self.top_k < 2**31, f"top_k {self.top_k} should be 0 (off) or more, and less than 2**31")
        check(0 < self.top_p <= 1, f"top_p {self.top_p} should be in (0, 1]")
        check(0 <= self.min_p <= 1, f"min_p {self.min_p} should be in [0, 1]")
        penalty = self.repetition_penalty
        check(0.01 <= penalty <= 100, f"repetition_penalty {penalty} should be from 0.01 to 100")
        check(self.min_new_tokens >= 0, f"min_new_tokens {self.min_new_tokens} should be 0 or more")
        most = self.max_new_tokens
        check(self.min_new_tokens <= most, f"min_new_tokens {self.min_new_tokens} should be at most max_new_tokens, {most}")
        for token, bias in self.logit_bias.items():
            check(abs(bias) <= 1e9 or bias == -math.inf, f"logit_bias {bias} of token {token} should be from -1e9 to 1e9, or -inf")
        check(all(self.stop), "a stop string should not be empty")
        check(all(self.stop_token_ids), "a stop sequence of token ids should not be empty")
        check(self.top_logprobs >= 0, f"top_logprobs {self.top_logprobs} should be 0 or more")
        cost = self.draft_cost
        check(cost is None or 0 < cost < math.inf, f"draft_cost {cost} should be a finite number, more than 0")
        confidence = self.min_draft_confidence
        check(0 <= confidence <= 1, f"min_draft_confidence {confidence} should be in [0, 1]")

    def _check_bits(self) -> None:
        """What settings alone say of exact "bits"; `exact_bits.check_bits` has the rest. Raises BitsRefused."""
        name, gamma, samples = self.cache_config.name, self.num_speculative_tokens, self.num_return_sequences
        if name not in CACHES_WITH_BITS:
            raise BitsRefused(f"is for the caches {' and '.join(CACHES_WITH_BITS)}, and cache is {name}")
        if samples > 1:
            raise BitsRefused(f"is for one sample of each prompt, and num_return_sequences (samples) is {samples}")
        if self.speculative and gamma is not None and gamma > MAX_DRAFTS_WITH_BITS:
            raise BitsRefused(f"is for at most {MAX_DRAFTS_WITH_BITS} drafts in a round, and num_speculative_tokens (gamma) is {gamma}")

    def _check_compatible(self, check: Callable[[bool, str], None]) -> None:
        """The cache takes drafts, and gives the draft what it needs."""
        cache, needs = CACHES[self.cache_config.kind], self.draft_needs  # which raises InputError for what is no cache
        if self.draft in (AUTO, NONE) or self.num_speculative_tokens == 0:  # without a draft
            return
        check(cache.takes_drafts, f"draft {self.draft_name}: the only draft that is compatible with cache {self.cache} is {NONE}")
        if needs <= cache.gives:
            return
        does = " and ".join(need.value for need in Gives if need in needs)
        caches = [name for name, each in CACHES.items() if needs <= each.gives and each.takes_drafts]
        # The needs of a draft that is made of others are known once its settings are.
        needed = {name: getattr(settings, "needs", frozenset()) for name, settings in DRAFTS.items()}
        drafts = [name for name, those in needed.items() if isinstance(those, frozenset) and those <= cache.gives]
        others = f"compatible caches: {', '.join(caches)}; compatible drafts for cache {self.cache}: {', '.join([*drafts, NONE])}"
        check(False, f"draft {self.draft_name} {does}; {others}")

    @property
    def logprobs(self) -> int | None:
        """How many alternatives to every new token have their log-probabilities put out; None: not even the token."""
        return self.top_logprobs if self.output_logprobs or self.top_logprobs else None

    @property
    def speculative(self) -> bool:
        """Whether a draft is named, or is yet to be chosen; with num_speculative_tokens 0 it has nothing to do."""
        return self.draft != NONE

    @property
    def has_drafts(self) -> bool:
        """Whether rounds have drafts, or may have some once draft "auto" is chosen."""
        return self.speculative and self.num_speculative_tokens != 0

    @property
    def leaves_gammas_open(self) -> bool:
        """Whether the draft is a cascade, by its text, of which the drafts of a round or of its first draft at a time are to be chosen."""
        if not is_cascade(self.draft) or self.num_speculative_tokens == 0:
            return False
        return self.num_speculative_tokens is None or first_gamma_of(self.draft) is None

    @property
    def draft_needs(self) -> frozenset[Gives]:
        """What the draft needs of the target's cache that not every cache gives; nothing while it is "auto"."""
        if isinstance(self.draft, Draft):
            return self.draft.needs
        return frozenset() if self.draft == AUTO else needs_of(self.draft_settings)

    @property
    def draft_settings(self) -> DraftSettings | None:
        """The settings of the draft; None without a draft. Raises InputError for "auto", and for a draft that is made already."""
        if isinstance(self.draft, Draft):
            raise InputError(f"the settings of a {self.draft_name} that is made already are not known; give them, or their text, as draft")
        return parse_draft(self.draft) if isinstance(self.draft, str) else self.draft

    @property
    def draft_name(self) -> str:
        """The draft as messages and reports call it: its text, the name of its settings' draft, or the name of its class."""
        named = next((name for name, settings in DRAFTS.items() if settings is type(self.draft)), type(self.draft).__name__)
        return self.draft if isinstance(self.draft, str) else named

    @property
    def cache_config(self) -> CacheConfig:
        """The target's cache."""
        usual = "int8" if self.speculative else "full"
        return CacheConfig.parse(usual if self.cache is None else self.cache, self.group_size, self.scheme)


def beside_draft(config: GenerationConfig) -> GenerationConfig:
    """The config for a draft that is made already, to which "auto" gives way: with the usual draft's name and number of drafts."""
    if config.draft == AUTO:
        return dataclasses.replace(config, draft=USUAL)
    return dataclasses.replace(config, num_speculative_tokens=GAMMA) if config.num_speculative_tokens is None else config


def fitting(pairs: Iterable[tuple[str, str | None]]) -> list[GenerationConfig]:
    """The configs of those of these drafts and caches that go together; the others are left out, and this is logged. Raises InputError
    where none is left, and for what is no draft or no cache."""
    found, refused, pairs = [], [], list(pairs)
    for draft, cache in pairs:
        parse_draft(draft)
        CacheConfig.parse(CacheConfig.kind if cache is None else cache)
    for draft, cache in pairs:
        try:
            found.append(GenerationConfig(draft=draft, cache=cache))
        except InputError as error:
            refused.append(error)
    if refused and not found:
        raise refused[0]
    for error in refused:
        log.warning("left out: %s", error)
    return found
