"""The engine without HTTP, on a random checkpoint."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ling_serve import LLM
from ling_serve.engine.request import FinishReason, SamplingParams
from ling_serve.errors import ConfigError, ContextLengthExceeded, LingServeError, RequestError
from tests.checkpoints import cached_checkpoint

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return cached_checkpoint()


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), max_num_seqs=4, max_model_len=256, max_queue_len=2) as made:
        yield made


def test_prompts_are_answered_in_order_and_as_if_alone(llm: LLM) -> None:
    """More of them than the queue holds."""
    prompts = [f"prompt number {number}, " + "x" * 5 * number for number in range(9)]
    together = llm.generate(prompts, GREEDY)
    assert [llm.generate([prompt], GREEDY)[0] for prompt in prompts] == together
    assert len({completion.token_ids for completion in together}) == 9
    for completion in together:
        assert len(completion.token_ids) == 12
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.logprobs is None
        assert completion.text == llm.tokenizer.decode(completion.token_ids, skip_special_tokens=True, continuing=True)


def test_text_and_its_ids_are_the_same_prompt(llm: LLM) -> None:
    text, ids = llm.generate(["hello", llm.tokenizer.encode("hello")], [GREEDY, GREEDY])
    assert text == ids


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    [whole] = llm.generate(["hello"], GREEDY)
    stop = whole.text[3:5]
    [cut] = llm.generate(["hello"], GREEDY, stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert len(cut.token_ids) < len(whole.token_ids)
    assert not llm.engine.has_work


def test_a_stop_token_has_no_text(llm: LLM) -> None:
    [whole] = llm.generate(["hello"], GREEDY)
    stop_id = whole.token_ids[4]
    [cut] = llm.generate(["hello"], replace(GREEDY, stop_token_ids=frozenset({stop_id})))
    end = whole.token_ids.index(stop_id)
    assert cut.token_ids == whole.token_ids[: end + 1]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.text == llm.tokenizer.decode(cut.token_ids[:-1], skip_special_tokens=True, continuing=True)


def test_logprobs_come_one_for_each_token(llm: LLM) -> None:
    [answer] = llm.generate(["hello"], replace(GREEDY, logprobs=2))
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 12
    for token, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
        assert logprobs.top[0] == (token, logprobs.logprob)
        assert len(logprobs.top) == 2


def test_a_seed_repeats_itself_in_any_company(llm: LLM) -> None:
    seeded = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
    [alone] = llm.generate(["hello"], seeded)
    among = llm.generate(["other", "hello", "more"], [SamplingParams(12), seeded, SamplingParams(12)])
    assert among[1] == alone


def test_defaults_come_from_the_checkpoint(llm: LLM) -> None:
    [answer] = llm.generate(["hello"])
    assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert len(answer.token_ids) <= 256 - 5


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    [answer] = llm.chat(messages, GREEDY)
    assert [answer] == llm.generate([llm.template.render(messages)], GREEDY)
    assert llm.chat([messages, messages], GREEDY) == [answer, answer]
    with pytest.raises(RequestError, match="neither one conversation"):
        llm.chat([])


def test_a_prompt_that_cannot_be_answered_is_refused_and_nothing_is_left_behind(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded, match="has 300 tokens"):
        llm.generate([[1, 2], [1] * 300], GREEDY)
    assert not llm.engine.has_work
    with pytest.raises(RequestError, match="vocabulary"):
        llm.generate([[-1]], GREEDY)
    with pytest.raises(RequestError, match="expected a list"):
        llm.generate("hello")
    with pytest.raises(RequestError, match="1 sampling parameters for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    assert len(llm.generate(["hello"], GREEDY)) == 1


def test_an_unknown_option_is_named(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="no option 'max_sequences'"):
        LLM(str(checkpoint), max_sequences=4)


def test_a_context_longer_than_the_models_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="at most 2048"):
        LLM(str(checkpoint), max_model_len=4096)


def test_a_closed_llm_says_so(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), max_model_len=64)
    assert dict(llm.engine.info)["layers"] == "1 MLA / 3 KDA"
    llm.close()
    with pytest.raises(LingServeError, match="closed"):
        llm.generate(["hello"], GREEDY)
