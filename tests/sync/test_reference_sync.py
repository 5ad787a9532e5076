"""The reference against numbers worked out by hand, and against itself where two policies must agree."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.helpers import reference_sync as ref
from tests.helpers.reference_sync import Problem, Trace


def vector(*values: float) -> Tensor:
    """A float64 vector."""
    return torch.tensor(values, dtype=torch.float64)


def near(actual: Tensor, *expected: float) -> bool:
    """Equal up to rounding."""
    return torch.allclose(actual, vector(*expected), rtol=0, atol=1e-14)


def constant(
    gradients: list[list[float]],
    seconds: list[float],
    steps: int,
    lr: float = 1.0,
    up: list[float] | None = None,
    down: list[float] | None = None,
    tokens: list[list[int]] | None = None,
    units: list[list[list[int]]] | None = None,
) -> Problem:
    """Gradients, times and (as lists over steps) tokens that depend on the learner only; from zero."""
    number = len(gradients)
    up = up or [0.0] * number
    down = down or [0.0] * number
    return Problem(
        learners=number,
        steps=steps,
        initial=torch.zeros(len(gradients[0]), dtype=torch.float64),
        gradient=lambda learner, n, theta: vector(*gradients[learner]),
        compute=lambda learner, n: seconds[learner],
        up=lambda learner: up[learner],
        down=lambda learner: down[learner],
        lr=lr,
        tokens=(lambda learner, n: tokens[learner][n - 1]) if tokens else ref.one_token,
        unit_tokens=(lambda learner, n: units[learner][n - 1]) if units else ref.no_units,
    )


def towards(goals: list[float], seconds: list[float], steps: int, lr: float, momentum: float = 0.0) -> Problem:
    """Scalar, gradient theta - goal."""
    return Problem(
        learners=len(goals),
        steps=steps,
        initial=vector(0.0),
        gradient=lambda learner, n, theta: theta - goals[learner],
        compute=lambda learner, n: seconds[learner],
        lr=lr,
        momentum=momentum,
    )


def noisy(seed: int = 0, learners: int = 3, steps: int = 13, momentum: float = 0.0, flat: bool = False) -> Problem:
    """Quadratics with noise and ragged times, P = 5; ``flat``: the gradient does not depend on theta."""
    draw = torch.Generator().manual_seed(seed)
    goals = torch.randn(learners, 5, generator=draw, dtype=torch.float64)
    curve = torch.rand(learners, 5, generator=draw, dtype=torch.float64) + 0.2
    noise = torch.randn(learners, steps + 1, 5, generator=draw, dtype=torch.float64)
    times = random.Random(seed)
    seconds = [[times.uniform(0.5, 2.0) * (1 + learner) for _ in range(steps + 1)] for learner in range(learners)]
    label = [[times.randint(1, 9) for _ in range(steps + 1)] for _ in range(learners)]

    def gradient(learner: int, n: int, theta: Tensor) -> Tensor:
        return noise[learner, n] if flat else curve[learner] * (theta - goals[learner]) + 0.3 * noise[learner, n]

    return Problem(
        learners=learners,
        steps=steps,
        initial=torch.randn(5, generator=draw, dtype=torch.float64),
        gradient=gradient,
        compute=lambda learner, n: seconds[learner][n],
        up=lambda learner: 0.1 + 0.03 * learner,
        down=lambda learner: 0.2 - 0.05 * learner,
        lr=0.2,
        momentum=momentum,
        tokens=lambda learner, n: label[learner][n],
    )


PIECES = [slice(0, 2), slice(2, 3), slice(3, 5)]
WHOLE = [slice(0, 5)]


def same(a: Trace, b: Trace, atol: float = 0.0, times: bool = True) -> None:
    """Everything equal; the times exactly."""
    assert a.started.keys() == b.started.keys()
    assert a.shared.keys() == b.shared.keys()
    assert a.ended.keys() == b.ended.keys()
    for key, (time, theta) in a.started.items():
        assert not times or time == b.started[key][0], key
        assert torch.allclose(theta, b.started[key][1], rtol=0, atol=atol), key
    for version, value in a.shared.items():
        assert torch.allclose(value, b.shared[version], rtol=0, atol=atol), version
    for learner, theta in a.ended.items():
        assert torch.allclose(theta, b.ended[learner], rtol=0, atol=atol), learner


# By hand: gradient policies


def test_bsp_by_hand() -> None:
    problem = towards([1.0, 3.0], [1.0, 2.0], steps=3, lr=0.5, momentum=0.5)
    problem.up = lambda learner: [0.25, 0.5][learner]
    problem.down = lambda learner: [0.125, 0.0][learner]
    trace = ref.bsp(problem)
    # v = -2, w = 1; v = -1 + (1 - 2) = -2, w = 2; v = -1 + 0 = -1, w = 2.5.
    assert [trace.shared[0, n].item() for n in range(4)] == [0.0, 1.0, 2.0, 2.5]
    assert [trace.started[0, n][0] for n in (1, 2, 3)] == [0.0, 2.625, 5.125]
    assert [trace.started[1, n][0] for n in (1, 2, 3)] == [0.0, 2.5, 5.0]
    assert trace.started[1, 3][1].item() == 2.0
    assert trace.ended[0].item() == trace.ended[1].item() == 2.5


def test_m_sync_by_hand() -> None:
    trace = ref.m_sync(constant([[1.0], [10.0]], [1.0, 2.5], steps=3), m=1)
    # 0 alone at 1 and 2; at 2.5 the gradient of 1 has base 0 and is refused; 0 at 3; at 5 that of 1 has base 2 and is
    # refused again; 0 is done, so at 7.5 that of 1 has base 3 and counts.
    assert [trace.shared[0, v].item() for v in range(5)] == [0.0, -1.0, -2.0, -3.0, -13.0]
    assert {key: (time, theta.item()) for key, (time, theta) in trace.started.items()} == {
        (0, 1): (0.0, 0.0),
        (1, 1): (0.0, 0.0),
        (0, 2): (1.0, -1.0),
        (0, 3): (2.0, -2.0),
        (1, 2): (2.5, -2.0),
        (1, 3): (5.0, -3.0),
    }
    assert trace.ended[0].item() == -3.0 and trace.ended[1].item() == -13.0


def test_m_sync_waits_for_ever_when_too_few_are_left() -> None:
    trace = ref.m_sync(constant([[1.0], [2.0], [4.0]], [1.0, 1.0, 5.0], steps=2), m=2)
    # At 1: (1 + 2) / 2; at 2 again; at 5 the gradient of 2 has base 0: it gets -3; its second is kept for ever.
    assert trace.shared[0, 2].item() == -3.0 and (0, 3) not in trace.shared
    assert trace.started[2, 2] == (5.0, vector(-3.0))
    assert trace.ended[2].item() == -3.0


def test_asp_by_hand() -> None:
    trace = ref.asp(constant([[1.0], [10.0]], [1.0, 2.5], steps=3))
    values = [trace.shared[0, v].item() for v in range(7)]
    assert values == [0.0, -0.5, -1.0, -6.0, -6.5, -11.5, -16.5]  # at 1, 2, 2.5, 3, 5, 7.5
    assert trace.started[1, 2] == (2.5, vector(-6.0))
    assert trace.started[0, 3] == (2.0, vector(-1.0))
    assert trace.ended[0].item() == -6.5 and trace.ended[1].item() == -16.5


def test_asp_ties_go_by_learner() -> None:
    problem = constant([[1.0], [10.0]], [1.0, 1.0], steps=2, up=[0.5, 0.5])
    problem.down = lambda learner: 0.0
    trace = ref.asp(problem)
    assert [trace.shared[0, v].item() for v in range(3)] == [0.0, -0.5, -5.5]
    assert trace.started[0, 2] == (1.5, vector(-0.5)) and trace.started[1, 2] == (1.5, vector(-5.5))


def test_asp_a_message_without_latency_comes_after_one_that_was_there() -> None:
    trace = ref.asp(constant([[1.0], [10.0]], [1.0, 0.5], steps=1, up=[0.0, 0.5]))
    assert [trace.shared[0, v].item() for v in range(3)] == [0.0, -5.0, -5.5]


def test_ssp_by_hand() -> None:
    trace = ref.ssp(constant([[1.0], [10.0]], [1.0, 2.5], steps=3), s=1)
    # 1: 0 done 1, goes with -0.5. 2: 0 done 2, held (2 - 0 > 1). 2.5: 1 done 1, both go with -6. 3.5: 0 done 3, held.
    # 5: 1 done 2, both are answered with -11.5. 7.5: 1 done 3.
    assert [trace.shared[0, v].item() for v in range(7)] == [0.0, -0.5, -1.0, -6.0, -6.5, -11.5, -16.5]
    assert trace.started[0, 2] == (1.0, vector(-0.5))
    assert trace.started[0, 3] == (2.5, vector(-6.0))
    assert trace.started[1, 2] == (2.5, vector(-6.0))
    assert trace.started[1, 3] == (5.0, vector(-11.5))
    assert trace.ended[0].item() == -11.5 and trace.ended[1].item() == -16.5


def test_ssp_per_clock_by_hand() -> None:
    trace = ref.ssp(constant([[1.0], [10.0]], [1.0, 2.5], steps=3), s=1, aggregate="clock")
    assert [trace.shared[0, v].item() for v in range(4)] == [0.0, -5.5, -11.0, -16.5]
    assert trace.started[0, 2] == (1.0, vector(0.0))
    assert trace.started[0, 3] == (2.5, vector(-5.5))
    assert trace.started[1, 3] == (5.0, vector(-11.0))


# By hand: delta policies


def test_local_sgd_by_hand() -> None:
    trace = ref.local_sgd(towards([1.0, 3.0], [1.0, 2.0], steps=5, lr=0.5), every=2)
    # 0: 0.5, 0.75; 1: 1.5, 2.25; mean 1.5. Then 1.25, 1.125 and 2.25, 2.625; mean 1.875. Then 1.4375 and 2.4375.
    assert [trace.shared[0, v].item() for v in range(3)] == [0.0, 1.5, 1.875]
    assert trace.started[0, 2] == (1.0, vector(0.5)) and trace.started[1, 2] == (2.0, vector(1.5))
    assert trace.started[0, 3] == (4.0, vector(1.5)) and trace.started[0, 4] == (5.0, vector(1.25))
    assert trace.started[0, 5] == (8.0, vector(1.875))
    assert trace.ended[0].item() == 1.4375 and trace.ended[1].item() == 2.4375


def test_local_sgd_keeps_inner_momentum() -> None:
    trace = ref.local_sgd(towards([1.0, 3.0], [1.0, 1.0], steps=2, lr=0.5, momentum=0.5), every=1)
    # v = -1 and -3, theta 0.5 and 1.5, w = 1. v = -0.5 + 0 and -1.5 - 2, theta 1.25 and 2.75, w = 2.
    assert [trace.shared[0, v].item() for v in range(3)] == [0.0, 1.0, 2.0]


def test_diloco_by_hand() -> None:
    trace = ref.diloco(towards([1.0, 3.0], [1.0, 2.0], steps=4, lr=0.5), every=2, lr=0.5, momentum=0.5)
    # D = -1.5, m = -1.5, w = 0.5 (0.75 + 1.5). D = (0.09375 - 1.40625) / 2, m = -1.40625, w = 1.125 + 0.6796875.
    assert [trace.shared[0, v].item() for v in range(3)] == [0.0, 1.125, 1.8046875]


def test_streaming_by_hand() -> None:
    problem = constant([[1.0, 10.0], [3.0, 30.0]], [1.0, 2.0], steps=4)
    trace = ref.streaming_diloco(problem, 2, [slice(0, 1), slice(1, 2)], tau=1, alpha=0.5, lr=1.0, momentum=0.0)
    # Fragment 1 after steps 1 and 3, fragment 0 after 2 and 4; each taken one step later.
    # 1: Deltas 10, 30 -> w1 = -20 at 2. 2: [-2, -20], [-6, -60] -> take: -20, -40; Deltas 2, 6 -> w0 = -4 at 4.
    # 3: [-3, -30] at 3, waits until 4; [-9, -70] at 6 -> take: -3.5, -6.5; Deltas -20 + 30, -20 + 70 -> w1 = -50 at 6.
    # 4: [-4.5, -40] at 5, waits until 6; [-9.5, -100] at 8 -> take -45, -75; Deltas 0.5, 5.5 -> w0 = -7.
    assert [trace.shared[1, v].item() for v in range(3)] == [0.0, -20.0, -50.0]
    assert [trace.shared[0, v].item() for v in range(3)] == [0.0, -4.0, -7.0]
    expected = {
        (0, 2): (1.0, [-1.0, -10.0]),
        (1, 2): (2.0, [-3.0, -30.0]),
        (0, 3): (2.0, [-2.0, -20.0]),
        (1, 3): (4.0, [-6.0, -40.0]),
        (0, 4): (4.0, [-3.5, -30.0]),
        (1, 4): (6.0, [-6.5, -70.0]),
    }
    for key, (time, theta) in expected.items():
        assert trace.started[key][0] == time and trace.started[key][1].tolist() == theta, key
    assert trace.ended[0].tolist() == [-4.5, -45.0] and trace.ended[1].tolist() == [-9.5, -75.0]


def test_streaming_takes_after_tau_steps_and_waits_there() -> None:
    problem = constant([[1.0], [3.0]], [1.0, 1.0], steps=7, up=[0.5, 0.5], down=[2.5, 0.25])
    trace = ref.streaming_diloco(problem, 3, [slice(0, 1)], tau=2, alpha=0.25, lr=1.0, momentum=0.0)
    # Sent after 3, w = -6 at 3.5; at 0 at 6, at 1 at 3.75; taken after 5: -5 -> -5.75 and -15 -> -8.25.
    # Step 6: -6.75 and -11.25; Deltas 0.75 and 5.25, w = -9. Steps end before it is due to be taken, after 8.
    assert [trace.shared[0, v].item() for v in range(3)] == [0.0, -6.0, -9.0]
    assert trace.started[0, 5] == (4.0, vector(-4.0)) and trace.started[1, 5] == (4.0, vector(-12.0))
    assert trace.started[0, 6] == (6.0, vector(-5.75)) and trace.started[1, 6] == (5.0, vector(-8.25))
    assert trace.started[0, 7] == (7.0, vector(-6.75))
    assert trace.ended[0].item() == -7.75


def test_delayed_nesterov_by_hand() -> None:
    problem = constant([[1.0], [10.0]], [1.0, 2.5], steps=3)
    trace = ref.delayed_nesterov(problem, every=1, delay=2, c=0.25, lr=0.5, beta=0.5)
    # 1: B = 1, w -= 0.5 * 0.5. 2: B = 2, m = 1, w -= 0.5 (0.75 * 0.5 * 1 + 0.5). 2.5: B = 10, w -= 0.5 (0.125 + 5).
    # 3: B = 11, m = 6, w -= 0.5 (0.375 * 6 + 0.5). 5: B = 10, w -= 0.5 (0.125 * 6 + 5).
    # 7.5: B = 20, m = 13, w -= 0.5 (0.375 * 13 + 5).
    values = [trace.shared[0, k].item() for k in range(7)]
    assert values == [0.0, -0.25, -0.6875, -3.25, -4.625, -7.5, -12.4375]
    assert trace.started[1, 2] == (2.5, vector(-3.25))
    assert trace.started[0, 3] == (2.0, vector(-0.6875))
    assert trace.ended[0].item() == -4.625


# By hand: decoupled


def test_decoupled_by_hand() -> None:
    problem = constant([[1.0], [10.0]], [1.0, 2.5], steps=3, up=[0.25, 0.25], down=[0.25, 0.25])
    trace = ref.decoupled(problem, 1, [slice(0, 1)], quorum=1)
    # Learner 0 sends at 1 (w = -0.5 at 1.25, there at 1.5), at 2 (w = -1 at 2.25) and at 3; learner 1 at 2.5, having
    # taken both (-10 -> -10.5 -> -11): w = -6 at 2.75, there at 3.
    # 0 at 2: -2 -> -0.5 + (-2 + 1) = -1.5. 0 at 3: -2.5 -> -1 + (-2.5 + 1.5) = -2 -> -6 - 1 = -7.
    # Learner 1 at 5: -21; takes -6 (its own settled): -16, then -6.5 (the third of 0, merged at 3.25): -16.5.
    assert [trace.shared[0, v].item() for v in range(5)] == [0.0, -0.5, -1.0, -6.0, -6.5]
    assert trace.started[0, 2] == (1.0, vector(-1.0))
    assert trace.started[0, 3] == (2.0, vector(-1.5))
    assert trace.started[1, 2] == (2.5, vector(-11.0))
    assert trace.started[1, 3] == (5.0, vector(-16.5))
    assert trace.ended[0].item() == -7.0


def test_decoupled_lockstep_without_latency_order_of_events() -> None:
    """What learner 0 sends is merged before learner 1's step ends; nobody sees a merge that it caused itself."""
    trace = ref.decoupled(constant([[1.0], [10.0]], [1.0, 1.0], steps=2), 1, [slice(0, 1)], quorum=1)
    assert trace.started[0, 2] == (1.0, vector(-1.0))
    assert trace.started[1, 2] == (1.0, vector(-10.5))
    # At 2: 0 takes -0.5 and -5.5 (own first settled: -5.5 - 1) and sends; 1 then takes -5.5 and -6.
    assert trace.ended[0].item() == -6.5 and trace.ended[1].item() == -16.0


