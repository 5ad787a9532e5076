"""Random numbers follow from a key, a rank and a purpose."""

import hashlib

import pytest
import torch

from moe_async.ops.noise import Noise, dropout_mask, jittered, with_normal_noise
from tests.helpers.numerics import assert_close

CPU = torch.device("cpu")


def test_by_hand():
    seed = int.from_bytes(hashlib.sha256(b"5/3/drop").digest()[:8], "little") // 2
    expected = torch.rand(4, 6, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(Noise(5, 3).uniform("drop", (4, 6), CPU), expected)
    expected = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(Noise(5, 3).normal("drop", (4, 6), CPU), expected)


def test_a_key_comes_from_torchs_generator_and_is_the_only_thing_drawn_there():
    torch.manual_seed(0)
    first, second = Noise.draw(2), Noise.draw(2)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    keys = [torch.randint(2**62, ()).item() for _ in range(2)]
    assert [first, second] == [Noise(key, 2) for key in keys] and keys[0] != keys[1]
    assert torch.equal(torch.get_rng_state(), after)
    noise = Noise.draw(0)
    before = torch.get_rng_state()
    noise.uniform("a", (3,), CPU)
    noise.normal("a", (3,), CPU)
    jittered(torch.ones(3), 0.5, noise)
    with_normal_noise(torch.ones(3), 0.5, noise)
    dropout_mask(noise, 0.5, (3, 4), 1, torch.ones(()))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("draw", ["uniform", "normal"])
def test_keys_ranks_and_purposes_have_numbers_of_their_own(draw):
    def drawn(noise, purpose="drop"):
        return tuple(getattr(noise, draw)(purpose, (5,), CPU).tolist())

    different = [drawn(Noise(1, 0)), drawn(Noise(2, 0)), drawn(Noise(1, 1)), drawn(Noise(1, 0), "jitter")]
    assert len(set(different)) == 4 and drawn(Noise(1, 0)) == different[0]


def test_uniform_and_normal_numbers_are_what_they_are_called():
    uniform, normal = Noise(0).uniform("a", (100_000,), CPU), Noise(0).normal("a", (100_000,), CPU)
    assert uniform.dtype == normal.dtype == torch.float32
    assert uniform.min() >= 0 and uniform.max() < 1
    # Means of 100 000 numbers lie within 0.01 of what they estimate.
    assert abs(uniform.mean() - 0.5) < 0.01 and abs(normal.mean()) < 0.01 and abs(normal.std() - 1) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_jitter_is_a_factor_between_its_bounds(dtype):
    x = torch.full((400, 5), 3.0, dtype=dtype)
    factor = jittered(x, 0.25, Noise(7)) / 3
    assert factor.dtype == dtype and 0.75 <= factor.min() < 0.755 and 1.245 < factor.max() <= 1.25
    assert_close(factor, 0.75 + 0.5 * Noise(7).uniform("jitter", (400, 5), CPU).to(dtype), torch.float32)
    assert torch.equal(jittered(x, 0.0, Noise(7)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_noise_is_added(dtype):
    x = torch.full((400, 5), 3.0, dtype=dtype)
    noisy = with_normal_noise(x, 0.5, Noise(7))
    assert noisy.dtype == dtype
    assert_close((noisy - 3) / 0.5, Noise(7).normal("input", (400, 5), CPU), torch.float32)


def test_noise_of_the_input_has_the_gradient_of_the_input():
    x = torch.ones(3, 2, requires_grad=True)
    jittered(x, 0.5, Noise(1)).sum().backward()
    assert_close(x.grad, jittered(torch.ones(3, 2), 0.5, Noise(1)))
    x.grad = None
    with_normal_noise(x, 0.5, Noise(1)).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 2))


def test_dropout_keeps_the_mean():
    mask = dropout_mask(Noise(3, 2), 0.2, (4000, 5), 6, torch.ones((), dtype=torch.bfloat16))
    assert mask.dtype == torch.bfloat16 and mask.unique().tolist() == [0.0, 1.25]
    assert abs((mask == 0).double().mean() - 0.2) < 0.01
    dropped = Noise(3, 2).uniform("expert 6", (4000, 5), CPU) < 0.2
    assert torch.equal(mask == 0, dropped)
    assert not torch.equal(mask, dropout_mask(Noise(3, 2), 0.2, (4000, 5), 7, mask))
    assert not torch.equal(mask, dropout_mask(Noise(3, 1), 0.2, (4000, 5), 6, mask))


def test_more_rows_begin_with_the_same_rows():
    few, many = (dropout_mask(Noise(3), 0.5, (rows, 6), 1, torch.ones(())) for rows in (20, 50))
    assert torch.equal(many[:20], few)
