"""Held-out bits per byte: by hand with models of known probabilities."""

import functools
import math

import numpy as np
import pytest
import torch

from moe_async.comm import World
from moe_async.data import ByteTokenizer, Corpus, heldout_batches
from moe_async.engine.evaluate import evaluate
from moe_async.engine.step import IGNORED_LABEL
from moe_async.model import ModelOutput, build_model
from tests.helpers.numerics import assert_close
from tests.helpers.small import SMALL, small_recipe

VOCAB = 257
float64 = functools.partial(torch.tensor, dtype=torch.float64)


def corpus_of(**heldout):
    """Domains with held-out streams of the given ids; an id of 256 ends a document and is no byte of text."""
    streams = tuple(np.array(stream, dtype=np.uint16) for stream in heldout.values())
    sizes = tuple(int((stream != 256).sum()) for stream in streams)
    names = tuple(heldout)
    return Corpus(names, streams, streams, (1.0,) * len(names), sizes, sizes, ByteTokenizer())


@pytest.fixture
def corpus():
    """Eleven bytes and two ends of documents; five bytes and an end."""
    return corpus_of(first=[*range(7), 256, 7, 8, 9, 10, 256], second=[1, 2, 3, 4, 5, 256])


def uniform(tokens, token_mask):
    return ModelOutput(torch.zeros(*tokens.shape, VOCAB), ())


def certain_of_the_next_id(tokens, token_mask):
    """Half the probability on ``token + 1``, the other half on everything else alike."""
    logits = torch.zeros(*tokens.shape, VOCAB, dtype=torch.float64)
    return ModelOutput(logits.scatter(-1, (tokens[..., None] + 1) % VOCAB, math.log(VOCAB - 1)), ())


def test_a_uniform_model_by_hand(corpus):
    actual = evaluate(uniform, heldout_batches(corpus, 4, 0, 1, 2), corpus, World())
    # All but the first token of each domain are predicted, ends of documents too; the bytes are those of text.
    bits = math.log2(VOCAB)
    assert list(actual.by_domain) == ["first", "second"]
    assert_close(float64(actual.by_domain["first"]), float64(12 * bits / 11), torch.float32)
    assert_close(float64(actual.by_domain["second"]), float64(5 * bits / 5), torch.float32)
    assert_close(float64(actual.bits_per_byte), float64(17 * bits / 16), torch.float32)


def test_a_model_that_knows_half_by_hand(corpus):
    actual = evaluate(certain_of_the_next_id, heldout_batches(corpus, 4, 0, 1, 2), corpus, World())
    # In the first domain 6 + 3 ids follow their neighbour, in the second 4; the others cost 1 bit more than log2 256.
    assert_close(float64(actual.by_domain["first"]), float64((9 * 1 + 3 * 9) / 11))
    assert_close(float64(actual.by_domain["second"]), float64((4 * 1 + 1 * 9) / 5))
    assert_close(float64(actual.bits_per_byte), float64((13 * 1 + 4 * 9) / 16))


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("seq_len", [1, 4, 40])
def test_the_cut_into_batches_does_not_matter_to_a_model_without_context(corpus, seq_len, batch_size):
    batches = heldout_batches(corpus, seq_len, 0, 1, batch_size)
    actual = evaluate(certain_of_the_next_id, batches, corpus, World())
    assert_close(float64(actual.bits_per_byte), float64(49 / 16))


def test_padding_is_masked_and_full_batches_have_no_mask(corpus):
    masks = []

    def spy(tokens, token_mask):
        masks.append(None if token_mask is None else token_mask.tolist())
        return uniform(tokens, token_mask)

    # Windows of six: twelve labels of the first domain in two rows, five and one place of padding in the third.
    evaluate(spy, heldout_batches(corpus, 6, 0, 1, 2), corpus, World())
    assert masks == [None, [[True] * 5 + [False], [False] * 6]]


def test_what_stands_at_ignored_labels_costs_nothing(corpus):
    def wild(tokens, token_mask):
        output = certain_of_the_next_id(tokens, token_mask)
        if token_mask is not None:
            output.logits[~token_mask] = 1e9
        return output

    batches = heldout_batches(corpus, 5, 0, 1, 4)
    assert any((batch.labels == IGNORED_LABEL).any() for batch in batches)
    assert_close(float64(evaluate(wild, batches, corpus, World()).bits_per_byte), float64(49 / 16))


def test_a_real_model_agrees_with_one_window_at_a_time(corpus):
    recipe = small_recipe(model=SMALL["model"] | {"vocab_size": VOCAB})
    model = build_model(recipe).eval()
    actual = evaluate(model, heldout_batches(corpus, 4, 0, 1, 3), corpus, World())
    nats = 0.0
    for batch in heldout_batches(corpus, 4, 0, 1, 1):
        live = batch.labels[0] != IGNORED_LABEL
        if live.any():
            logits = model(batch.tokens[:, live]).logits[0]
            nats -= torch.log_softmax(logits, -1)[torch.arange(live.sum()), batch.labels[0, live]].sum().item()
    assert_close(float64(actual.bits_per_byte), float64(nats / math.log(2) / 16))


def test_no_gradient_is_kept(corpus):
    weight = torch.zeros(VOCAB, requires_grad=True)

    def forward(tokens, token_mask):
        assert not torch.is_grad_enabled()
        return ModelOutput(weight.expand(*tokens.shape, VOCAB), ())

    evaluate(forward, heldout_batches(corpus, 4, 0, 1, 2), corpus, World())


def test_the_loss_of_bfloat16_logits_is_taken_in_float32(corpus):
    def low(tokens, token_mask):
        return ModelOutput(certain_of_the_next_id(tokens, token_mask).logits.bfloat16(), ())

    high = torch.tensor(math.log(VOCAB - 1)).bfloat16().item()
    other = math.log(VOCAB - 1 + math.exp(high))
    expected = (13 * (other - high) + 4 * other) / math.log(2) / 16
    actual = evaluate(low, heldout_batches(corpus, 4, 0, 1, 2), corpus, World())
    assert_close(float64(actual.bits_per_byte), float64(expected), torch.float32)