@pytest.mark.parametrize(("up", "expected"), [(0.0, 43 / 7), (0.125, 46 / 10)])
def test_decoupled_grace_tokens_over_arrived(up: float, expected: float) -> None:
    """A timer at 3 comes before an update sent at 3 with no latency, and after one that arrives at 3."""
    seconds = [1.0, 2.5] if up == 0 else [0.9375, 2.375]
    problem = constant([[1.0], [10.0]], seconds, steps=3, up=[up, up], tokens=[[1, 2, 3], [4, 4, 4]])
    # Learner 0 sends at 1, 2, 3 (or 0.9375, 1.875, 2.8125), learner 1 arrives at 2.5 with the quorum.
    grace = 0.5 if up == 0 else 3 * 0.9375 + 0.125 - 2.5
    trace = ref.decoupled(problem, 1, [slice(0, 1)], 2, grace=grace, over="arrived", weight="tokens")
    assert near(trace.shared[0, 1], -expected)


def test_decoupled_members_tokens_and_grace() -> None:
    problem = constant([[1.0], [10.0]], [1.0, 2.5], steps=3, tokens=[[1, 2, 3], [4, 4, 4]])
    trace = ref.decoupled(problem, 1, [slice(0, 1)], 2, grace=0.5, weight="tokens")
    # Latest known: 2 and 4. (1 * 1 + 2 * 1 + 4 * 10) / 6.
    assert near(trace.shared[0, 1], -43 / 6)
    # The message is there at 3 with 0's first two settled: -3 -> -43/6 + (-3 + 2).
    assert near(trace.ended[0], -43 / 6 - 1)


