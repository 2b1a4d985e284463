"""Layered MDPs of directed acyclic graphs, against networkx and against all paths."""

import itertools

import networkx
import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from zoo import random_loss

import torch_occ as occ
from torch_occ.mdp.unroll import ABSORBING

F64 = torch.float64

#: Paths of two, three and four edges; `d` is a dead end, and nothing leads to `z`.
EDGES = [
    ("s", "a"), ("s", "b"), ("a", "b"), ("a", "t"), ("b", "c"), ("c", "t"), ("s", "t"),
    ("a", "d"), ("z", "c"), ("t", "d"),
]  # fmt: skip
PATHS = [["s", "a", "b", "c", "t"], ["s", "a", "t"], ["s", "b", "c", "t"], ["s", "t"]]


def random_dag(seed, nodes=9, chance=0.5):
    generator = torch.Generator().manual_seed(seed)
    pairs = list(itertools.combinations(range(nodes), 2))
    kept = torch.rand(len(pairs), generator=generator) < chance
    edges = [pair for pair, keep in zip(pairs, kept, strict=True) if keep]
    return list(dict.fromkeys([*edges, (0, nodes - 1)]))  # so that there is a path


def shortest(edges, costs, source, target):
    graph = networkx.DiGraph()
    graph.add_weighted_edges_from((*e, float(c)) for e, c in zip(edges, costs, strict=True))
    return as_flow(edges, networkx.bellman_ford_path(graph, source, target))


def costs_of(edges, *batch, seed=0, draw=torch.rand):
    return draw(*batch, len(edges), dtype=F64, generator=torch.Generator().manual_seed(seed))


def as_flow(edges, path):
    steps = set(itertools.pairwise(path))
    return torch.tensor([float(edge in steps) for edge in edges], dtype=F64)


def deterministic_policies(mdp):
    counts = mdp.actions.sum(-1)
    for choice in itertools.product(*(range(int(n)) for n in counts)):
        yield torch.nn.functional.one_hot(torch.tensor(choice), mdp.num_actions).to(F64)


def test_layers_and_waiting():
    mdp = occ.LayeredMDP.from_graph(EDGES, "s", "t")
    # s | a | b | c, with states of waiting for b in layer 1 and for t from layer 1 on.
    assert mdp.layer_sizes == (1, 3, 2, 2)
    names = [mdp.nodes[i] if i != ABSORBING else "wait" for i in mdp.origin.tolist()]
    assert names == ["s", "a", "wait", "wait", "b", "wait", "c", "wait"]
    assert bool(mdp.reachable.all())


def test_paths_of_the_graph_and_of_the_mdp_are_the_same():
    mdp = occ.LayeredMDP.from_graph(EDGES, "s", "t")
    found = {tuple(mdp.flows(occ.occupancy(mdp, p)).tolist()) for p in deterministic_policies(mdp)}
    assert found == {tuple(as_flow(EDGES, path).tolist()) for path in PATHS}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", [list, networkx.DiGraph])
def test_shortest_paths_are_those_of_networkx(seed, kind):
    mdp = occ.LayeredMDP.from_graph(kind(random_dag(seed)), 0, 8)
    edges = mdp.edges  # networkx has an order of its own
    costs = costs_of(edges, 4, seed=seed, draw=torch.randn)
    for flow, cost in zip(mdp.shortest_path(costs), costs, strict=True):
        torch.testing.assert_close(flow, shortest(edges, cost, 0, 8))


def test_losses_and_flows_are_adjoint_and_differentiable():
    mdp = occ.LayeredMDP.from_graph(EDGES, "s", "t")
    costs = costs_of(EDGES, 3).requires_grad_()
    q = random_loss(mdp, batch=(3,)).requires_grad_()
    torch.testing.assert_close((mdp.losses(costs) * q).sum(), (mdp.flows(q) * costs).sum())
    assert torch.autograd.gradcheck(mdp.losses, costs)
    assert torch.autograd.gradcheck(mdp.flows, q)
    step = occ.FTRLStep(mdp, occ.Tsallis(), backend="torch")
    assert torch.autograd.gradcheck(lambda c: mdp.flows(step(mdp.losses(c))), costs)
    unused = [EDGES.index(edge) for edge in [("a", "d"), ("z", "c"), ("t", "d")]]
    assert bool((mdp.flows(q)[:, unused] == 0).all())


def test_occupancy_of_inverts_flows():
    mdp = occ.LayeredMDP.from_graph(EDGES, "s", "t")
    q = occ.interior_point(mdp)
    torch.testing.assert_close(mdp.occupancy_of(mdp.flows(q)), q)
    paths = torch.stack([as_flow(EDGES, path) for path in PATHS])
    found = mdp.occupancy_of(paths.float())  # as a network has them
    assert found.dtype == F64
    torch.testing.assert_close(mdp.flows(found), paths)
    assert float(occ.mdp.flow_residual(mdp, found).abs().max()) == 0.0


def test_parallel_edges_are_two_actions():
    mdp = occ.LayeredMDP.from_graph(networkx.MultiDiGraph([(0, 1), (0, 1)]), 0, 1)
    assert mdp.layer_sizes == (1,)
    costs = torch.tensor([2.0, 1.0], dtype=F64)
    assert mdp.shortest_path(costs).tolist() == [0.0, 1.0]


