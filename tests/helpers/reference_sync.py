"""Slow twins of the synchronisation policies, one plain loop for each. Imports nothing from the package.

Nothing here is shared between policies but the helpers at the top: the arithmetic of SGD, Nesterov and a mean, the rule
that says when a fragment is due, and the constants that order events. A loop that looks like another one is a
copy, on purpose.

What SPEC.md leaves open, and how it is read here (the same numbers as in the report):

Time
 1. A queue hands out the earliest event there is *now*, by (time, class, tie rule). A message with zero latency is an
    event that does not exist until its sender's event was handled, so it comes after everything of an earlier class
    that was in the queue before, and before everything of its own or a later class that was not handled yet. Example:
    at time t a message of learner 1 (up > 0) and the end of a step of learner 0 (up = 0): 1 arrives first, then 0.
    A timer at t comes before the arrival that the end of a step at the same t causes with up = 0.
 2. Ties which the spec does not order: timers by fragment; arrivals at learners by learner, then in the order
    sent; ends of steps by learner; same learner and fragment at the syncer: in the order sent.
 3. A boundary is handled as a whole, in one go: takes, sends, start of the next step (all at the time of the end of
    the step). So a merge that a learner's own zero-latency send causes is not taken at that boundary.
 4. Times are added up left to right: start + compute = end; end + up = arrival; arrival + down = start.

Ends
 5. ``ended`` holds learners that finished all ``steps`` only. With a policy that waits for a reply it is the reply,
    when there is one; else the parameters after the last step (a gradient policy: the copy as it was).
 6. ``m_sync``: when fewer than m learners are left the syncer waits for ever; the run just ends. The others have
    fewer entries in ``started`` then.
 7. ``ssp``: the reply after a learner's last step is held by the same rule as every other (this matters to
    ``ended`` only; with it s = 0 per clock equals BSP there too).
 8. ``decoupled``: a learner does not wait at its last boundary, whatever ``ahead`` says (there is no step to start),
    and takes nothing after it. The syncer goes on sending to it; a quorum may stay open for ever.

Gradient policies
 9. A discarded gradient's step counts as done (n goes on) and is not repeated.
10. ``m_sync`` divides by m; ``asp`` and ``ssp`` with "push" multiply by (1 / N), N all learners, ended ones too.

Delta policies
11. ``streaming_diloco`` with tau = 0 and several fragments due at once: all are sent, then all waited for and taken.
12. At a streaming boundary the learner waits for all results due there, then takes them, then sends at that later time.
13. ``delayed_nesterov``: the momentum in the formula for w is the new one when k mod N_d == 0, as in the paper.

Decoupled
14. A message with the version already taken is taken (only a lower version is ignored): settlements need it.
15. When a waiting learner gets several messages at the same time they are handled one after another, and the learner
    starts as soon as it may; what arrives after that, though at the same time, is taken at the next boundary.
16. ``grace`` <= 0 merges while the K-th arrival is handled: another arrival at the same time is not in it.
17. "Latest known t" is kept per fragment, and a discarded update (``max_lag``) counts as heard of.
18. The lag that ``discount`` uses is that at the merge; the lag that ``max_lag`` uses is that on arrival.
19. A denominator of zero gives D = 0 (for units, as in the spec; for a plain fragment with no tokens at all too).
20. Taking: w - (d1 + d2 + ...), the remaining in-flight Deltas summed first, oldest first.

Units
21. Units are an argument of ``decoupled`` only: ``units[p]`` are the slices (of theta, not of the fragment) that
    make up fragment p. ``Problem.unit_tokens`` counts the units of all such fragments in fragment order, in one list.
22. Weight "equal" with units: t = 1 for a unit that has tokens in the update, 0 for one that has none.
23. An update all of whose units have zero tokens is sent all the same: it counts for the quorum and ``ahead``.
24. A learner not heard of yet counts, per unit, as the mean over the learners heard of, zeros included.
25. "Its w stays" when no update has tokens for a unit is D = 0: with outer Nesterov momentum still moves it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

AT_SYNCER, TIMER, AT_LEARNER, STEP_END = 0, 1, 2, 3
"""Classes of events, in the order in which they are handled at equal times."""


def one_token(learner: int, n: int) -> int:
    """Every step has one token."""
    return 1


def no_units(learner: int, n: int) -> list[int]:
    """There are no units."""
    return []


def no_latency(learner: int) -> float:
    """Messages arrive when they are sent."""
    return 0.0


@dataclass
class Problem:
    """What to train, and how long everything takes. ``lr`` and ``momentum`` are those of SGD, wherever it is."""

    learners: int
    steps: int
    initial: Tensor
    gradient: Callable[[int, int, Tensor], Tensor]
    compute: Callable[[int, int], float]
    up: Callable[[int], float] = no_latency
    down: Callable[[int], float] = no_latency
    lr: float = 0.1
    momentum: float = 0.0
    tokens: Callable[[int, int], int] = one_token
    unit_tokens: Callable[[int, int], list[int]] = no_units


@dataclass
class Trace:
    """What is compared.

    ``started[learner, n]`` is when, and with which parameters, the learner started step n; ``shared[fragment,
    version]`` the value after that many merges; ``ended[learner]`` the parameters after everything.
    """

    started: dict[tuple[int, int], tuple[float, Tensor]] = field(default_factory=dict)
    shared: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    ended: dict[int, Tensor] = field(default_factory=dict)


def sgd(theta: Tensor, v: Tensor, g: Tensor, lr: float, momentum: float) -> tuple[Tensor, Tensor]:
    """v <- mu v + g; theta <- theta - lr v."""
    v = momentum * v + g
    return theta - lr * v, v


def nesterov(w: Tensor, m: Tensor, d: Tensor, lr: float, momentum: float) -> tuple[Tensor, Tensor]:
    """m <- mu m + D; w <- w - lr (mu m + D)."""
    m = momentum * m + d
    return w - lr * (momentum * m + d), m


def mean(values: Sequence[Tensor]) -> Tensor:
    """Their sum, from the first to the last, divided by their number."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total / len(values)