def test_decoupled_members_not_heard_of_count_as_the_mean() -> None:
    problem = constant([[6.0], [6.0], [6.0]], [1.0, 2.0, 9.0], steps=1, tokens=[[2], [6], [1]])
    trace = ref.decoupled(problem, 1, [slice(0, 1)], 1, weight="tokens")
    # 2 / (2 + 2 + 2); 6 / (2 + 6 + 4); 1 / (2 + 6 + 1).
    assert near(trace.shared[0, 1], -2.0)
    assert near(trace.shared[0, 2], -5.0)
    assert near(trace.shared[0, 3], -5.0 - 6 / 9)


@pytest.mark.parametrize(("over", "second"), [("members", 10 / 2 / 1.5), ("arrived", 10.0)])
def test_decoupled_discount(over: str, second: float) -> None:
    problem = constant([[1.0], [10.0]], [1.0, 1.5], steps=1, up=[0.0, 0.5], down=[9.0, 9.0])
    trace = ref.decoupled(problem, 1, [slice(0, 1)], 1, over=over, discount=0.5)  # type: ignore[arg-type]
    first = 0.5 if over == "members" else 1.0
    assert near(trace.shared[0, 1], -first)
    assert near(trace.shared[0, 2], -first - second)  # lag 1: 1 / 1.5, which "arrived" divides out again


