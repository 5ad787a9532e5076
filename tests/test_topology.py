"""Ranks, groups and owners of experts: integers, by hand and as invariants."""

import pytest

from moe_async.errors import TopologyError
from moe_async.topology import Topology, divisors
from tests.helpers.fresh import loaded_after

SHAPES = [(1, 1, 1), (1, 1, 8), (2, 1, 4), (2, 2, 4), (4, 2, 6), (4, 4, 4), (12, 3, 9), (16, 4, 8)]


def scattered(world_size, expert_parallel, num_experts):
    """A topology whose placement is a permutation without a fixed pattern."""
    placement = sorted(range(num_experts), key=lambda expert: (expert * 7 + 3) % 11)
    return Topology(world_size, expert_parallel, num_experts, tuple(placement))


def test_the_worked_example_of_the_docstring():
    topology = Topology(world_size=16, expert_parallel=4, num_experts=8)
    assert topology.expert_groups() == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert topology.expert_data_groups() == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    for ranks, experts in [
        ((0, 4, 8, 12), (0, 1)),
        ((1, 5, 9, 13), (2, 3)),
        ((2, 6, 10, 14), (4, 5)),
        ((3, 7, 11, 15), (6, 7)),
    ]:
        for rank in ranks:
            assert topology.experts_of(rank) == experts
        for expert in experts:
            assert topology.owners(expert) == ranks
    assert topology.experts_per_rank == 2 and topology.expert_replicas == 4
    # Rank 6 is the third of the second expert group and the second replica of the experts 4 and 5.
    assert topology.expert_index(6) == 2 and topology.replica_index(6) == 1
    assert topology.expert_group(6) == (4, 5, 6, 7) and topology.expert_data_group(6) == (2, 6, 10, 14)


def test_a_placement_by_hand():
    topology = Topology(world_size=4, expert_parallel=2, num_experts=4, placement=(2, 0, 3, 1))
    assert [topology.experts_of(rank) for rank in range(4)] == [(2, 0), (3, 1), (2, 0), (3, 1)]
    assert topology.slots() == (1, 3, 0, 2)
    assert [topology.owners(expert) for expert in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_the_default_is_one_rank_with_one_expert():
    topology = Topology()
    assert topology.expert_groups() == topology.expert_data_groups() == ((0,),)
    assert topology.experts_of(0) == topology.placement == (0,)


@pytest.mark.parametrize("make", [Topology, scattered], ids=["in order", "scattered"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_groups_cover_the_ranks_and_every_expert_group_holds_every_expert_once(make, shape):
    topology = make(*shape)
    ranks = list(range(topology.world_size))
    for groups in (topology.expert_groups(), topology.expert_data_groups()):
        assert sorted(rank for group in groups for rank in group) == ranks
    for group in topology.expert_groups():
        held = [expert for rank in group for expert in topology.experts_of(rank)]
        assert held == list(topology.placement) and sorted(held) == list(range(topology.num_experts))
    for group in topology.expert_data_groups():
        assert len(group) == topology.expert_replicas and len({topology.experts_of(rank) for rank in group}) == 1


@pytest.mark.parametrize("make", [Topology, scattered], ids=["in order", "scattered"])
@pytest.mark.parametrize("shape", SHAPES)
def test_indices_and_owners_are_inverses(make, shape):
    topology = make(*shape)
    for rank in range(topology.world_size):
        assert topology.expert_group(rank)[topology.expert_index(rank)] == rank
        assert topology.expert_data_group(rank)[topology.replica_index(rank)] == rank
        assert all(rank in topology.owners(expert) for expert in topology.experts_of(rank))
    for expert, slot in enumerate(topology.slots()):
        assert topology.placement[slot] == expert
        assert all(expert in topology.experts_of(rank) for rank in topology.owners(expert))
        assert len(topology.owners(expert)) == topology.expert_replicas


def test_divisors():
    assert list(divisors(1)) == [1] and list(divisors(12)) == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"world_size": 0}, ["world_size is 0", "at least 1"]),
        ({"expert_parallel": -1}, ["expert_parallel is -1", "at least 1"]),
        ({"num_experts": 0}, ["num_experts is 0", "at least 1"]),
        (
            {"world_size": 6, "expert_parallel": 4, "num_experts": 8},
            ["expert-parallel size is 4", "6 ranks", "Allowed here: 1, 2, 3, 6", "--set parallel.expert="],
        ),
        (
            {"world_size": 4, "expert_parallel": 4, "num_experts": 6},
            ["6 experts", "expert-parallel size is 4", "Allowed sizes: 1, 2, 3, 6."],
        ),
        ({"num_experts": 3, "placement": (0, 1, 1)}, ["placement (0, 1, 1)", "0 to 2", "every expert exactly once"]),
        ({"num_experts": 3, "placement": (0, 1)}, ["placement (0, 1)", "0 to 2"]),
        ({"num_experts": 3, "placement": (1, 2, 3)}, ["placement (1, 2, 3)", "0 to 2"]),
    ],
)
def test_sizes_that_do_not_fit_say_so(arguments, parts):
    with pytest.raises(TopologyError) as caught:
        Topology(**arguments)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("rank", [-1, 4])
@pytest.mark.parametrize("method", ["experts_of", "expert_index", "replica_index", "expert_group", "expert_data_group"])
def test_a_rank_that_does_not_exist_says_so(method, rank):
    with pytest.raises(TopologyError, match=rf"rank {rank} does not exist; the ranks are 0 to 3"):
        getattr(Topology(4, 2, 4), method)(rank)


@pytest.mark.parametrize("expert", [-1, 4])
def test_an_expert_that_does_not_exist_says_so(expert):
    with pytest.raises(TopologyError, match=rf"expert {expert} does not exist; the ids are 0 to 3"):
        Topology(4, 2, 4).owners(expert)


@pytest.mark.parametrize("module", ["topology", "errors", "recipe", "data"])
def test_integers_recipes_and_text_need_no_torch(module):
    assert loaded_after(f"import moe_async.{module}", f"moe_async.{module}", "torch", "deepspeed") == [
        f"moe_async.{module}"
    ]


@pytest.mark.parametrize(("world_size", "expert_parallel"), [(16, 4), (16, 1), (16, 16), (12, 3), (2, 2)])
def test_groups_are_deepspeeds_own(world_size, expert_parallel):
    from deepspeed.utils.groups import _get_expert_parallel_ranks

    topology = Topology(world_size, expert_parallel, expert_parallel)
    expert, expert_data = _get_expert_parallel_ranks(world_size, 1, expert_parallel)
    assert sorted(map(tuple, expert)) == sorted(topology.expert_groups())
    assert sorted(map(tuple, expert_data)) == sorted(topology.expert_data_groups())