def test_wide_layers_are_sparse():
    edges = [("s", i) for i in range(200)] + [(i, (i, "next")) for i in range(200)]
    edges += [((i, "next"), "t") for i in range(200)]
    mdp = occ.LayeredMDP.from_graph(edges, "s", "t")
    assert mdp.is_sparse
    costs = costs_of(edges)
    q = occ.FTRLStep(mdp, occ.ConditionalEntropy(), backend="torch")(mdp.losses(costs))
    expected = torch.softmax(-costs.reshape(3, 200).sum(0), 0)
    torch.testing.assert_close(mdp.flows(q), expected.repeat(3))


def test_cycles_beside_all_paths_do_no_harm():
    mdp = occ.LayeredMDP.from_graph([(0, 1), (0, 2), (2, 3), (3, 2), (1, 0.5)], 0, 1)
    assert mdp.num_pairs == 1


# -- graphs that move to other number types and devices --------------------------------------------


@pytest.mark.parametrize("horizon", [None, 5])
def test_a_graph_stays_a_graph(horizon):
    mdp = occ.LayeredMDP.from_graph(EDGES, "s", "t", horizon)
    costs = costs_of(EDGES, 2)
    single = mdp.to(torch.float32)
    assert single.losses(costs).dtype == single.dtype == torch.float32
    torch.testing.assert_close(single.shortest_path(costs), mdp.shortest_path(costs).float())
    assert single.edges == mdp.edges
    mode = FakeTensorMode()  # it refuses operations on two devices

    def on_gpu(x):
        number = torch.bfloat16 if x.is_floating_point() else x.dtype
        return FakeTensor(mode, x.to("meta", number), torch.device("cuda"))

    meta = mdp.to("meta", torch.bfloat16), costs.to("meta")
    for other, given in (meta, (mdp.map_tensors(on_gpu), on_gpu(costs))):
        losses = other.losses(given)
        assert (losses.device, losses.dtype) == (other.device, torch.bfloat16)
        assert other.flows(losses).shape == (2, len(EDGES))


# -- graphs with cycles, within a horizon ----------------------------------------------------------


def eight_neighbours(n):
    cells = list(itertools.product(range(n), repeat=2))
    moves = [move for move in itertools.product((-1, 0, 1), repeat=2) if move != (0, 0)]
    edges = [((i, j), (i + a, j + b)) for i, j in cells for a, b in moves]
    return [edge for edge in edges if edge[1] in cells]


@pytest.mark.parametrize("penalty", [None, 100.0])
def test_shortest_paths_with_cycles_are_those_of_networkx(penalty):
    edges = eight_neighbours(4)
    mdp = occ.LayeredMDP.from_graph(edges, (0, 0), (3, 3), horizon=9, penalty=penalty)
    costs = costs_of(edges, 5)
    flows = mdp.shortest_path(costs)
    for flow, cost in zip(flows, costs, strict=True):
        torch.testing.assert_close(flow, shortest(edges, cost, (0, 0), (3, 3)))
    torch.testing.assert_close(mdp.flows(mdp.occupancy_of(flows)), flows)


def test_walks_wait_at_the_target_and_pay_if_they_do_not_arrive():
    edges = [("s", "a"), ("a", "s"), ("a", "t")]
    only = occ.LayeredMDP.from_graph(edges, "s", "t", 4)
    assert only.layer_sizes == (1, 1, 2, 2)  # s | a | s or arrived | a or arrived
    costs = torch.tensor([1.0, 1.0, 10.0], dtype=F64)
    assert only.shortest_path(costs).tolist() == [1.0, 0.0, 1.0]
    late = occ.LayeredMDP.from_graph(edges, "s", "t", 4, penalty=7.0)
    # s a s a s costs 4 + 7, and s a t costs 11, after which waiting is free.
    values = [occ.optimal_policy(mdp, mdp.losses(costs)).value[0] for mdp in (only, late)]
    assert [float(value) for value in values] == [11.0, 11.0]
    cheap = occ.LayeredMDP.from_graph(edges, "s", "t", 4, penalty=6.0)
    assert cheap.shortest_path(costs).tolist() == [2.0, 2.0, 0.0]
    q = random_loss(cheap).requires_grad_()
    own = ((cheap.losses(costs) - cheap.losses(0 * costs)) * q).sum()
    torch.testing.assert_close(own, (cheap.flows(q) * costs).sum())
    assert torch.autograd.gradcheck(cheap.flows, q)


def test_the_entropy_over_walks():
    """All walks that arrive within the horizon, and no others, share a softmax."""
    edges = [("s", "a"), ("a", "b"), ("b", "a"), ("a", "s"), ("b", "t"), ("s", "t")]
    mdp = occ.LayeredMDP.from_graph(edges, "s", "t", horizon=5)
    costs = costs_of(edges, seed=1)
    walks = [["s", "t"], ["s", "a", "b", "t"], ["s", "a", "s", "t"], ["s", "a", "s", "a", "s", "t"]]
    walks += [["s", "a", "b", "a", "b", "t"], ["s", "a", "s", "a", "b", "t"]]
    walks += [["s", "a", "b", "a", "s", "t"]]
    counts = [[float([*itertools.pairwise(w)].count(e)) for e in edges] for w in walks]
    flows = torch.tensor(counts, dtype=F64)
    expected = torch.softmax(-flows @ costs, 0) @ flows
    step = occ.FTRLStep(mdp, occ.ConditionalEntropy(), backend="torch")
    torch.testing.assert_close(mdp.flows(step(mdp.losses(costs))), expected)