def test_decoupled_max_lag_settles_and_forgets() -> None:
    problem = constant([[1.0], [10.0]], [1.0, 1.125], steps=3, up=[0.25, 0.25], down=[0.25, 0.25])
    trace = ref.decoupled(problem, 1, [slice(0, 1)], 1, max_lag=0)
    # 0 sends at 1, merged at 1.25: -0.5. 1 sends at 1.125 with base 0, refused at 1.375, told at 1.625.
    # 1 at 2.25: -20; takes -0.5, nothing settled: -20.5; takes the settlement: -10.5; sends 10 with base 1, and
    # starts step 3. 0 sends at 2 with base 1, merged at 2.25: -1; so 1 is refused again at 2.5.
    # 0 at 3 has taken -1 (there at 2.5), sends with base 2, merged at 3.25: -1.5.
    # 1 at 3.375: -20.5; takes -1 (at 2.5), -1 again with its second settled (at 2.75): -11; sends base 2: refused.
    assert [trace.shared[0, v].item() for v in range(4)] == [0.0, -0.5, -1.0, -1.5]
    assert (0, 4) not in trace.shared
    assert trace.started[1, 3] == (2.25, vector(-10.5))
    assert trace.ended[1].item() == -11.0


def test_decoupled_ahead_waits_at_the_boundary() -> None:
    problem = constant([[1.0], [10.0]], [1.0, 2.5], steps=3, up=[0.25, 0.25], down=[0.5, 0.5])
    trace = ref.decoupled(problem, 1, [slice(0, 1)], 2, ahead=1)
    # 0 sends at 1 and at 2, and has then two in flight: it waits. 1 arrives at 2.75: (1 + 1 + 10) / 2 = 6, at 3.25.
    assert trace.shared[0, 1].item() == -6.0
    assert trace.started[0, 2] == (1.0, vector(-1.0))
    assert trace.started[0, 3] == (3.25, vector(-6.0))
    assert trace.started[1, 2] == (2.5, vector(-10.0))
    # 1 at 5: -20 -> -6 - 10.
    assert trace.started[1, 3] == (5.0, vector(-16.0))


