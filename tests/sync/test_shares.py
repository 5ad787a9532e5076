"""Parts of fragments: every element travels once per learner, from a rank that holds it."""

from __future__ import annotations

import pytest
import torch

from moe_async.sync.fragments import Fragment, Key, Unit
from moe_async.sync.shares import lengths, owners, pick, put, share
from moe_async.topology import Topology


def fragment(dense=7, experts=4, size=5):
    units = [Unit("", (Key("a", dense - 2), Key("b", 2)))] if dense else []
    units += [Unit(f"e.{e}", (Key(f"w.{e}", size, f"e.{e}", e),)) for e in range(experts)]
    return Fragment(0, tuple(units))


TOPOLOGIES = [Topology(1, 1, 4), Topology(2, 2, 4), Topology(4, 2, 4), Topology(6, 2, 4), Topology(4, 1, 4)]
PLACED = Topology(4, 2, 4, placement=(3, 1, 0, 2))


@pytest.mark.parametrize("topology", [*TOPOLOGIES, PLACED])
@pytest.mark.parametrize(("dense", "experts", "size"), [(7, 4, 5), (0, 4, 1), (3, 0, 1)])
def test_every_element_travels_once_from_a_rank_that_holds_it(topology, dense, experts, size):
    whole = fragment(dense, experts, size)
    times = torch.zeros(whole.elements, dtype=torch.int64)
    for rank in range(topology.world_size):
        slices = share(whole, topology, rank)
        for unit, ranks, part in zip(whole.units, owners(whole, topology), slices, strict=True):
            times[part] += 1
            if part.stop > part.start:
                assert rank in ranks
                assert not unit.expert or unit.expert_id in topology.experts_of(rank)
    assert times.tolist() == [1] * whole.elements


@pytest.mark.parametrize("topology", [*TOPOLOGIES, PLACED])
def test_parts_of_all_ranks_make_the_whole(topology):
    whole = fragment()
    value = torch.randn(whole.elements)
    together = torch.full_like(value, torch.nan)
    for rank in range(topology.world_size):
        slices = share(whole, topology, rank)
        part = pick(value, slices)
        assert part.numel() == sum(lengths(slices))
        put(together, slices, part)
    assert torch.equal(together, value)


def test_ranks_share_dense_layers_and_replicas_evenly():
    whole, topology = fragment(dense=8, size=6), Topology(4, 2, 4)
    sizes = [lengths(share(whole, topology, rank)) for rank in range(4)]
    assert [row[0] for row in sizes] == [2, 2, 2, 2]
    # Ranks 0 and 2 hold experts 0 and 1, ranks 1 and 3 the others.
    assert [row[1:] for row in sizes] == [[3, 3, 0, 0], [0, 0, 3, 3], [3, 3, 0, 0], [0, 0, 3, 3]]
