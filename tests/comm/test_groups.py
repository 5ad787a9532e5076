"""Joining a launch, groups of one rank, and the collectives between two."""

import pytest
import torch
import torch.distributed as dist

from moe_async.comm import Group, Launch, World, collectives, make_world, read_launch
from moe_async.errors import CommunicationError
from moe_async.topology import Topology
from tests.helpers.numerics import assert_close
from tests.helpers.spawn import run_ranks

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501", "CROSS_RANK": "0",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "6", "SLURM_NTASKS": "8", "SLURM_LOCALID": "2", "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[03-04,7],other", "SLURM_JOB_ID": "40123",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, Launch(5, 8, 1, 4, "10.0.0.1", 29500)),
        (DEEPSPEED, Launch(2, 3, 2, 3, "127.0.0.1", 29501)),
        # Slurm names no port: 20000 + 40123 % 20000, the same on every node.
        (SLURM, Launch(6, 8, 2, 4, "node03", 20123)),
        (SLURM | {"SLURM_STEP_NODELIST": "one,two"}, Launch(6, 8, 2, 4, "one", 20123)),
        (SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "7777"}, Launch(6, 8, 2, 4, "head", 7777)),
        ({}, Launch(0, 1, 0, 1, "127.0.0.1", None)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Launch()),
        # One task of Slurm, such as an interactive shell, is a process on its own.
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, Launch()),
        # A launcher inside a Slurm job wins over Slurm.
        (SLURM | TORCHRUN, Launch(5, 8, 1, 4, "10.0.0.1", 29500)),
        ({"RANK": "1"}, Launch()),
    ],
    ids=[
        "torchrun",
        "deepspeed",
        "slurm",
        "slurm nodes",
        "slurm with a port",
        "alone",
        "a world of one",
        "one task",
        "both",
        "half",
    ],
)
def test_who_this_process_is(environment, expected):
    assert read_launch(environment) == expected


def test_the_environment_is_read_when_none_is_given(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert read_launch() == Launch(5, 8, 1, 4, "10.0.0.1", 29500)


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        (TORCHRUN | {"RANK": "first"}, ["RANK is 'first'", "deepspeed", "torchrun", "srun", "unset RANK"]),
        (TORCHRUN | {"WORLD_SIZE": ""}, ["WORLD_SIZE is ''"]),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, ["LOCAL_RANK is '-1'"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4.0"}, ["LOCAL_WORLD_SIZE is '4.0'"]),
        (DEEPSPEED | {"LOCAL_SIZE": "x"}, ["LOCAL_SIZE is 'x'"]),
        (TORCHRUN | {"MASTER_PORT": "http"}, ["MASTER_PORT is 'http'"]),
        (TORCHRUN | {"MASTER_ADDR": ""}, ["rank 5 of 8", "MASTER_ADDR is ''"]),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["rank 1 of 2", "MASTER_ADDR is ''", "MASTER_PORT is ''"]),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "http"}, ["MASTER_PORT is 'http'"]),
        (SLURM | {"SLURM_PROCID": "x"}, ["SLURM_PROCID is 'x'"]),
        (SLURM | {"SLURM_NTASKS": "many"}, ["SLURM_NTASKS is 'many'"]),
        (SLURM | {"SLURM_JOB_ID": "job"}, ["SLURM_JOB_ID is 'job'"]),
        (TORCHRUN | {"RANK": "8"}, ["rank 8 of 8", "count from 0"]),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head"}, ["MASTER_PORT is ''", "free port", "rank 0"]),
    ],
)
def test_a_variable_that_is_missing_or_no_number_says_so(environment, parts):
    with pytest.raises(CommunicationError) as caught:
        read_launch(environment)
    for part in parts:
        assert part in str(caught.value)


def test_slurm_without_an_address_says_so():
    environment = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    with pytest.raises(CommunicationError, match="rank 6 of 8, but MASTER_ADDR is ''"):
        read_launch(environment)


