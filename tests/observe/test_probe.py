"""What a probe of a model keeps, against the routers' own choices; and the profile made of it."""

import numpy as np
import pytest
import torch

import moe_async
from moe_async.errors import LoadError
from moe_async.observe.probe import LabelledText, probe
from moe_async.observe.profile import profile
from moe_async.observe.specialise import preferred_tokens
from moe_async.observe.store import LoadMeta

EXPERTS, TOP_K, SEQUENCES, LENGTH = 4, 2, 10, 6


class Model(torch.nn.Module):
    """Two layers with experts over an embedding; the second sees the first one's output."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(20, 8)
        self.layers = torch.nn.ModuleList(moe_async.MoELayer(8, EXPERTS, TOP_K) for _ in range(2))

    def forward(self, tokens, token_mask):
        x = self.embedding(tokens)
        self.selections = []
        for layer in self.layers:
            output = layer(x, token_mask)
            self.selections.append(output.selection)
            x = x + output.hidden
        return x


META = LoadMeta(("layer 0", "layer 1"), (EXPERTS,) * 2, (TOP_K,) * 2, domains=("code", "prose", "(none)"))


@pytest.fixture
def text():
    """Ten sequences of two domains, the last one half as long as the others."""
    torch.manual_seed(1)
    live = torch.ones(SEQUENCES, LENGTH, dtype=torch.bool)
    live[-1, LENGTH // 2 :] = False
    domains = torch.tensor([0] * 5 + [1] * 5)
    tokens = torch.randint(0, 10, (SEQUENCES, LENGTH)) + 10 * domains[:, None]
    return LabelledText(tokens, live, domains)


def by_hand(model, text):
    """The experts of each live token in the order of the text, [N, L, K]."""
    with torch.no_grad():
        model.eval()(text.tokens_BS, text.live_BS)
    return torch.stack([selection[text.live_BS] for selection in model.selections], dim=1).numpy()


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_all_tokens_are_kept_in_the_order_of_the_text(text, batch_size):
    model = Model().train()
    found = probe(model, META, text, batch_size)
    assert model.training
    experts = by_hand(model, text)
    paths = found.record.paths
    assert np.array_equal(np.sort(paths.experts, axis=-1), np.sort(experts, axis=-1))
    assert np.array_equal(paths.token, text.tokens_BS[text.live_BS].numpy())
    assert np.array_equal(paths.domain, np.repeat(text.domains_B.numpy(), LENGTH)[text.live_BS.flatten().numpy()])
    rows = np.repeat(np.arange(SEQUENCES), LENGTH)[text.live_BS.flatten().numpy()]
    counts_BLE = np.zeros((SEQUENCES, 2, EXPERTS), dtype=np.int64)
    for layer in range(2):
        np.add.at(counts_BLE[:, layer], (rows[:, None], experts[:, layer]), 1)
    assert np.array_equal(found.counts_BLE, counts_BLE)
    windows = found.record.windows
    assert len(windows) == 1 and windows["steps"] == -(-SEQUENCES // batch_size)
    assert np.array_equal(windows["counts"][0], counts_BLE.sum(axis=0))
    assert np.array_equal(windows["domain_counts"][0, :, 0], counts_BLE[:5].sum(axis=0))
    assert windows["tokens"].tolist() == [[57, 57]] and not windows["swing"].any()


def test_a_profile_of_two_models(text):
    first, second = Model(), Model(seed=3)
    ours, theirs = by_hand(first, text), by_hand(second, text)
    found = profile(probe(first, META, text, 4), probe(second, META, text, 4), shuffles=20)
    assert found.domains == ("code", "prose")
    for place, layer in enumerate(found.layers):
        assert layer.layer == f"layer {place}"
        common = (ours[:, place, :, None] == theirs[:, place, None, :]).any(axis=-1).mean()
        assert layer.stability.agreement == pytest.approx(common)
        assert np.allclose(np.sum(layer.domain_shares, axis=1), 1)
        assert layer.information.bits > 0 and len(layer.preferred) == EXPERTS
        assert np.shape(layer.coactivation) == (EXPERTS, EXPERTS)
        assert np.mean(found.loads[place]) == pytest.approx(1.0)
    assert found.summary.layers[0].max_over_mean == pytest.approx(max(found.loads[0]))
    alike = profile(probe(first, META, text, 4), probe(first, META, text, 3), shuffles=2)
    assert all(layer.stability.agreement == 1.0 for layer in alike.layers)


def test_a_text_without_labels_has_no_information(text):
    unlabelled = LabelledText(text.tokens_BS, text.live_BS, torch.full((SEQUENCES,), 2))
    assert all(layer.information is None for layer in profile(probe(Model(), META, unlabelled)).layers)


def test_what_cannot_be_profiled(text):
    other = LoadMeta(("layer 0",), (EXPERTS,), (TOP_K,), domains=META.domains)
    with pytest.raises(LoadError, match="the model has 2 MoE layers, but 1 were expected"):
        probe(Model(), other, text)
    with pytest.raises(LoadError, match="there is no text"):
        probe(Model(), META, LabelledText(*(part[:0] for part in vars(text).values())))
    seen = probe(Model(), META, text)
    turned = LabelledText(text.tokens_BS.flip(0), text.live_BS, text.domains_B)
    with pytest.raises(LoadError, match="saw different tokens"):
        profile(seen, probe(Model(), META, turned))


def test_preferred_tokens():
    # Expert 0 gets all of token 7 and half of token 3; expert 1 the rest; expert 2 nothing.
    token_N = np.array([7] * 10 + [3] * 20 + [5] * 4)
    experts_NK = np.array([[0]] * 10 + [[0]] * 10 + [[1]] * 10 + [[1]] * 4)
    first, second, third = preferred_tokens(token_N, experts_NK, 3)
    assert [(one.token, one.count) for one in first] == [(7, 10)]
    assert first[0].lift == pytest.approx((10 / 20) / (10 / 34))
    # Token 5 came four times, too few to say anything.
    assert [one.token for one in second] == [3] and third == ()
    assert [one.token for one in preferred_tokens(token_N, experts_NK, 3, least=4)[1]] == [5, 3]
