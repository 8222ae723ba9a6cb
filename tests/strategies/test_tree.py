"""The fixed tree over replicas: the same bits on any number of processes."""

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from legato.base.errors import TaskError
from legato.base.place import find_place
from legato.trainer.data.sampling import Layout
from legato.trainer.processes.launch import run_workers
from legato.trainer.processes.rendezvous import join_process_group, leave_process_group
from legato.trainer.strategies import tree as bitwise_tree
from legato.trainer.strategies.tree import (
    CarryStack,
    GradientTree,
    TreeNode,
    add_gradients,
    partial_nodes,
)

layouts = st.integers(1, 17).flatmap(lambda replicas: st.builds(Layout, st.just(replicas), st.integers(1, replicas)))


def formula(start, stop, level):
    """Return the sum that defines the tree, from the root down; None without replicas."""
    if level == 0:
        return str(start) if start < stop else None
    left, right = (formula(start + (half << level - 1), stop, level - 1) for half in (0, 1))
    return left if right is None else f"({left}+{right})"


# --- the order of additions -----------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(deadline=None)
@given(layouts)
def test_any_number_of_processes_computes_the_sum_of_the_tree(layout):
    full = CarryStack("({}+{})".format)
    for process in range(layout.processes):
        local = CarryStack("({}+{})".format)
        for replica in layout.owned(process):
            local.push(TreeNode(replica, 0), str(replica))
        assert [node for node, _ in local.waiting] == partial_nodes(layout.owned(process))
        for node, value in local.waiting:
            full.push(node, value)
    levels = (layout.replicas - 1).bit_length()
    assert full.total() == formula(0, layout.replicas, levels)


@pytest.mark.slow
@settings(deadline=None)
@given(layouts)
def test_partial_nodes_cover_a_block_once_and_are_few(layout):
    for process in range(layout.processes):
        owned = layout.owned(process)
        nodes = partial_nodes(owned)
        covered = [replica for node in nodes for replica in range(node.start, node.start + (1 << node.level))]
        assert covered == list(owned)
        assert all(node.start % (1 << node.level) == 0 for node in nodes)
        assert len(nodes) <= 2 * max(1, len(owned).bit_length())


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(layouts, st.integers(0, 2**32 - 1), st.data())
def test_shares_have_the_bits_of_full_gradients_and_missing_ones_change_nothing(layout, seed, data):
    generator = torch.Generator().manual_seed(seed)
    present = data.draw(st.lists(st.booleans(), min_size=layout.replicas, max_size=layout.replicas))
    # of very different magnitudes, so that another order of additions changes bits, and with zeros of both signs
    leaves = [
        torch.randn(33, generator=generator) * 10.0 ** torch.randint(-6, 7, (33,), generator=generator) for _ in present
    ]
    for leaf in leaves:
        leaf[:3] = torch.tensor([0.0, -0.0, -0.0])
    alone = CarryStack(add_gradients)
    for replica, (leaf, here) in enumerate(zip(leaves, present, strict=True)):
        alone.push(TreeNode(replica, 0), [leaf.clone() if here else None])
    (expected,) = alone.total()
    shares = CarryStack(torch.Tensor.add_)
    for process in range(layout.processes):
        local = CarryStack(add_gradients)
        for replica in layout.owned(process):
            local.push(TreeNode(replica, 0), [leaves[replica].clone() if present[replica] else None])
        for node, (value,) in local.waiting:
            shares.push(node, torch.full((33,), -0.0) if value is None else value)
    total = shares.total()
    if expected is None:
        assert not any(present)
    else:
        assert same_bits(total, expected)
        assert bool(torch.signbit(total[1]))


def same_bits(actual, expected):
    return torch.equal(actual.view(torch.int32), expected.view(torch.int32))


# --- gradients of real parameters -----------------------------------------------------------------------------------

SHAPES = [(5, 3), (), (0,), (7,), (2, 0, 3), (4, 3, 3, 3), (1,), (65,), (300,)]
ABSENT = {3: [1, 4], 6: [1, 2, 3, 4, 5, 6, 7, 8]}
"""For these replicas the parameters that they do not use; nobody uses parameter 4 at all."""


def make_parameters():
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    parameters[5].data = parameters[5].data.to(memory_format=torch.channels_last)
    parameters[3].data = parameters[3].data.double()
    parameters[7].data = parameters[7].data.bfloat16()
    parameters.insert(2, nn.Parameter(torch.zeros(3), requires_grad=False))
    return parameters


def gradients_of(replica, parameters):
    generator = torch.Generator().manual_seed(replica)
    gradients = [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for p in parameters]
    gradients[8][0] = -0.0  # a sum of which is -0.0 only if nothing else is added
    return gradients


def reduce_by_tree(layout, process, last_replica, elements, early):
    """Bring every replica's gradients up to `last_replica` into the tree by backward; return those of the step."""
    parameters = make_parameters()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    tree = GradientTree(parameters, layout, process, elements)
    if early:
        tree.send_early()
    results = []
    for _ in range(2):  # twice: the second step reuses the memory of the first
        replicas = [replica for replica in layout.owned(process) if replica <= last_replica]
        for replica in replicas:
            tree.begin_replica(replica)
            if early and replica == replicas[-1]:
                tree.expect_last()
            used = [i for i in range(len(trained)) if i != 4 and i not in ABSENT.get(replica, ())]
            gradients = gradients_of(replica, trained)
            sum((trained[i].double() * gradients[i].double()).sum() for i in used).backward()
        tree.finish()
        results.append([None if p.grad is None else p.grad.clone() for p in trained])
        for parameter in trained[1:]:  # no optimizer clears the first gradient, so it accumulates
            parameter.grad = None
    tree.close()
    results[1][0] /= 2
    assert all(is_same(actual, expected) for actual, expected in zip(*results, strict=True))
    return results[1]


