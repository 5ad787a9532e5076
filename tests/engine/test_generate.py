"""Sampled text: with models whose next token is certain, and what a sample depends on."""

import pytest
import torch

from moe_async.data import ByteTokenizer
from moe_async.engine.generate import generate
from moe_async.errors import RecipeError
from moe_async.model import ModelOutput, build_model
from moe_async.recipe import dump_recipe, load_recipe
from tests.helpers.small import SMALL, small_recipe

TOKENIZER = ByteTokenizer()
END = TOKENIZER.end_of_document


def certain(next_id):
    """A model whose next token is ``next_id`` of the token at each position."""

    def forward(tokens, token_mask):
        logits = torch.zeros(*tokens.shape, TOKENIZER.vocab_size)
        following = next_id(tokens.clone()).clamp(0, END)
        return ModelOutput(logits.scatter(-1, following[..., None], 1e4), ())

    return forward


def alphabet(tokens):
    return tokens + 1


def recorded(forward, calls):
    def spy(tokens, token_mask):
        calls.append((tokens.tolist(), None if token_mask is None else token_mask.tolist()))
        return forward(tokens, token_mask)

    return spy


def sample(forward, prompts, new_tokens=6, context=8, **options):
    return generate(forward, TOKENIZER, prompts, new_tokens, context=context, **options)


def test_the_alphabet_by_hand():
    assert sample(certain(alphabet), ["a", "xyL"], 4) == ["bcde", "MNOP"]


def test_texts_end_at_an_end_of_document():
    def end_after_d(tokens):
        return torch.where(tokens == ord("d"), END, tokens + 1)

    assert sample(certain(end_after_d), ["a", "p", "d"], 6) == ["bcd", "qrstuv", ""]


def test_shorter_texts_are_padded_behind_their_end_and_masked():
    calls = []
    sample(recorded(certain(alphabet), calls), ["abc", "x"], 1)
    tokens, mask = calls[0]
    assert tokens == [[97, 98, 99], [120, 0, 0]] and mask == [[True] * 3, [True, False, False]]
    calls.clear()
    sample(recorded(certain(alphabet), calls), ["ab", "xy"], 1)
    assert calls == [([[97, 98], [120, 121]], None)]


def test_the_model_sees_at_most_the_latest_tokens_of_the_context():
    calls = []
    assert sample(recorded(certain(alphabet), calls), ["abcde", "t"], 4, context=3) == ["fghi", "uvwx"]
    assert [tokens[0] for tokens, _ in calls] == [[99, 100, 101], [100, 101, 102], [101, 102, 103], [102, 103, 104]]
    assert [tokens[1] for tokens, _ in calls] == [[116, 0, 0], [116, 117, 0], [116, 117, 118], [117, 118, 119]]


@pytest.mark.parametrize("prompts", [["a"], ["a", "bcd"]], ids=str)
def test_every_rank_runs_the_model_equally_often_also_past_an_end(prompts):
    calls = []
    sample(recorded(certain(lambda tokens: torch.full_like(tokens, END)), calls), prompts, 5)
    assert len(calls) == 5


def test_nothing_to_do_runs_nothing():
    calls = []
    forward = recorded(certain(alphabet), calls)
    assert sample(forward, []) == [] and sample(forward, ["a", "b"], 0) == ["", ""] and calls == []


@pytest.fixture
def model():
    return build_model(small_recipe(model=SMALL["model"] | {"vocab_size": None})).eval()


def test_a_sample_depends_on_the_seed_alone(model):
    first = sample(model, ["ab", "c"], 12, seed=5)
    torch.manual_seed(123)
    assert sample(model, ["ab", "c"], 12, seed=5) == first
    assert sample(model, ["ab", "c"], 12, seed=6) != first


def test_no_global_random_state_is_drawn_and_no_gradient_kept(model):
    before = torch.get_rng_state()

    def forward(tokens, token_mask):
        assert not torch.is_grad_enabled()
        return model(tokens, token_mask)

    sample(forward, ["ab"], 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_padding_of_one_text_does_not_change_another(model):
    # At a low temperature the likeliest token is certain, so that the other text's draws do not matter.
    alone = sample(model, ["ab"], 6, temperature=1e-9)
    assert sample(model, ["ab", "a long neighbour"], 6, context=32, temperature=1e-9)[:1] == alone


def test_temperature_divides_the_logits():
    def two_to_one(tokens, token_mask):
        logits = torch.full((*tokens.shape, TOKENIZER.vocab_size), -1e4)
        logits[..., ord("a")], logits[..., ord("b")] = 2.0, 0.0
        return ModelOutput(logits, ())

    warm, cold = (sample(two_to_one, ["x"] * 50, 40, temperature=t) for t in (100.0, 0.1))
    share = "".join(warm).count("a") / 2000
    # At 100 both are nearly as likely; 2000 draws have a standard error of 1.1 %.
    assert 0.45 < share < 0.56 and set("".join(cold)) == {"a"}


def test_a_recipe_with_an_empty_prompt_is_refused_before_it_trains(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_recipe(small_recipe()))
    with pytest.raises(RecipeError, match=r"log\.prompts\.1 is ''; it must not be empty"):
        load_recipe(path, ['log.prompts=["The ", ""]'])