def is_due(n: int, p: int, fragments: int, every: int) -> bool:
    """Whether fragment ``p`` is sent after step ``n``."""
    return n >= 1 and (n - (p * every) // fragments) % every == 0


# Gradient policies


def bsp(problem: Problem) -> Trace:
    """Everybody waits for everybody, every step."""
    trace = Trace()
    w = problem.initial.clone()
    v = torch.zeros_like(w)
    trace.shared[0, 0] = w.clone()
    clock = [0.0] * problem.learners
    for n in range(1, problem.steps + 1):
        gradients = []
        arrivals = []
        for learner in range(problem.learners):
            trace.started[learner, n] = (clock[learner], w.clone())
            gradients.append(problem.gradient(learner, n, w.clone()))
            arrivals.append(clock[learner] + problem.compute(learner, n) + problem.up(learner))
        w, v = sgd(w, v, mean(gradients), problem.lr, problem.momentum)
        trace.shared[0, n] = w.clone()
        clock = [max(arrivals) + problem.down(learner) for learner in range(problem.learners)]
    for learner in range(problem.learners):
        trace.ended[learner] = w.clone()
    return trace


def m_sync(problem: Problem, m: int) -> Trace:
    """The first ``m`` gradients computed at the current version; later ones are thrown away."""
    trace = Trace()
    w = problem.initial.clone()
    v = torch.zeros_like(w)
    version = 0
    kept: dict[int, Tensor] = {}
    trace.shared[0, 0] = w.clone()
    copy = [w.clone() for _ in range(problem.learners)]
    base = [0] * problem.learners
    step = [1] * problem.learners
    events: list[tuple[Any, ...]] = []
    order = 0
    for learner in range(problem.learners):
        trace.started[learner, 1] = (0.0, w.clone())
        heapq.heappush(events, (0.0 + problem.compute(learner, 1), STEP_END, learner, order, None))
        order += 1
    while events:
        now, kind, learner, _, content = heapq.heappop(events)
        if kind == STEP_END:
            g = problem.gradient(learner, step[learner], copy[learner].clone())
            if step[learner] == problem.steps:
                trace.ended[learner] = copy[learner].clone()
            heapq.heappush(events, (now + problem.up(learner), AT_SYNCER, learner, order, (g, base[learner])))
            order += 1
        elif kind == AT_SYNCER:
            g, base_version = content
            replies = []
            if base_version != version:
                replies = [learner]
            else:
                kept[learner] = g
                if len(kept) == m:
                    replies = sorted(kept)
                    w, v = sgd(w, v, mean([kept[sender] for sender in replies]), problem.lr, problem.momentum)
                    version += 1
                    trace.shared[0, version] = w.clone()
                    kept = {}
            for to in replies:
                heapq.heappush(events, (now + problem.down(to), AT_LEARNER, to, order, (w.clone(), version)))
                order += 1
        else:
            copy[learner], base[learner] = content
            if step[learner] == problem.steps:
                trace.ended[learner] = copy[learner].clone()
            else:
                step[learner] += 1
                trace.started[learner, step[learner]] = (now, copy[learner].clone())
                end = now + problem.compute(learner, step[learner])
                heapq.heappush(events, (end, STEP_END, learner, order, None))
                order += 1
    return trace


def asp(problem: Problem) -> Trace:
    """Every gradient is applied when it arrives."""
    trace = Trace()
    w = problem.initial.clone()
    v = torch.zeros_like(w)
    version = 0
    trace.shared[0, 0] = w.clone()
    copy = [w.clone() for _ in range(problem.learners)]
    step = [1] * problem.learners
    events: list[tuple[Any, ...]] = []
    order = 0
    for learner in range(problem.learners):
        trace.started[learner, 1] = (0.0, w.clone())
        heapq.heappush(events, (0.0 + problem.compute(learner, 1), STEP_END, learner, order, None))
        order += 1
    while events:
        now, kind, learner, _, content = heapq.heappop(events)
        if kind == STEP_END:
            g = problem.gradient(learner, step[learner], copy[learner].clone())
            heapq.heappush(events, (now + problem.up(learner), AT_SYNCER, learner, order, g))
        elif kind == AT_SYNCER:
            w, v = sgd(w, v, content * (1 / problem.learners), problem.lr, problem.momentum)
            version += 1
            trace.shared[0, version] = w.clone()
            heapq.heappush(events, (now + problem.down(learner), AT_LEARNER, learner, order, w.clone()))
        else:
            copy[learner] = content
            if step[learner] == problem.steps:
                trace.ended[learner] = copy[learner].clone()
            else:
                step[learner] += 1
                trace.started[learner, step[learner]] = (now, copy[learner].clone())
                end = now + problem.compute(learner, step[learner])
                heapq.heappush(events, (end, STEP_END, learner, order, None))
        order += 1
    return trace


def ssp(problem: Problem, s: int, aggregate: Literal["push", "clock"] = "push") -> Trace:
    """Nobody starts a step more than ``s`` steps ahead of the slowest."""
    trace = Trace()
    w = problem.initial.clone()
    v = torch.zeros_like(w)
    version = 0
    finished = [0] * problem.learners
    held: set[int] = set()
    kept: dict[int, dict[int, Tensor]] = {n: {} for n in range(1, problem.steps + 1)}
    oldest = 1
    trace.shared[0, 0] = w.clone()
    copy = [w.clone() for _ in range(problem.learners)]
    step = [1] * problem.learners
    events: list[tuple[Any, ...]] = []
    order = 0
    for learner in range(problem.learners):
        trace.started[learner, 1] = (0.0, w.clone())
        heapq.heappush(events, (0.0 + problem.compute(learner, 1), STEP_END, learner, order, None))
        order += 1
    while events:
        now, kind, learner, _, content = heapq.heappop(events)
        if kind == STEP_END:
            g = problem.gradient(learner, step[learner], copy[learner].clone())
            heapq.heappush(events, (now + problem.up(learner), AT_SYNCER, learner, order, (g, step[learner])))
            order += 1
        elif kind == AT_SYNCER:
            g, n = content
            finished[learner] = n
            if aggregate == "push":
                w, v = sgd(w, v, g * (1 / problem.learners), problem.lr, problem.momentum)
                version += 1
                trace.shared[0, version] = w.clone()
            else:
                kept[n][learner] = g
                while oldest <= problem.steps and len(kept[oldest]) == problem.learners:
                    in_order = [kept[oldest][sender] for sender in range(problem.learners)]
                    w, v = sgd(w, v, mean(in_order), problem.lr, problem.momentum)
                    version += 1
                    trace.shared[0, version] = w.clone()
                    oldest += 1
            held.add(learner)
            running = [done for done in finished if done < problem.steps]
            for to in sorted(held):
                if not running or finished[to] - min(running) <= s:
                    held.remove(to)
                    heapq.heappush(events, (now + problem.down(to), AT_LEARNER, to, order, w.clone()))
                    order += 1
        else:
            copy[learner] = content
            if step[learner] == problem.steps:
                trace.ended[learner] = copy[learner].clone()
            else:
                step[learner] += 1
                trace.started[learner, step[learner]] = (now, copy[learner].clone())
                end = now + problem.compute(learner, step[learner])
                heapq.heappush(events, (end, STEP_END, learner, order, None))
                order += 1
    return trace


# Delta policies


def local_sgd(problem: Problem, every: int) -> Trace:
    """The mean of the parameters, every ``every`` steps."""
    trace = Trace()
    w = problem.initial.clone()
    version = 0
    trace.shared[0, 0] = w.clone()
    theta = [w.clone() for _ in range(problem.learners)]
    v = [torch.zeros_like(w) for _ in range(problem.learners)]
    clock = [0.0] * problem.learners
    for n in range(1, problem.steps + 1):
        for learner in range(problem.learners):
            trace.started[learner, n] = (clock[learner], theta[learner].clone())
            g = problem.gradient(learner, n, theta[learner].clone())
            theta[learner], v[learner] = sgd(theta[learner], v[learner], g, problem.lr, problem.momentum)
            clock[learner] = clock[learner] + problem.compute(learner, n)
        if n % every == 0:
            together = max(clock[learner] + problem.up(learner) for learner in range(problem.learners))
            w = w - mean([w - theta[learner] for learner in range(problem.learners)])
            version += 1
            trace.shared[0, version] = w.clone()
            for learner in range(problem.learners):
                theta[learner] = w.clone()
                clock[learner] = together + problem.down(learner)
    for learner in range(problem.learners):
        trace.ended[learner] = theta[learner].clone()
    return trace


def diloco(problem: Problem, every: int, lr: float, momentum: float) -> Trace:
    """Local SGD with Nesterov on the mean Delta."""
    trace = Trace()
    w = problem.initial.clone()
    m = torch.zeros_like(w)
    version = 0
    trace.shared[0, 0] = w.clone()
    theta = [w.clone() for _ in range(problem.learners)]
    v = [torch.zeros_like(w) for _ in range(problem.learners)]
    clock = [0.0] * problem.learners
    for n in range(1, problem.steps + 1):
        for learner in range(problem.learners):
            trace.started[learner, n] = (clock[learner], theta[learner].clone())
            g = problem.gradient(learner, n, theta[learner].clone())
            theta[learner], v[learner] = sgd(theta[learner], v[learner], g, problem.lr, problem.momentum)
            clock[learner] = clock[learner] + problem.compute(learner, n)
        if n % every == 0:
            together = max(clock[learner] + problem.up(learner) for learner in range(problem.learners))
            d = mean([w - theta[learner] for learner in range(problem.learners)])
            w, m = nesterov(w, m, d, lr, momentum)
            version += 1
            trace.shared[0, version] = w.clone()
            for learner in range(problem.learners):
                theta[learner] = w.clone()
                clock[learner] = together + problem.down(learner)
    for learner in range(problem.learners):
        trace.ended[learner] = theta[learner].clone()
    return trace


def streaming_diloco(
    problem: Problem,
    every: int,
    fragments: Sequence[slice],
    tau: int,
    alpha: float,
    lr: float,
    momentum: float,
) -> Trace:
    """One fragment at a time; its result is taken ``tau`` steps after it was sent, and mixed with what is there."""
    if not 0 <= tau < every:
        raise ValueError("tau must be in 0..every-1")
    trace = Trace()
    members = range(problem.learners)
    w = problem.initial.clone()
    m = torch.zeros_like(w)
    version = [0] * len(fragments)
    merged_at = [0.0] * len(fragments)
    for p, piece in enumerate(fragments):
        trace.shared[p, 0] = w[piece].clone()
    theta = [w.clone() for _ in members]
    anchor = [w.clone() for _ in members]
    v = [torch.zeros_like(w) for _ in members]
    clock = [0.0] * problem.learners
    for n in range(1, problem.steps + 1):
        for learner in members:
            trace.started[learner, n] = (clock[learner], theta[learner].clone())
            g = problem.gradient(learner, n, theta[learner].clone())
            theta[learner], v[learner] = sgd(theta[learner], v[learner], g, problem.lr, problem.momentum)
            clock[learner] = clock[learner] + problem.compute(learner, n)
        sent_now = [p for p in range(len(fragments)) if is_due(n, p, len(fragments), every)]
        if tau > 0:
            for p in [p for p in range(len(fragments)) if is_due(n - tau, p, len(fragments), every)]:
                piece = fragments[p]
                for learner in members:
                    clock[learner] = max(clock[learner], merged_at[p] + problem.down(learner))
                    theta[learner][piece] = alpha * theta[learner][piece] + (1 - alpha) * w[piece]
                    anchor[learner][piece] = w[piece]
        for p in sent_now:
            piece = fragments[p]
            merged_at[p] = max(clock[learner] + problem.up(learner) for learner in members)
            d = mean([anchor[learner][piece] - theta[learner][piece] for learner in members])
            w[piece], m[piece] = nesterov(w[piece], m[piece], d, lr, momentum)
            version[p] += 1
            trace.shared[p, version[p]] = w[piece].clone()
        if tau == 0:
            for p in sent_now:
                piece = fragments[p]
                for learner in members:
                    clock[learner] = max(clock[learner], merged_at[p] + problem.down(learner))
                    theta[learner][piece] = alpha * theta[learner][piece] + (1 - alpha) * w[piece]
                    anchor[learner][piece] = w[piece]
    for learner in members:
        trace.ended[learner] = theta[learner].clone()
    return trace


def delayed_nesterov(problem: Problem, every: int, delay: int, c: float, lr: float, beta: float) -> Trace:
    """Every Delta is applied when it arrives; the momentum is renewed at every ``delay``-th arrival."""
    trace = Trace()
    w = problem.initial.clone()
    m = torch.zeros_like(w)
    b = torch.zeros_like(w)
    k = 0
    trace.shared[0, 0] = w.clone()
    theta = [w.clone() for _ in range(problem.learners)]
    anchor = [w.clone() for _ in range(problem.learners)]
    v = [torch.zeros_like(w) for _ in range(problem.learners)]
    step = [1] * problem.learners
    events: list[tuple[Any, ...]] = []
    order = 0
    for learner in range(problem.learners):
        trace.started[learner, 1] = (0.0, w.clone())
        heapq.heappush(events, (0.0 + problem.compute(learner, 1), STEP_END, learner, order, None))
        order += 1
    while events:
        now, kind, learner, _, content = heapq.heappop(events)
        goes_on = False
        if kind == STEP_END:
            g = problem.gradient(learner, step[learner], theta[learner].clone())
            theta[learner], v[learner] = sgd(theta[learner], v[learner], g, problem.lr, problem.momentum)
            if step[learner] % every == 0:
                delta = anchor[learner] - theta[learner]
                heapq.heappush(events, (now + problem.up(learner), AT_SYNCER, learner, order, delta))
            else:
                goes_on = True
        elif kind == AT_SYNCER:
            delta = content
            b = b + delta
            k += 1
            if k % delay != 0:
                w = w - lr * (c * beta * m + delta / delay)
            else:
                m = beta * m + b / delay
                w = w - lr * ((1 - c * delay + c) * beta * m + delta / delay)
                b = torch.zeros_like(w)
            trace.shared[0, k] = w.clone()
            heapq.heappush(events, (now + problem.down(learner), AT_LEARNER, learner, order, w.clone()))
        else:
            theta[learner] = content
            anchor[learner] = content
            goes_on = True
        if goes_on and step[learner] < problem.steps:
            step[learner] += 1
            trace.started[learner, step[learner]] = (now, theta[learner].clone())
            end = now + problem.compute(learner, step[learner])
            heapq.heappush(events, (end, STEP_END, learner, order, None))
        elif goes_on:
            trace.ended[learner] = theta[learner].clone()
        order += 1
    return trace


@dataclass
class Update:
    """A Delta on its way to the syncer. Vectors are as long as theta, and zero outside the fragment.

    ``t`` has one number per part (a unit, or the whole fragment): what its weight is proportional to.
    """

    learner: int
    fragment: int
    sequence: int
    base_version: int
    t: list[float]
    delta: Tensor


@dataclass
class Message:
    """A shared fragment on its way to a learner; ``settled`` is the last sequence number of that learner in it."""

    fragment: int
    version: int
    value: Tensor
    settled: int


def decoupled(
    problem: Problem,
    every: int,
    fragments: Sequence[slice],
    quorum: int,
    grace: float = 0.0,
    over: Literal["members", "arrived"] = "members",
    weight: Literal["equal", "tokens"] = "equal",
    discount: float = 0.0,
    max_lag: int | None = None,
    ahead: int | None = None,
    outer: tuple[float, float] | None = None,
    units: Mapping[int, Sequence[slice]] | None = None,
) -> Trace:
    """Learners go on; the syncer merges what arrived once ``quorum`` learners were heard. ``outer``: (lr, momentum)."""
    units = units or {}
    number = len(fragments)
    members = range(problem.learners)
    parts = [list(units[p]) if p in units else [fragments[p]] for p in range(number)]
    trace = Trace()
    events: list[tuple[Any, ...]] = []
    order = 0

    # The syncer.
    w = problem.initial.clone()
    m = torch.zeros_like(w)
    version = [0] * number
    kept: list[list[Update]] = [[] for _ in range(number)]
    timer_runs = [False] * number
    known: list[dict[int, list[float]]] = [{} for _ in range(number)]
    settled = [[-1 for _ in members] for _ in range(number)]
    for p in range(number):
        trace.shared[p, 0] = w[fragments[p]].clone()

    # The learners.
    theta = [w.clone() for _ in members]
    anchor = [w.clone() for _ in members]
    v = [torch.zeros_like(w) for _ in members]
    step = [1 for _ in members]
    taken = [[0] * number for _ in members]
    in_flight: list[list[list[tuple[int, Tensor]]]] = [[[] for _ in range(number)] for _ in members]
    sends = [[0] * number for _ in members]
    counts = [[[0] * len(parts[p]) for p in range(number)] for _ in members]
    inbox: list[list[Message]] = [[] for _ in members]
    waits = [False for _ in members]

    def push(time: float, kind: int, first: int, second: int, content: Any) -> None:
        """Put an event in the queue; ``first`` and ``second`` order those of one class at equal times."""
        nonlocal order
        heapq.heappush(events, (time, kind, first, second, order, content))
        order += 1

    def tell(now: float, learner: int, p: int) -> None:
        """Send the fragment as it is now to a learner."""
        message = Message(p, version[p], w[fragments[p]].clone(), settled[p][learner])
        push(now + problem.down(learner), AT_LEARNER, learner, 0, message)

    def merge(now: float, p: int) -> None:
        """Merge everything kept of a fragment and tell everybody."""
        updates = sorted(kept[p], key=lambda update: (update.learner, update.sequence))
        kept[p] = []
        factors = [1 / (1 + discount * (version[p] - update.base_version)) for update in updates]
        d = torch.zeros_like(w)
        for u, part in enumerate(parts[p]):
            total = 0.0
            if over == "arrived":
                for update, factor in zip(updates, factors, strict=True):
                    total += update.t[u] * factor
            else:
                heard = [known[p][learner][u] for learner in members if learner in known[p]]
                for learner in members:
                    total += known[p][learner][u] if learner in known[p] else sum(heard) / len(heard)
            if total > 0:
                for update, factor in zip(updates, factors, strict=True):
                    d[part] = d[part] + update.t[u] * factor / total * update.delta[part]
        piece = fragments[p]
        if outer is None:
            w[piece] = w[piece] - d[piece]
        else:
            w[piece], m[piece] = nesterov(w[piece], m[piece], d[piece], outer[0], outer[1])
        version[p] += 1
        trace.shared[p, version[p]] = w[piece].clone()
        for update in updates:
            settled[p][update.learner] = max(settled[p][update.learner], update.sequence)
        for learner in members:
            tell(now, learner, p)

    def take(learner: int, message: Message) -> None:
        """Put a shared fragment in place, and what is not in it yet back on top."""
        p, piece = message.fragment, fragments[message.fragment]
        if message.version < taken[learner][p]:
            return
        in_flight[learner][p] = [sent for sent in in_flight[learner][p] if sent[0] > message.settled]
        not_in_it = torch.zeros_like(message.value)
        for _, delta in in_flight[learner][p]:
            not_in_it = not_in_it + delta[piece]
        new_anchor = message.value - not_in_it
        theta[learner][piece] = new_anchor + (theta[learner][piece] - anchor[learner][piece])
        anchor[learner][piece] = new_anchor
        taken[learner][p] = message.version

    def send(now: float, learner: int, p: int) -> None:
        """Send what was learnt since the last time, without the units that saw no tokens."""
        delta = torch.zeros_like(w)
        t = []
        for u, part in enumerate(parts[p]):
            count = counts[learner][p][u]
            if p in units and count == 0:
                t.append(0.0)
                continue
            t.append(float(count) if weight == "tokens" else 1.0)
            delta[part] = anchor[learner][part] - theta[learner][part]
            anchor[learner][part] = theta[learner][part]
        update = Update(learner, p, sends[learner][p], taken[learner][p], t, delta)
        in_flight[learner][p].append((update.sequence, delta))
        sends[learner][p] += 1
        counts[learner][p] = [0] * len(parts[p])
        push(now + problem.up(learner), AT_SYNCER, learner, p, update)

    def go(now: float, learner: int) -> None:
        """Start the next step, or wait when too much is in flight."""
        waits[learner] = ahead is not None and any(len(sent) > ahead for sent in in_flight[learner])
        if not waits[learner]:
            step[learner] += 1
            trace.started[learner, step[learner]] = (now, theta[learner].clone())
            push(now + problem.compute(learner, step[learner]), STEP_END, learner, 0, None)

    for learner in members:
        trace.started[learner, 1] = (0.0, theta[learner].clone())
        push(0.0 + problem.compute(learner, 1), STEP_END, learner, 0, None)
    while events:
        now, kind, first, _, _, content = heapq.heappop(events)
        if kind == AT_SYNCER:
            update, p = content, content.fragment
            known[p][update.learner] = update.t
            if max_lag is not None and version[p] - update.base_version > max_lag:
                settled[p][update.learner] = max(settled[p][update.learner], update.sequence)
                tell(now, update.learner, p)
                continue
            kept[p].append(update)
            if len({update.learner for update in kept[p]}) >= quorum and not timer_runs[p]:
                if grace <= 0:
                    merge(now, p)
                else:
                    timer_runs[p] = True
                    push(now + grace, TIMER, p, 0, None)
        elif kind == TIMER:
            timer_runs[first] = False
            merge(now, first)
        elif kind == AT_LEARNER:
            if waits[first]:
                take(first, content)
                go(now, first)
            else:
                inbox[first].append(content)
        else:
            learner, n = first, step[first]
            g = problem.gradient(learner, n, theta[learner].clone())
            theta[learner], v[learner] = sgd(theta[learner], v[learner], g, problem.lr, problem.momentum)
            of_units = iter(problem.unit_tokens(learner, n))
            for p in range(number):
                for u in range(len(parts[p])):
                    counts[learner][p][u] += next(of_units) if p in units else problem.tokens(learner, n)
            for message in inbox[learner]:
                take(learner, message)
            inbox[learner] = []
            for p in range(number):
                if is_due(n, p, number, every):
                    send(now, learner, p)
            if n == problem.steps:
                trace.ended[learner] = theta[learner].clone()
            else:
                go(now, learner)
    return trace


# Switches


def switch_bsp_asp(problem: Problem, at: float) -> Trace:
    """BSP up to the first update after which ``at`` steps per learner are done, ASP from then on."""
    trace = Trace()
    w = problem.initial.clone()
    v = torch.zeros_like(w)
    version = 0
    trace.shared[0, 0] = w.clone()
    clock = [0.0] * problem.learners
    done = 0
    while done < problem.steps:
        done += 1
        gradients = []
        arrivals = []
        for learner in range(problem.learners):
            trace.started[learner, done] = (clock[learner], w.clone())
            gradients.append(problem.gradient(learner, done, w.clone()))
            arrivals.append(clock[learner] + problem.compute(learner, done) + problem.up(learner))
        w, v = sgd(w, v, mean(gradients), problem.lr, problem.momentum)
        version += 1
        trace.shared[0, version] = w.clone()
        clock = [max(arrivals) + problem.down(learner) for learner in range(problem.learners)]
        if done >= at:
            break
    copy = [w.clone() for _ in range(problem.learners)]
    if done == problem.steps:
        trace.ended = dict(enumerate(copy))
        return trace
    step = [done + 1] * problem.learners
    events: list[tuple[Any, ...]] = []
    order = 0
    for learner in range(problem.learners):
        trace.started[learner, done + 1] = (clock[learner], w.clone())
        heapq.heappush(events, (clock[learner] + problem.compute(learner, done + 1), STEP_END, learner, order, None))
        order += 1
    while events:
        now, kind, learner, _, content = heapq.heappop(events)
        if kind == STEP_END:
            g = problem.gradient(learner, step[learner], copy[learner].clone())
            heapq.heappush(events, (now + problem.up(learner), AT_SYNCER, learner, order, g))
        elif kind == AT_SYNCER:
            w, v = sgd(w, v, content * (1 / problem.learners), problem.lr, problem.momentum)
            version += 1
            trace.shared[0, version] = w.clone()
            heapq.heappush(events, (now + problem.down(learner), AT_LEARNER, learner, order, w.clone()))
        else:
            copy[learner] = content
            if step[learner] == problem.steps:
                trace.ended[learner] = copy[learner].clone()
            else:
                step[learner] += 1
                trace.started[learner, step[learner]] = (now, copy[learner].clone())
                end = now + problem.compute(learner, step[learner])
                heapq.heappush(events, (end, STEP_END, learner, order, None))
        order += 1
    return trace


def switch_bsp_m_sync(problem: Problem, m: int, at: float) -> Trace:
    """BSP up to the first update after which ``at`` steps per learner are done, the first ``m`` from then on."""
    trace = Trace()
    w = problem.initial.clone()
    v = torch.zeros_like(w)
    version = 0
    trace.shared[0, 0] = w.clone()
    clock = [0.0] * problem.learners
    done = 0
    while done < problem.steps:
        done += 1
        gradients = []
        arrivals = []
        for learner in range(problem.learners):
            trace.started[learner, done] = (clock[learner], w.clone())
            gradients.append(problem.gradient(learner, done, w.clone()))
            arrivals.append(clock[learner] + problem.compute(learner, done) + problem.up(learner))
        w, v = sgd(w, v, mean(gradients), problem.lr, problem.momentum)
        version += 1
        trace.shared[0, version] = w.clone()
        clock = [max(arrivals) + problem.down(learner) for learner in range(problem.learners)]
        if done >= at:
            break
    copy = [w.clone() for _ in range(problem.learners)]
    if done == problem.steps:
        trace.ended = dict(enumerate(copy))
        return trace
    base = [version] * problem.learners
    step = [done + 1] * problem.learners
    kept: dict[int, Tensor] = {}
    events: list[tuple[Any, ...]] = []
    order = 0
    for learner in range(problem.learners):
        trace.started[learner, done + 1] = (clock[learner], w.clone())
        heapq.heappush(events, (clock[learner] + problem.compute(learner, done + 1), STEP_END, learner, order, None))
        order += 1
    while events:
        now, kind, learner, _, content = heapq.heappop(events)
        if kind == STEP_END:
            g = problem.gradient(learner, step[learner], copy[learner].clone())
            if step[learner] == problem.steps:
                trace.ended[learner] = copy[learner].clone()
            heapq.heappush(events, (now + problem.up(learner), AT_SYNCER, learner, order, (g, base[learner])))
            order += 1
        elif kind == AT_SYNCER:
            g, base_version = content
            replies = []
            if base_version != version:
                replies = [learner]
            else:
                kept[learner] = g
                if len(kept) == m:
                    replies = sorted(kept)
                    w, v = sgd(w, v, mean([kept[sender] for sender in replies]), problem.lr, problem.momentum)
                    version += 1
                    trace.shared[0, version] = w.clone()
                    kept = {}
            for to in replies:
                heapq.heappush(events, (now + problem.down(to), AT_LEARNER, to, order, (w.clone(), version)))
                order += 1
        else:
            copy[learner], base[learner] = content
            if step[learner] == problem.steps:
                trace.ended[learner] = copy[learner].clone()
            else:
                step[learner] += 1
                trace.started[learner, step[learner]] = (now, copy[learner].clone())
                end = now + problem.compute(learner, step[learner])
                heapq.heappush(events, (end, STEP_END, learner, order, None))
                order += 1
    return trace


def switch_local_sgd(problem: Problem, every: int, then_every: int, at: float) -> Trace:
    """Local SGD whose period changes after the first merge after which ``at`` steps per learner are done."""
    trace = Trace()
    w = problem.initial.clone()
    version = 0
    period = every
    trace.shared[0, 0] = w.clone()
    theta = [w.clone() for _ in range(problem.learners)]
    v = [torch.zeros_like(w) for _ in range(problem.learners)]
    clock = [0.0] * problem.learners
    for n in range(1, problem.steps + 1):
        for learner in range(problem.learners):
            trace.started[learner, n] = (clock[learner], theta[learner].clone())
            g = problem.gradient(learner, n, theta[learner].clone())
            theta[learner], v[learner] = sgd(theta[learner], v[learner], g, problem.lr, problem.momentum)
            clock[learner] = clock[learner] + problem.compute(learner, n)
        if n % period == 0:
            together = max(clock[learner] + problem.up(learner) for learner in range(problem.learners))
            w = w - mean([w - theta[learner] for learner in range(problem.learners)])
            version += 1
            trace.shared[0, version] = w.clone()
            for learner in range(problem.learners):
                theta[learner] = w.clone()
                clock[learner] = together + problem.down(learner)
            if n >= at:
                period = then_every
    for learner in range(problem.learners):
        trace.ended[learner] = theta[learner].clone()
    return trace