def test_decoupled_outer_by_hand() -> None:
    problem = constant([[2.0]], [1.0], steps=2)
    trace = ref.decoupled(problem, 1, [slice(0, 1)], 1, ahead=0, outer=(0.5, 0.5))
    # m = 2, w = -0.5 (1 + 2). m = 3, w -= 0.5 (1.5 + 2).
    assert [trace.shared[0, v].item() for v in range(3)] == [0.0, -1.5, -3.25]


@pytest.mark.parametrize("over", ["arrived", "members"])
@pytest.mark.parametrize("weight", ["equal", "tokens"])
def test_decoupled_units_by_hand(over: str, weight: str) -> None:
    """Unit 0 has tokens at learner 0 only, unit 1 at both, unit 2 nowhere (and yet its parameter moves)."""
    problem = constant(
        [[8.0, 8.0, 8.0], [16.0, 16.0, 16.0]], [1.0, 1.0], steps=2, units=[[[3, 1, 0]] * 2, [[0, 3, 0]] * 2]
    )
    parts = [slice(0, 1), slice(1, 2), slice(2, 3)]
    trace = ref.decoupled(
        problem,
        1,
        [slice(0, 3)],
        quorum=2,
        over=over,  # type: ignore[arg-type]
        weight=weight,  # type: ignore[arg-type]
        units={0: parts},
    )
    first = [-8.0, -14.0, 0.0] if weight == "tokens" else [-8.0, -12.0, 0.0]
    assert near(trace.shared[0, 1], *first)
    # Nobody had taken it when step 2 started. At its end, learner 1: unit 0: anchor 0, theta -32, takes -8: -40,
    # nothing sent. Unit 1: -32 with 16 in flight and now settled: first - 16. Unit 2: stays at -32, never sent.
    assert near(trace.started[1, 2][1], -16.0, -16.0, -16.0)
    assert near(trace.ended[1], -40.0, first[1] - 16.0, -32.0)
    # Learner 0 took it too, so its second Deltas are 8.
    assert near(trace.shared[0, 2], *(2 * value for value in first))


