"""A directed graph as a layered MDP: its paths are the deterministic policies.

An edge is an action of its tail, and q(tail, edge) is the flow through the edge. In an acyclic
graph, an edge that skips layers leads to states of waiting, one per skipped layer, each with one
action; edges to the same node share them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torch_occ.mdp.checks import as_tensor, check_table, check_that, check_type
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import occupancy, optimal_policy, policy_of
from torch_occ.mdp.unroll import ABSORBING, layer_tensor

Node = Hashable
Edge = tuple[Node, Node]
Step = tuple[int, Node, Node]  # an edge with its number
Place = tuple[Node, bool]  # a state: at the node, or waiting for it
#: A layer: of each state what it can do, an edge (None to wait) and the state of the next layer.
Moves = dict[Place, list[tuple[int | None, Place]]]

#: The largest layer, in numbers of its table (S_k, A, S_{k+1}), that is stored densely. The engine
#: reads dense tables faster, and takes rows from them by itself where these are faster.
DENSE_TABLE = 20_000


class GraphMDP(LayeredMDP):
    """A `LayeredMDP` made of a directed graph; `LayeredMDP.from_graph` makes it.

    Costs and flows of edges have the shape `(*batch, E)`, in the order of `edges`. `to` keeps the
    graph; `prune` and `with_transitions` return a plain `LayeredMDP`.

    Args:
        edges: the edges of the graph, (tail, head) each.
        nodes: the nodes of the graph; `origin` refers to them. States of waiting have the origin
            `ABSORBING`.
        owner: the edge of each pair `(S * A,)`; E where there is none.
        penalty: what a pair costs beside its edge, `(S, A)`; None if nothing.
        layout: arguments of `LayeredMDP`.
    """

    edges: tuple[Edge, ...]
    nodes: tuple[Node, ...]
    _owner: Tensor
    _penalty: Tensor | None

    def __init__(
        self,
        *,
        edges: tuple[Edge, ...],
        nodes: tuple[Node, ...],
        owner: Tensor,
        penalty: Tensor | None,
        **layout: Any,
    ) -> None:
        super().__init__(**layout)
        self.__dict__.update(edges=edges, nodes=nodes, _owner=owner, _penalty=penalty)

    def losses(self, costs: Tensor) -> Tensor:
        """The losses of pairs from costs of edges: `(*batch, E)` -> `(*batch, S, A)`.

        Waiting costs nothing, and the penalty for not arriving is added. The result has the number
        type of the MDP, and is differentiable.
        """
        table = self._of_pairs("costs", costs)
        return table if self._penalty is None else table + self._penalty

    def _of_pairs(self, name: str, x: Tensor) -> Tensor:
        """Give each pair the number of its edge, and zero if it has none."""
        x, expected = as_tensor(x), f"shape (*batch, {len(self.edges)}), one number per edge"
        check_type(name, x, Tensor, f"a tensor of {expected}")
        check_that(x.shape[-1:] == (len(self.edges),), name, expected, tuple(x.shape))
        padded = torch.nn.functional.pad(x.to(self.dtype), (0, 1))
        return padded.index_select(-1, self._owner).unflatten(-1, self.actions.shape)

    def flows(self, q: Tensor) -> Tensor:
        """The flow through each edge: `(*batch, S, A)` -> `(*batch, E)`, differentiable.

        An edge that lies on no path from the source to the target has the flow zero. With a
        horizon, all steps of the walks count.
        """
        flat = check_table("q", as_tensor(q), self).flatten(-2)
        found = flat.new_zeros(*flat.shape[:-1], len(self.edges) + 1)
        found = found.scatter_add(-1, self._owner.expand_as(flat), flat)
        return found.narrow(-1, 0, len(self.edges))

    def occupancy_of(self, flows: Tensor) -> Tensor:
        """The occupancy measure of flows `(*batch, E)` -> `(*batch, S, A)`: the inverse of `flows`.

        Args:
            flows: a unit of flow from the source to the target, for example a path as zeros and
                ones. With a horizon, a path that visits no node twice.

        Raises:
            ValueError: if flows have another shape, are negative, or are not conserved; the message
                names the edge or the node.
        """
        # Unvisited states and states of waiting have no flow on edges; the uniform policy continues
        # from there.
        q = occupancy(self, policy_of(self, self._of_pairs("flows", flows).clamp(min=0.0)))
        given = as_tensor(flows).to(self.dtype)
        # Flows of a network have errors of single precision.
        negative, off = ~(given >= -1e-6), ~((given - self.flows(q)).abs() <= 1e-6)
        wrong = negative if bool(negative.any()) else off
        for *element, edge in wrong.nonzero()[:1].tolist():
            batch = f", element {element}" if element else ""
            repeats = bool((self._owner.bincount()[: len(self.edges)] > 1).any())
            walks = f", along paths of at most {self.horizon} edges" if repeats else ""
            raise ValueError(
                f"flows: edge {edge}, {self.edges[edge]}{batch}: found "
                f"{float(given[*element, edge]):g}; expected a unit of flow from the source to the "
                f"target, nonnegative, and as much into every other node as out of it{walks}"
            )
        return q

    @torch.no_grad()
    def shortest_path(self, costs: Tensor) -> Tensor:
        """The path of least cost, one on its edges and zero elsewhere: `(*batch, E)` -> the same.

        Costs may be negative; with a horizon, an edge then may count several times. Of equal paths,
        the one is taken whose first different edge comes first in `edges`.
        """
        return self.flows(occupancy(self, optimal_policy(self, self.losses(costs)).policy))


def from_graph(
    graph: Any,
    source: Node,
    target: Node,
    horizon: int | None,
    penalty: float | None,
    dtype: torch.dtype,
) -> GraphMDP:
    """See `LayeredMDP.from_graph`."""
    edges = edges_of(graph)
    nodes = tuple(dict.fromkeys(node for edge in edges for node in edge))
    used = _on_paths(edges, nodes, source, target)
    if horizon is None and penalty is not None:
        raise ValueError("penalty: is for walks within a horizon; pass horizon, too")
    check_that(math.isfinite(penalty or 0.0), "penalty", "a finite number", penalty)
    if horizon is None:
        layers = _by_depth(used, nodes, source, target)
    else:
        layers = _by_time(used, source, target, horizon, penalty is None)
    number = {node: i for i, node in enumerate(nodes)}
    num_actions = max(len(moves) for layer in layers for moves in layer.values())
    owner = torch.full((sum(map(len, layers)), num_actions), len(edges))
    # Which pairs exist, and after which a walk has not arrived.
    actions, late = torch.zeros(2, *owner.shape, dtype=torch.bool)
    transitions: list[Tensor] = []
    origin: list[int] = []  # (S,)
    for layer, after in pairwise((*layers, {})):
        following = {place: i for i, place in enumerate(after)}
        outcomes = [
            (s, a, following.get(there, 0), len(edges) if edge is None else edge)
            for s, moves in enumerate(layer.values())
            for a, (edge, there) in enumerate(moves)
        ]
        state, action, there, edge = torch.tensor(outcomes).T
        own = len(origin) + state, action
        actions[own], owner[own] = True, edge
        origin += [ABSORBING if waits else number[node] for node, waits in layer]
        shape = (len(layer), num_actions, len(following) or 1)
        ones, sparse = torch.ones(len(outcomes), dtype=dtype), math.prod(shape) > DENSE_TABLE
        transitions.append(layer_tensor((state, action, there), ones, shape, sparse))
    late[own] = torch.tensor([there[0] != target for moves in layer.values() for _, there in moves])
    return GraphMDP(
        edges=edges,
        nodes=nodes,
        owner=owner.flatten(),
        penalty=None if penalty is None else penalty * late.to(dtype),
        transitions=transitions,
        actions=actions,
        origin=torch.tensor(origin),
    )


def _by_depth(used: list[Step], nodes: Iterable[Node], source: Node, target: Node) -> list[Moves]:
    """The layers of an acyclic graph: each node in one layer, and states of waiting.

    Raises:
        ValueError: if there is a cycle; the message shows it.
    """
    before: dict[Node, list[Node]] = {source: []}
    for _, tail, head in used:
        before.setdefault(head, []).append(tail)
    depth: dict[Node, int] = {}  # the length of the longest path to each node
    try:
        for node in TopologicalSorter(before).static_order():
            depth[node] = max((depth[tail] + 1 for tail in before[node]), default=0)
    except CycleError as error:
        cycle = error.args[1]  # each node comes before the next one
        raise ValueError(
            f"graph: it has the cycle {' -> '.join(map(repr, cycle))}; give a horizon, the largest "
            "number of edges of a walk"
        ) from None
    layers: list[Moves] = [{} for _ in range(depth[target])]
    for node in nodes:
        if node in depth and node != target:
            layers[depth[node]][node, False] = []
    for i, tail, head in used:
        layers[depth[tail]][tail, False].append((i, (head, depth[head] > depth[tail] + 1)))
        for k in range(depth[tail] + 1, depth[head]):
            layers[k][head, True] = [(None, (head, depth[head] > k + 1))]
    return layers


def _by_time(
    used: list[Step], source: Node, target: Node, horizon: int, arrive: bool
) -> list[Moves]:
    """The layers of walks of `horizon` edges; with `arrive`, only of those that reach the target.

    Raises:
        ValueError: if the target is farther away than the horizon.
    """
    away = _reached(((head, tail) for _, tail, head in used), target)
    if away[source] > horizon:
        raise ValueError(
            f"horizon: the shortest path from {source!r} to {target!r} has {away[source]} edges; "
            f"expected at least as many steps, got {horizon}"
        )
    leaving: dict[Node, list[tuple[int, Node]]] = {}
    for i, tail, head in used:
        leaving.setdefault(tail, []).append((i, head))
    layers: list[Moves] = []
    here: dict[Place, None] = {(source, False): None}
    for left in range(horizon - 1, -1, -1):
        layer: Moves = {}
        for node, waits in here:
            layer[node, waits] = [
                (i, (head, head == target))
                for i, head in ([] if waits else leaving[node])
                if away[head] <= left or not arrive
            ] or [(None, (node, waits))]
        layers.append(layer)
        here = dict.fromkeys(there for moves in layer.values() for _, there in moves)
    return layers


def edges_of(graph: Any) -> tuple[Edge, ...]:
    """The edges of a directed graph of networkx, or of a sequence of pairs.

    Raises:
        ValueError: if there is none, a graph is not directed, or an edge is not a pair of nodes.
    """
    if hasattr(graph, "is_directed"):
        if not graph.is_directed():
            raise ValueError(
                "graph: its edges have no direction; make it directed and acyclic, for example "
                "networkx.DiGraph(edges)"
            )
        graph = graph.edges()
    found: list[Edge] = []
    for i, edge in enumerate(graph):
        if not isinstance(edge, Sequence) or isinstance(edge, str) or len(edge) != 2:
            raise ValueError(f"graph: edge {i} is {edge!r}; expected a pair (tail, head)")
        found.append((edge[0], edge[1]))
    if not found:
        raise ValueError("graph: it has no edge")
    return tuple(found)


def _on_paths(
    edges: Sequence[Edge], nodes: Sequence[Node], source: Node, target: Node
) -> list[Step]:
    """The edges that lie on walks from the source to the first visit of the target.

    Raises:
        ValueError: if a node is unknown, both are the same, or no path connects them.
    """
    for name, node in (("source", source), ("target", target)):
        if node not in nodes:
            raise ValueError(f"{name}: no edge has the node {node!r}")
    if source == target:
        raise ValueError(f"target: {target!r} is the source, so there is no step to decide")
    after = _reached((edge for edge in edges if edge[0] != target), source)
    if target not in after:
        others = [repr(node) for node in after if node != source]
        some = f" ({', '.join(others[:5])}{', ...' if others[5:] else ''})" if others else ""
        raise ValueError(
            f"target: no path leads from {source!r} to {target!r}; the edges lead to "
            f"{len(others)} other nodes{some}"
        )
    before = _reached(((head, tail) for tail, head in edges), target)
    return [
        (i, tail, head)
        for i, (tail, head) in enumerate(edges)
        if tail in after and head in before and tail != target
    ]


def _reached(edges: Iterable[Edge], start: Node) -> dict[Node, int]:
    """The nodes that edges lead to from `start`, itself included, and their least distance."""
    following: dict[Node, list[Node]] = {}
    for tail, head in edges:
        following.setdefault(tail, []).append(head)
    found = {start: 0}
    waiting = [start]
    for node in waiting:  # the list grows
        for head in following.get(node, ()):
            if head not in found:
                found[head] = found[node] + 1
                waiting.append(head)
    return found