@pytest.fixture
def no_communication(monkeypatch):
    """Every collective of torch fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError("a group of one rank communicates")

    for name in (
        "all_reduce",
        "all_to_all_single",
        "all_gather",
        "broadcast_object_list",
        "all_gather_object",
        "new_group",
    ):
        monkeypatch.setattr(dist, name, refuse)


def test_a_group_of_one_rank_communicates_nothing(no_communication):
    group = Group()
    tensor = torch.arange(3.0)
    assert group.size == 1 and group.handle is None
    assert group.all_reduce(tensor) is tensor and group.all_reduce(tensor, op="max").tolist() == [0.0, 1.0, 2.0]
    group.all_reduce_many([tensor, torch.ones(2, 2)])
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    reduction = group.start_all_reduce_many([tensor, torch.ones(2, 2)])
    tensor.mul_(2.0)
    assert [total.tolist() for total in reduction.wait()] == [[0.0, 1.0, 2.0], [[1.0, 1.0], [1.0, 1.0]]]
    assert group.start_all_reduce_many([]).wait() == []
    assert group.gather_objects({"a": 1}) == [{"a": 1}] and group.broadcast_object("b") == "b"
    rows = torch.ones(2, 3, requires_grad=True)
    assert group.all_to_all_rows(rows, [2], [2]) is rows and group.all_to_all_equal(tensor) is tensor
    assert group.all_gather_rows(rows, [2]) is rows
    group.barrier()
    assert group.meter.seconds == 0.0 and group.meter.bytes_sent == 0


def test_a_world_of_one_rank(no_communication):
    world = make_world(Topology(num_experts=6))
    assert world.size == 1 and world.rank == world.local_rank == 0 and world.device.type == "cpu"
    for group in (world.everyone, world.expert, world.expert_data, world.background):
        assert group.ranks == (0,) and group.index == 0 and group.handle is None
    assert World() == World(Topology())


def test_a_topology_of_more_ranks_than_run_says_so():
    with pytest.raises(
        CommunicationError, match=r"topology has 2 ranks but the running process group has 1.*join_world"
    ):
        make_world(Topology(2, 2, 4))


def test_a_copied_group_is_the_same_group():
    group = Group((0, 1), 1)
    assert group.__deepcopy__({}) is group


SEND = [[1, 2], [0, 3]]
"""Rows that each rank sends to rank 0 and to rank 1."""


def tensors_of(rank):
    """Shapes that fill, overflow and miss buckets of five elements; one is not contiguous."""
    shapes = [(2, 2), (3,), (7,), (0,), (3, 2), (1,), (2,)]
    tensors = [torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 10 * rank for shape in shapes]
    tensors[4] = tensors[4].T
    return tensors


def reduced_in_buckets(group, rank, limit):
    collectives.BUCKET_ELEMENTS = limit
    sizes, plain = [], dist.all_reduce

    def spy(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = spy
    tensors = tensors_of(rank)
    pointers = [tensor.data_ptr() for tensor in tensors]
    group.all_reduce_many(tensors)
    dist.all_reduce = plain
    assert [tensor.data_ptr() for tensor in tensors] == pointers
    return {"values": tensors, "sizes": sizes}


def reduced_later(world, rank, limit):
    """Two reductions on their way at once while the ranks talk in another group, and what the blocking one gives."""
    collectives.BUCKET_ELEMENTS = limit
    sizes, plain = [], dist.all_reduce

    def spy(tensor, *args, **kwargs):
        sizes.append((tensor.numel(), kwargs["async_op"], kwargs["group"] is world.background.handle))
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = spy
    first, second = tensors_of(rank), [tensor / 3 for tensor in tensors_of(rank)]
    handles = [world.background.start_all_reduce_many(tensors) for tensors in (first, second)]
    for tensor in (*first, *second):
        tensor.fill_(-7.0)
    dist.all_reduce = plain
    blocking = [tensor / 3 for tensor in tensors_of(rank)]
    world.everyone.all_reduce_many(blocking)
    later = handles[1].wait()
    return {
        "sizes": sizes, "second": later, "first": handles[0].wait(), "blocking": blocking,
        "again": all(a.data_ptr() == b.data_ptr() for a, b in zip(later, handles[1].wait(), strict=True)),
    }  # fmt: skip


def exchanged(group, rank, send, dtype):
    """Rows with their sender and place in them; the loss of rank r is (r + 1) times the sum of what came."""
    mine, theirs = send[rank], [sizes[rank] for sizes in send]
    rows = (torch.arange(sum(mine))[:, None] + torch.tensor([100.0 * rank, 0.5])).to(dtype).requires_grad_()
    received = group.all_to_all_rows(rows, mine, theirs)
    # The gradient of a sum is an expanded tensor, which the exchange has to copy.
    ((rank + 1) * received.sum()).backward()
    return {"received": received.detach(), "grad": rows.grad}


def gathered(group, rank, sizes, dtype):
    """As `exchanged`, but every rank gets the rows of all."""
    rows = (torch.arange(sizes[rank])[:, None] + torch.tensor([100.0 * rank, 0.5])).to(dtype).requires_grad_()
    received = group.all_gather_rows(rows, sizes)
    ((rank + 1) * received.sum()).backward()
    return {"received": received.detach(), "grad": rows.grad}


def bytes_of(group, function, *args):
    """What a call makes the meter count."""
    before = group.meter.bytes_sent
    function(*args)
    return group.meter.bytes_sent - before


def refusals(group):
    messages = []
    for send, receive in (([1, 1], [1, 1]), ([3], [3]), ([1, 2], [3])):
        try:
            group.all_to_all_rows(torch.zeros(3, 2), send, receive)
        except CommunicationError as error:
            messages.append(str(error))
    for sizes in ([3], [3, 3, 3], [4, 4]):
        try:
            group.all_gather_rows(torch.zeros(3, 2), sizes)
        except CommunicationError as error:
            messages.append(str(error))
    try:
        make_world(Topology(1, 1, 4))
    except CommunicationError as error:
        messages.append(str(error))
    return messages


def everything(rank):
    world = make_world(Topology(2, 2, 4), Launch(rank, 2, rank, 2))
    group = world.expert
    result = {
        "ranks": (world.everyone.ranks, world.expert.ranks, world.expert_data.ranks, world.background.ranks),
        "indices": (world.everyone.index, world.expert.index, world.expert_data.index),
        "places": (world.rank, world.local_rank, world.size, world.everyone.meter is world.expert_data.meter),
        "apart": len({id(part.handle) for part in (world.everyone, world.expert, world.background)}),
        "ops": [group.all_reduce(torch.tensor([rank + 1.0, -rank]), op).tolist() for op in ("sum", "min", "max")],
        "buckets": {limit: reduced_in_buckets(group, rank, limit) for limit in (1, 5, 100)},
        "later": {limit: reduced_later(world, rank, limit) for limit in (5, 100)},
        "equal": group.all_to_all_equal(torch.tensor([[rank, 0], [rank, 1]])).tolist(),
        "strided": group.all_to_all_equal(torch.tensor([[rank, rank], [0, 1]]).T).tolist(),
        "uneven": exchanged(group, rank, SEND, torch.float32),
        "bfloat16": exchanged(group, rank, SEND, torch.bfloat16),
        "empty": exchanged(group, rank, [[0, 0], [0, 0]], torch.float32),
        "to one": exchanged(group, rank, [[0, 2], [0, 0]], torch.float32),
        "all": gathered(group, rank, [1, 2], torch.float32),
        "all bfloat16": gathered(group, rank, [1, 2], torch.bfloat16),
        "all of one": gathered(group, rank, [2, 0], torch.float32),
        "bytes": {
            "equal": bytes_of(group, group.all_to_all_equal, torch.zeros(2, 3, dtype=torch.int64)),
            "uneven": bytes_of(group, exchanged, group, rank, SEND, torch.bfloat16),
            "all": bytes_of(group, group.all_gather_rows, torch.zeros(rank + 1, 2), [1, 2]),
        },
        "refusals": refusals(group),
        "gathered": group.gather_objects({"rank": rank, "names": ["x"] * rank}),
        "broadcast": group.broadcast_object({"from": rank} if rank == 0 else None),
    }
    group.barrier()
    return result | {"waited": world.everyone.meter.seconds > 0}


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, everything)


@pytest.mark.parametrize("rank", [0, 1])
def test_groups_of_two_ranks(results, rank):
    result = results[rank]
    assert result["ranks"] == ((0, 1), (0, 1), (rank,), (0, 1)) and result["indices"] == (rank, rank, 0)
    assert result["places"] == (rank, rank, 2, True) and result["waited"]
    assert result["apart"] == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_reductions_by_hand(results, rank):
    assert results[rank]["ops"] == [[3.0, -1.0], [1.0, -1.0], [2.0, 0.0]]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("limit", "sizes"), [(1, [4, 3, 7, 0, 6, 1, 2]), (5, [4, 3, 7, 0, 6, 3]), (100, [23])], ids=str
)
def test_many_tensors_are_summed_through_buckets(results, rank, limit, sizes):
    actual = results[rank]["buckets"][limit]
    assert actual["sizes"] == sizes
    for value, first, second in zip(actual["values"], tensors_of(0), tensors_of(1), strict=True):
        assert torch.equal(value, first + second)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("limit", "sizes"), [(5, [4, 3, 7, 0, 6, 3]), (100, [23])], ids=str)
def test_reductions_on_their_way_have_the_bits_of_blocking_ones(results, rank, limit, sizes):
    actual = results[rank]["later"][limit]
    assert actual["sizes"] == [(size, True, True) for size in sizes] * 2 and actual["again"]
    for value, first, second in zip(actual["first"], tensors_of(0), tensors_of(1), strict=True):
        assert torch.equal(value, first + second)
    for value, blocking in zip(actual["second"], actual["blocking"], strict=True):
        assert value.shape == blocking.shape and torch.equal(value, blocking)


@pytest.mark.parametrize("rank", [0, 1])
def test_equal_rows_go_to_their_ranks(results, rank):
    assert results[rank]["equal"] == [[0, rank], [1, rank]]
    # Row i of the transposed tensor of rank r is (r, i).
    assert results[rank]["strided"] == [[0, rank], [1, rank]]


def test_uneven_rows_and_their_gradient(results):
    # Rank 0 keeps its first row and sends two; rank 1 sends none and keeps three.
    first, second = (result["uneven"] for result in results)
    assert first["received"].tolist() == [[0.0, 0.5]]
    assert second["received"].tolist() == [[1.0, 1.5], [2.0, 2.5], [100.0, 0.5], [101.0, 1.5], [102.0, 2.5]]
    # A row's gradient is the factor of the rank that it went to.
    assert first["grad"].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    assert second["grad"].tolist() == [[2.0, 2.0]] * 3


def test_bfloat16_rows_travel_as_they_are(results):
    for low, high in zip((r["bfloat16"] for r in results), (r["uneven"] for r in results), strict=True):
        for name in ("received", "grad"):
            assert low[name].dtype == torch.bfloat16
            assert_close(low[name], high[name])


def test_no_rows_at_all_and_rows_to_one_rank_only(results):
    for result in results:
        assert result["empty"]["received"].shape == result["empty"]["grad"].shape == (0, 2)
    first, second = (result["to one"] for result in results)
    assert first["received"].shape == (0, 2) and second["received"].tolist() == [[0.0, 0.5], [1.0, 1.5]]
    assert first["grad"].tolist() == [[2.0, 2.0]] * 2 and second["grad"].shape == (0, 2)


def test_rows_of_all_ranks_and_their_gradient(results):
    for result in results:
        assert result["all"]["received"].tolist() == [[0.0, 0.5], [100.0, 0.5], [101.0, 1.5]]
        # The losses of both ranks take every row, with the factors 1 and 2.
        assert torch.equal(result["all"]["grad"], torch.full_like(result["all"]["grad"], 3.0))
        assert result["all of one"]["received"].tolist() == [[0.0, 0.5], [1.0, 1.5]]
        for name in ("received", "grad"):
            assert result["all bfloat16"][name].dtype == torch.bfloat16
            assert_close(result["all bfloat16"][name], result["all"][name])
    assert [result["all"]["grad"].shape for result in results] == [(1, 2), (2, 2)]
    assert results[0]["all of one"]["grad"].tolist() == [[3.0, 3.0]] * 2
    assert results[1]["all of one"]["grad"].shape == (0, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_bytes_sent_to_the_other_rank_are_counted(results, rank):
    # Half of 6 integers; rows of two bfloat16, there (two from rank 0, none from rank 1) and back; two padded rows.
    assert results[rank]["bytes"] == {"equal": 24, "uneven": 2 * 4, "all": 2 * 2 * 4}


@pytest.mark.parametrize("rank", [0, 1])
def test_objects_of_all_ranks(results, rank):
    assert results[rank]["gathered"] == [{"rank": 0, "names": []}, {"rank": 1, "names": ["x"]}]
    assert results[rank]["broadcast"] == {"from": 0}


@pytest.mark.parametrize("rank", [0, 1])
def test_sizes_that_do_not_fit_say_so(results, rank):
    *sizes, world = results[rank]["refusals"]
    assert len(sizes) == 6
    sizes, gathers = sizes[:3], sizes[3:]
    for message, given in zip(sizes, ("send sizes [1, 1]", "send sizes [3]", "receive sizes [3]"), strict=True):
        assert "3 rows" in message and given in message and "group of 2" in message and "one entry per rank" in message
    for message, given in zip(gathers, ("[3]", "[3, 3, 3]", "[4, 4]"), strict=True):
        assert f"3 rows with sizes {given} as rank {rank} in a group of 2" in message
    assert "the topology has 1 ranks but the running process group has 2" in world