def test_decoupled_units_sent_later_carry_what_was_left_out() -> None:
    problem = constant([[1.0, 1.0]], [1.0], steps=3, units=[[[1, 0], [1, 0], [1, 5]]])
    trace = ref.decoupled(problem, 1, [slice(0, 2)], 1, ahead=0, units={0: [slice(0, 1), slice(1, 2)]})
    assert trace.shared[0, 2].tolist() == [-2.0, 0.0]
    assert trace.started[0, 3][1].tolist() == [-2.0, -2.0]
    assert trace.shared[0, 3].tolist() == [-3.0, -3.0]


def test_decoupled_unit_without_tokens_still_has_momentum() -> None:
    problem = constant([[1.0]], [1.0], steps=2, units=[[[1], [0]]])
    trace = ref.decoupled(problem, 1, [slice(0, 1)], 1, ahead=0, outer=(1.0, 0.5), units={0: [slice(0, 1)]})
    # m = 1, w = -1.5; m = 0.5, w -= 0.25.
    assert [trace.shared[0, v].item() for v in range(3)] == [0.0, -1.5, -1.75]


# Switches


def test_switch_bsp_asp_by_hand() -> None:
    problem = constant([[1.0], [10.0]], [1.0, 2.5], steps=3)
    problem.momentum = 0.5
    trace = ref.switch_bsp_asp(problem, at=1)
    # BSP at 2.5: v = 5.5, w = -5.5. 3.5: v = 2.75 + 0.5, w = -8.75. 4.5: v = 1.625 + 0.5, w = -10.875.
    # 5: v = 1.0625 + 5, w = -16.9375.
    assert [trace.shared[0, v].item() for v in range(5)] == [0.0, -5.5, -8.75, -10.875, -16.9375]
    assert trace.started[0, 3] == (3.5, vector(-8.75))
    assert trace.started[1, 3] == (5.0, vector(-16.9375))


def test_switch_bsp_m_sync_by_hand() -> None:
    trace = ref.switch_bsp_m_sync(constant([[1.0], [10.0]], [1.0, 2.5], steps=3), m=1, at=0.5)
    assert [trace.shared[0, v].item() for v in range(5)] == [0.0, -5.5, -6.5, -7.5, -17.5]
    assert trace.started[1, 3] == (5.0, vector(-7.5))


def test_switch_local_sgd_keeps_the_phase() -> None:
    trace = ref.switch_local_sgd(constant([[1.0], [3.0]], [1.0, 1.0], steps=9), every=4, then_every=3, at=4)
    # Merges after 4, 6, 9.
    assert [trace.shared[0, v].item() for v in range(4)] == [0.0, -8.0, -12.0, -18.0]
    assert trace.started[0, 7][1].item() == -12.0 and trace.started[0, 6][1].item() == -9.0


def test_a_switch_that_comes_late_or_changes_nothing() -> None:
    problem = noisy(momentum=0.5)
    same(ref.switch_bsp_asp(problem, at=99), ref.bsp(problem))
    same(ref.switch_bsp_asp(problem, at=problem.steps), ref.bsp(problem))
    same(ref.switch_bsp_m_sync(problem, m=3, at=4), ref.bsp(problem))
    same(ref.switch_local_sgd(problem, 3, 2, at=99), ref.local_sgd(problem, 3))
    same(ref.switch_local_sgd(problem, 3, 3, at=5), ref.local_sgd(problem, 3))


# Identities


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_ssp_zero_per_clock_is_bsp(momentum: float) -> None:
    problem = noisy(momentum=momentum)
    same(ref.ssp(problem, 0, aggregate="clock"), ref.bsp(problem))