def is_same(actual, expected):
    if actual is None or expected is None:
        return actual is expected
    alike = actual.dtype == expected.dtype and actual.stride() == expected.stride() and torch.equal(actual, expected)
    return alike and torch.equal(torch.signbit(actual), torch.signbit(expected))


CASES = [
    (replicas, last, elements, early)
    for replicas, last in [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 5), (7, 4), (8, 7), (8, 4), (13, 12), (17, 9)]
    for elements, early in [(1, True), (40, False), (1 << 20, True)]
]


def reduce_all(processes):
    place = find_place()
    join_process_group(place, "gloo", timedelta(seconds=60))
    try:
        results = {}
        for replicas, last, elements, early in CASES:
            if replicas >= processes:
                layout = Layout(replicas, processes)
                sums = reduce_by_tree(layout, place.rank, last, elements, early)
                every = [None] * processes
                dist.all_gather_object(every, sums)
                assert all(
                    is_same(actual, expected)
                    for rank_sums in every
                    for actual, expected in zip(sums, rank_sums, strict=True)
                )
                results[replicas, last, elements, early] = sums
        messages = late_gradients(place.rank) if processes == 2 else []
        return results, messages, count_bytes(place.rank, processes)
    finally:
        leave_process_group()


def count_bytes(process, processes):
    """Reduce a gradient of 60,000 elements in buckets, with a replica per process; return the bytes sent to others."""
    parameters = [nn.Parameter(torch.zeros(20_000)) for _ in range(3)]
    tree = GradientTree(parameters, Layout(processes, processes), process, bucket_elements=20_000)
    sent = []
    all_to_all, all_gather = dist.all_to_all_single, bitwise_tree.all_gather_single

    def exchange(output, source, to_receive, to_send, **options):
        sent.append(sum(to_send[:process] + to_send[process + 1 :]) * source.element_size())
        return all_to_all(output, source, to_receive, to_send, **options)

    def hand_out(output, source, **options):
        sent.append(source.nbytes * (processes - 1))
        return all_gather(output, source, **options)

    dist.all_to_all_single, bitwise_tree.all_gather_single = exchange, hand_out
    try:
        tree.send_early()
        tree.begin_replica(process)
        tree.expect_last()
        sum(parameter.sum() for parameter in parameters).backward()
        assert len(sent) == 4  # within backward: every bucket, and the sum of the first
        tree.finish()
    finally:
        dist.all_to_all_single, bitwise_tree.all_gather_single = all_to_all, all_gather
    assert len(sent) == 6
    return sum(sent)


def late_gradients(process):
    """Return the errors for a weight that two reentrant checkpoints share, and for a sparse gradient."""
    weight, sparse = nn.Parameter(torch.ones(3, 3)), nn.Embedding(4, 2, sparse=True)
    tree = GradientTree([weight], Layout(2, 2), process)
    tree.send_early()
    tree.begin_replica(process)
    tree.expect_last()
    values = torch.ones(2, 3, requires_grad=True)
    for _ in range(2):
        values = checkpoint(lambda values: values @ weight, values, use_reentrant=True)
    values.sum().backward()
    messages = [message_of(tree.finish)]
    tree = GradientTree(sparse.parameters(), Layout(2, 2), process)
    tree.begin_replica(process)
    sparse(torch.tensor([1])).sum().backward()
    return [*messages, message_of(tree.finish)]


def message_of(call):
    with pytest.raises(TaskError) as caught:
        call()
    return str(caught.value)


@pytest.mark.slow
def test_real_processes_have_the_bits_of_one():
    alone = {case: reduce_by_tree(Layout(case[0], 1), 0, case[1], *case[2:]) for case in CASES}
    for case, gradients in alone.items():
        assert gradients[4] is None  # unused, so optimizers do not change it
        assert sum(gradient is None for gradient in gradients) == 1, case
    for processes in (2, 3, 5):
        results, messages, sent = run_workers(partial(reduce_all, processes), processes, threads=1)
        ring = 2 * 60_000 * 4 * (processes - 1) / processes
        assert ring <= sent < ring * 1.001
        assert len(results) == sum(case[0] >= processes for case in CASES)
        for case, gradients in results.items():
            assert all(is_same(actual, expected) for actual, expected in zip(gradients, alone[case], strict=True)), case
        if processes == 2:
            assert "recomputed gradients for parameters of shape [(3, 3)]" in messages[0]
            assert "sparse=False" in messages[1]


def test_a_single_replica_keeps_its_gradients():
    gradients = reduce_by_tree(Layout(1, 1), 0, 0, 40, early=True)
    trained = [parameter for parameter in make_parameters() if parameter.requires_grad]
    for index, expected in enumerate(gradients_of(0, trained)):
        assert gradients[index] is None if index == 4 else torch.equal(gradients[index], expected)


def test_summing_in_turn_gives_other_bits():
    trained = [parameter for parameter in make_parameters() if parameter.requires_grad]
    in_turn = [sum(parts[1:], parts[0]) for parts in zip(*(gradients_of(r, trained) for r in range(8)), strict=True)]
    tree = reduce_by_tree(Layout(8, 1), 0, 7, 40, early=False)
    assert not torch.equal(in_turn[8], tree[8])
