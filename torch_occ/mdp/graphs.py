"""A directed acyclic graph as a layered MDP: its paths are the deterministic policies.

The layer of a node is the length of the longest path that leads to it from the source. An edge is
an action of its tail. An edge that skips layers leads to states of waiting, one per skipped layer,
each with one action; edges to the same node share them. So paths of the graph and deterministic
paths of the MDP correspond one to one, and q(tail, edge) is the flow through the edge.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import occupancy, optimal_policy, policy_of
from torch_occ.mdp.unroll import ABSORBING

Node = Hashable
Edge = tuple[Node, Node]

#: The largest layer, in numbers of its table (S_k, A, S_{k+1}), that is stored densely. The engine
#: reads dense tables faster, and takes rows from them by itself where these are faster.
DENSE_TABLE = 20_000


class GraphMDP(LayeredMDP):
    """A `LayeredMDP` made of a directed acyclic graph; `LayeredMDP.from_graph` makes it.

    Costs and flows of edges have the shape `(*batch, E)`, in the order of `edges`. `to`, `prune`
    and `with_transitions` return a plain `LayeredMDP`.

    Args:
        edges: the edges of the graph, (tail, head) each.
        nodes: the nodes of the graph; `origin` refers to them. States of waiting have the origin
            `ABSORBING`.
        pairs: the pair s * A + a of each edge `(E,)`; S * A for edges on no path.
        layout: arguments of `LayeredMDP`.
    """

    edges: tuple[Edge, ...]
    nodes: tuple[Node, ...]

    def __init__(
        self, *, edges: tuple[Edge, ...], nodes: tuple[Node, ...], pairs: Tensor, **layout: Any
    ) -> None:
        super().__init__(**layout)
        size = self.num_states * self.num_actions
        owner = torch.full((size + 1,), len(edges))
        owner[pairs] = torch.arange(len(edges))
        for name, value in (
            ("edges", edges),
            ("nodes", nodes),
            ("_pairs", pairs),
            ("_owner", owner[:size]),
            ("_all_used", bool((pairs < size).all())),
        ):
            object.__setattr__(self, name, value)

    _pairs: Tensor  # (E,), the pair of each edge
    _owner: Tensor  # (S * A,), the edge of each pair; E where there is none
    _all_used: bool

    def losses(self, costs: Tensor) -> Tensor:
        """The losses of pairs from costs of edges: `(*batch, E)` -> `(*batch, S, A)`.

        Waiting costs nothing. The result has the number type of the MDP, and is differentiable.

        Raises:
            ValueError: if the costs have another shape.
        """
        self._check_edges("costs", costs)
        padded = torch.nn.functional.pad(costs.to(self.dtype), (0, 1))
        table = padded.index_select(-1, self._owner)
        return table.unflatten(-1, (self.num_states, self.num_actions))

    def flows(self, q: Tensor) -> Tensor:
        """The flow through each edge: `(*batch, S, A)` -> `(*batch, E)`, differentiable.

        An edge that lies on no path from the source to the target has the flow zero.

        Raises:
            ValueError: if q has another shape.
        """
        if q.shape[-2:] != self.actions.shape:
            raise ValueError(
                f"q: expected shape (*batch, {self.num_states}, {self.num_actions}), "
                f"got {tuple(q.shape)}"
            )
        flat = q.flatten(-2)
        if not self._all_used:
            flat = torch.nn.functional.pad(flat, (0, 1))
        return flat.index_select(-1, self._pairs)

    def occupancy_of(self, flows: Tensor) -> Tensor:
        """The occupancy measure of flows `(*batch, E)` -> `(*batch, S, A)`: the inverse of `flows`.

        Args:
            flows: a unit of flow from the source to the target, for example a path as zeros and
                ones.

        Raises:
            ValueError: if flows have another shape, are negative, or are not conserved; the message
                names the edge or the node.
        """
        self._check_edges("flows", flows)
        # Unvisited states and states of waiting have no flow on edges; the uniform policy continues
        # from there.
        q = occupancy(self, policy_of(self, self.losses(flows)))
        self._check_flows(flows.to(self.dtype), self.flows(q))
        return q

    @torch.no_grad()
    def shortest_path(self, costs: Tensor) -> Tensor:
        """The path of least cost, one on its edges and zero elsewhere: `(*batch, E)` -> the same.

        Costs may be negative. Of equal paths, the one is taken whose first different edge comes
        first in `edges`.

        Raises:
            ValueError: if the costs have another shape.
        """
        plan = optimal_policy(self, self.losses(costs.detach()))
        return self.flows(occupancy(self, plan.policy))

    def _check_edges(self, name: str, x: Tensor) -> None:
        if x.shape[-1:] != (len(self.edges),):
            raise ValueError(
                f"{name}: expected shape (*batch, {len(self.edges)}), one number per edge, "
                f"got {tuple(x.shape)}"
            )

    def _check_flows(self, given: Tensor, found: Tensor) -> None:
        # Flows of a network have errors of single precision.
        wrong = ~((given >= -1e-6) & ((given - found).abs() <= 1e-6))
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            batch = f", element {list(place[:-1])}" if len(place) > 1 else ""
            raise ValueError(
                f"flows: edge {place[-1]}, {self.edges[place[-1]]}{batch}: found "
                f"{float(given[place]):g}; expected a unit of flow from the source to the target, "
                "nonnegative, and as much into every other node as out of it"
            )


def from_graph(
    graph: Any, source: Node, target: Node, dtype: torch.dtype = torch.float64
) -> GraphMDP:
    """See `LayeredMDP.from_graph`."""
    edges = edges_of(graph)
    nodes = tuple(dict.fromkeys(node for edge in edges for node in edge))
    used = edges_on_paths(edges, source, target)
    depth = depths([edges[i] for i in used], source)
    # The states of each layer: (node, False), or (node, True) for waiting for that node.
    layers: list[dict[tuple[Node, bool], int]] = [{} for _ in range(depth[target])]
    for node in nodes:
        if node in depth and node != target:
            layer = layers[depth[node]]
            layer[node, False] = len(layer)
    for i in used:
        tail, head = edges[i]
        for k in range(depth[tail] + 1, depth[head]):
            layers[k].setdefault((head, True), len(layers[k]))
    # What each state can do: the states of the next layer that its actions lead to.
    choices: list[list[list[int]]] = [[[] for _ in layer] for layer in layers]
    chosen: dict[int, tuple[int, int, int]] = {}  # of each edge: layer, state and action
    for i in used:
        tail, head = edges[i]
        k = depth[tail]
        state = layers[k][tail, False]
        chosen[i] = (k, state, len(choices[k][state]))
        choices[k][state].append(_arrival(layers, k, head, depth[head]))
    for k, layer in enumerate(layers):
        for (node, waits), state in layer.items():
            if waits:
                choices[k][state].append(_arrival(layers, k, node, depth[node]))
    num_actions = max(len(actions) for layer in choices for actions in layer)
    starts = [0]
    for layer in layers:
        starts.append(starts[-1] + len(layer))
    pairs = [starts[-1] * num_actions] * len(edges)
    for i, (k, state, action) in chosen.items():
        pairs[i] = (starts[k] + state) * num_actions + action
    number = {node: i for i, node in enumerate(nodes)}
    origin = [ABSORBING if waits else number[node] for layer in layers for node, waits in layer]
    sizes = [*(len(layer) for layer in layers), 1]
    counts = torch.tensor([len(actions) for layer in choices for actions in layer])
    return GraphMDP(
        edges=edges,
        nodes=nodes,
        pairs=torch.tensor(pairs),
        transitions=[
            _edge_table(layer, num_actions, sizes[k + 1], dtype) for k, layer in enumerate(choices)
        ],
        actions=torch.arange(num_actions) < counts.unsqueeze(-1),
        origin=torch.tensor(origin),
    )


def _arrival(layers: Sequence[dict[tuple[Node, bool], int]], k: int, head: Node, depth: int) -> int:
    """The state of layer k + 1 on the way to `head`, which is in layer `depth`."""
    if k + 1 == len(layers):
        return 0  # the terminal state
    return layers[k + 1][head, depth > k + 1]


def _edge_table(
    choices: Sequence[Sequence[int]], num_actions: int, num_next: int, dtype: torch.dtype
) -> Tensor:
    """Deterministic transitions of a layer: `(S_k, A, S_{k+1})`, or sparse `(S_k * A, S_{k+1})`."""
    rows = [s * num_actions + a for s, next_ in enumerate(choices) for a in range(len(next_))]
    columns = [following for next_ in choices for following in next_]
    shape = (len(choices) * num_actions, num_next)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([rows, columns]), torch.ones(len(rows), dtype=dtype), shape,
        check_invariants=False,
    )  # fmt: skip
    if shape[0] * num_next > DENSE_TABLE:
        return sparse
    return sparse.to_dense().unflatten(0, (len(choices), num_actions))


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


def edges_on_paths(edges: Sequence[Edge], source: Node, target: Node) -> list[int]:
    """The indices of the edges that lie on walks from the source to the first visit of the target.

    Raises:
        ValueError: if a node is unknown, both are the same, or no path connects them.
    """
    known = {node for edge in edges for node in edge}
    for name, node in (("source", source), ("target", target)):
        if node not in known:
            raise ValueError(f"{name}: no edge has the node {node!r}")
    if source == target:
        raise ValueError(f"target: {target!r} is the source, so there is no step to decide")
    after = _reached((edge for edge in edges if edge[0] != target), source)
    if target not in after:
        raise ValueError(
            f"target: no path leads from {source!r} to {target!r}; the edges lead to "
            f"{len(after) - 1} other nodes{_some(after, source)}"
        )
    before = _reached(((head, tail) for tail, head in edges), target)
    return [
        i
        for i, (tail, head) in enumerate(edges)
        if tail in after and head in before and tail != target
    ]


def _reached(edges: Iterable[Edge], start: Node) -> dict[Node, None]:
    """The nodes that edges lead to from `start`, itself included, in order of discovery."""
    following: dict[Node, list[Node]] = {}
    for tail, head in edges:
        following.setdefault(tail, []).append(head)
    found: dict[Node, None] = {start: None}
    waiting = [start]
    while waiting:
        for node in following.get(waiting.pop(), ()):
            if node not in found:
                found[node] = None
                waiting.append(node)
    return found


def _some(nodes: Iterable[Node], but: Node) -> str:
    names = [repr(node) for node in nodes if node != but]
    return f" ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else ""


def depths(edges: Sequence[Edge], source: Node) -> dict[Node, int]:
    """The length of the longest path from the source to each node.

    Raises:
        ValueError: if there is a cycle; the message shows it.
    """
    before: dict[Node, list[Node]] = {source: []}
    for tail, head in edges:
        before.setdefault(head, []).append(tail)
    found: dict[Node, int] = {}
    try:
        for node in TopologicalSorter(before).static_order():
            found[node] = max((found[tail] + 1 for tail in before[node]), default=0)
    except CycleError as error:
        cycle = error.args[1]  # each node comes before the next one
        raise ValueError(
            f"graph: it has the cycle {' -> '.join(map(repr, cycle))}; a layered MDP needs a graph "
            "without cycles"
        ) from None
    return found