def test_ssp_zero_per_push_is_not_bsp() -> None:
    problem = noisy(momentum=0.9)
    push, clock = ref.ssp(problem, 0), ref.bsp(problem)
    assert len(push.shared) == 1 + problem.learners * problem.steps
    assert not torch.allclose(push.ended[0], clock.ended[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_ssp_without_a_bound_is_asp(momentum: float) -> None:
    problem = noisy(momentum=momentum)
    same(ref.ssp(problem, 1000), ref.asp(problem))


@pytest.mark.parametrize("s", [0, 1, 3])
@pytest.mark.parametrize("aggregate", ["push", "clock"])
def test_ssp_never_starts_a_step_too_early(s: int, aggregate: str) -> None:
    problem = noisy(steps=20)
    trace = ref.ssp(problem, s, aggregate=aggregate)  # type: ignore[arg-type]
    for (learner, n), (time, _) in trace.started.items():
        arrived = [0] * problem.learners
        for (j, k), (begun, _) in trace.started.items():
            if begun + problem.compute(j, k) + problem.up(j) + problem.down(learner) <= time + 1e-9:
                arrived[j] = max(arrived[j], k)
        assert n - 1 - min([k for k in arrived if k < problem.steps]) <= s, (learner, n)
    assert len(trace.started) == problem.learners * problem.steps


def test_m_sync_of_all_is_bsp() -> None:
    problem = noisy(momentum=0.9)
    same(ref.m_sync(problem, 3), ref.bsp(problem))


def test_local_sgd_every_step_is_bsp() -> None:
    problem = noisy()
    same(ref.local_sgd(problem, 1), ref.bsp(problem), atol=1e-14)


@pytest.mark.parametrize("every", [1, 3])
def test_diloco_that_averages_is_local_sgd(every: int) -> None:
    problem = noisy(momentum=0.5)
    same(ref.diloco(problem, every, lr=1.0, momentum=0.0), ref.local_sgd(problem, every), atol=1e-14)


@pytest.mark.parametrize("every", [1, 3])
def test_streaming_of_one_fragment_without_delay_is_diloco(every: int) -> None:
    problem = noisy(momentum=0.5)
    streaming = ref.streaming_diloco(problem, every, WHOLE, tau=0, alpha=0.0, lr=0.7, momentum=0.9)
    same(streaming, ref.diloco(problem, every, lr=0.7, momentum=0.9))


@pytest.mark.parametrize("tau", [0, 2])
def test_streaming_that_mixes_nothing_in_is_no_communication(tau: int) -> None:
    problem = noisy(momentum=0.5)
    streaming = ref.streaming_diloco(problem, 4, PIECES, tau=tau, alpha=1.0, lr=0.7, momentum=0.9)
    alone = ref.local_sgd(problem, 10**6)
    assert streaming.started.keys() == alone.started.keys()
    for key in alone.started:
        assert torch.equal(streaming.started[key][1], alone.started[key][1]), key


def test_streaming_sends_every_fragment_once_a_period() -> None:
    problem = noisy(steps=12)
    trace = ref.streaming_diloco(problem, 6, PIECES, tau=1, alpha=0.5, lr=0.7, momentum=0.9)
    assert {p: max(v for q, v in trace.shared if q == p) for p in range(3)} == {0: 2, 1: 2, 2: 2}
    due = {n: [p for p in range(3) if ref.is_due(n, p, 3, 6)] for n in range(13)}
    assert due == {n: [] for n in range(13)} | {2: [1], 4: [2], 6: [0], 8: [1], 10: [2], 12: [0]}


def test_delayed_nesterov_of_one_is_nesterov() -> None:
    problem = noisy(learners=1)
    trace = ref.delayed_nesterov(problem, 3, delay=1, c=0.0, lr=0.7, beta=0.9)
    same(trace, ref.diloco(problem, 3, lr=0.7, momentum=0.9), atol=1e-14)


def test_delayed_nesterov_without_momentum_adds_parts() -> None:
    problem = noisy(flat=True, steps=12)
    trace = ref.delayed_nesterov(problem, 3, delay=3, c=0.0, lr=1.0, beta=0.0)
    assert torch.allclose(trace.shared[0, 12], everything(problem), rtol=0, atol=1e-13)


@pytest.mark.parametrize("over", ["arrived", "members"])
@pytest.mark.parametrize("every", [1, 3])
def test_decoupled_of_all_and_never_ahead_is_local_sgd(over: str, every: int) -> None:
    """With ahead = 0 a learner waits for the merge of what it sent, so any times will do."""
    problem = noisy(momentum=0.5)
    trace = ref.decoupled(problem, every, WHOLE, quorum=3, over=over, ahead=0)  # type: ignore[arg-type]
    local = ref.local_sgd(problem, every)
    if every == 1:  # It is due at the end, where decoupled does not wait.
        local.ended = trace.ended
    same(trace, local, atol=1e-14)


def test_decoupled_of_all_and_never_ahead_with_outer_is_diloco() -> None:
    problem = noisy(momentum=0.5)
    trace = ref.decoupled(problem, 3, WHOLE, quorum=3, over="arrived", ahead=0, outer=(0.7, 0.9))
    same(trace, ref.diloco(problem, 3, lr=0.7, momentum=0.9), atol=1e-14)


def test_decoupled_of_all_in_fragments_and_never_ahead_is_streaming_without_delay() -> None:
    problem = noisy(momentum=0.5)
    trace = ref.decoupled(problem, 4, PIECES, quorum=3, ahead=0, outer=(0.7, 0.9))
    streaming = ref.streaming_diloco(problem, 4, PIECES, tau=0, alpha=0.0, lr=0.7, momentum=0.9)
    streaming.ended = trace.ended
    same(trace, streaming, atol=1e-13)


def test_decoupled_in_lockstep_is_local_sgd_one_boundary_late() -> None:
    """Quorum of all, no latency, equal times: everybody takes at the next boundary what was merged at the last one.

    The last learner's end of step sends the update that completes the quorum, when all boundaries of that time have
    begun; so nobody takes it there, and everybody at the next boundary, before sending again.
    """
    problem = noisy(momentum=0.5)
    problem.compute = lambda learner, n: 1.0
    problem.up = problem.down = ref.no_latency
    for every in (1, 3):
        trace = ref.decoupled(problem, every, WHOLE, quorum=3, over="arrived")
        w = problem.initial
        theta = [w.clone() for _ in range(3)]
        anchor = [w.clone() for _ in range(3)]
        v = [torch.zeros_like(w) for _ in range(3)]
        late, merges = None, 0
        for n in range(1, problem.steps + 1):
            for learner in range(3):
                time, start = trace.started[learner, n]
                assert time == n - 1 and torch.allclose(start, theta[learner], rtol=0, atol=1e-13), (learner, n)
                v[learner] = 0.5 * v[learner] + problem.gradient(learner, n, theta[learner])
                theta[learner] = theta[learner] - 0.2 * v[learner]
                if late is not None:
                    theta[learner] = late + (theta[learner] - anchor[learner])
                    anchor[learner] = late
            late = None
            if n % every == 0:
                w = w - sum(anchor[learner] - theta[learner] for learner in range(3)) / 3
                anchor = [value.clone() for value in theta]
                late = w
                merges += 1
                assert torch.allclose(trace.shared[0, merges], w, rtol=0, atol=1e-13)


def test_decoupled_of_one_member_of_the_quorum_and_no_momentum_is_delayed_nesterov_alone() -> None:
    problem = noisy(learners=1, steps=14)
    trace = ref.decoupled(problem, 3, WHOLE, quorum=1, ahead=0)
    same(trace, ref.delayed_nesterov(problem, 3, delay=1, c=0.0, lr=1.0, beta=0.0), atol=1e-14)


def everything(problem: Problem) -> Tensor:
    """Initial parameters and a 1/N share of all steps of all learners, for flat problems without momentum."""
    w = problem.initial
    for learner in range(problem.learners):
        for n in range(1, problem.steps + 1):
            w = w - problem.lr * problem.gradient(learner, n, w) / problem.learners
    return w


@pytest.mark.parametrize(("quorum", "grace", "ahead"), [(1, 0.0, None), (2, 0.7, None), (2, 0.7, 1), (1, 3.0, None)])
def test_decoupled_loses_nothing(quorum: int, grace: float, ahead: int | None) -> None:
    """Equal weights over members: after the last merge a third of every step that was merged is in w, once."""
    problem = noisy(flat=True, steps=12)
    trace = ref.decoupled(problem, 3, WHOLE, quorum, grace=grace, ahead=ahead)
    last = max(v for _, v in trace.shared)
    if quorum == 1:
        assert torch.allclose(trace.shared[0, last], everything(problem), rtol=0, atol=1e-13)
    rounds = [
        [sum(problem.gradient(j, 3 * k + i, problem.initial) for i in (1, 2, 3)) for k in range(4)] for j in range(3)
    ]
    for version in range(last + 1):
        candidates = []
        for a in range(5):
            for b in range(5):
                for c in range(5):
                    total = sum(rounds[0][:a]) + sum(rounds[1][:b]) + sum(rounds[2][:c])
                    candidates.append(problem.initial - problem.lr * total / 3)
        value = trace.shared[0, version]
        assert any(torch.allclose(value, one, rtol=0, atol=1e-13) for one in candidates), version


@pytest.mark.parametrize("over", ["arrived", "members"])
def test_decoupled_with_units_that_all_have_equal_tokens_is_without(over: str) -> None:
    problem = noisy(momentum=0.5)
    settings = {"quorum": 2, "grace": 0.7, "over": over, "weight": "tokens", "discount": 0.3, "outer": (0.7, 0.5)}
    plain = ref.decoupled(problem, 4, PIECES, **settings)  # type: ignore[arg-type]
    problem.unit_tokens = lambda learner, n: [problem.tokens(learner, n)] * 3
    units = {0: [slice(0, 1), slice(1, 2)], 2: [slice(3, 5)]}
    same(ref.decoupled(problem, 4, PIECES, units=units, **settings), plain, atol=1e-14)  # type: ignore[arg-type]


def test_decoupled_max_lag_that_is_never_reached_changes_nothing() -> None:
    problem = noisy(momentum=0.5)
    same(ref.decoupled(problem, 2, PIECES, 2, max_lag=99, ahead=99), ref.decoupled(problem, 2, PIECES, 2))


def test_runs_repeat() -> None:
    problem = noisy(momentum=0.5)
    run = lambda: ref.decoupled(problem, 2, PIECES, 2, grace=0.5, weight="tokens", max_lag=1, ahead=1)  # noqa: E731
    same(run(), run())
