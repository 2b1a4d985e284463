"""Derivatives: implicit = unrolled = finite differences.

To second order, in every mode and under every transform.
"""

import pytest
import torch
from oracle import dense_newton
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from zoo import REGULARIZERS, Problem, masked, tensor

import torch_occ as occ

#: Transforms of torch.func are always solved in torch; the other tests run with both backends.
both = pytest.mark.usefixtures("both_backends")


class Both(nn.Module):
    """q and the multipliers, within the reach of `functional_call`."""

    def __init__(self, step: occ.FTRLStep) -> None:
        super().__init__()
        self.step = step

    def forward(self, *arguments, **options):
        solution = self.step.solve(*arguments, **options)
        return solution.q, solution.value


class Case:
    """A step as a function of the loss, of theta = (parameters, t), and of logits.

    The logits tilt the transition probabilities.
    """

    def __init__(self, regularizer: str, problem: Problem) -> None:
        self.mdp, self.loss, t = problem
        self.psi = REGULARIZERS[regularizer](self.mdp)
        self.step = occ.FTRLStep(self.mdp, self.psi)
        self.names = [name for name, _ in self.step.named_parameters()]
        self.shapes = [p.shape for p in self.step.parameters()]
        parameters = [p.detach().flatten() for p in self.step.parameters()]
        self.theta = torch.cat([*parameters, tensor(t).reshape(1)])
        self.tables = [self.mdp.initial, *self.mdp.transitions]
        self.inputs = (
            self.loss,
            self.theta,
            torch.zeros(sum(p.numel() for p in self.tables), dtype=torch.float64),
        )

    def tilted(self, logits: Tensor) -> occ.LayeredMDP:
        """Stays on the simplex, keeps zeros and rows of masked pairs."""
        moved = []
        for table, x in zip(
            self.tables, logits.split([p.numel() for p in self.tables]), strict=True
        ):
            weight = table * x.view_as(table).exp()
            total = weight.sum(-1, keepdim=True)
            moved.append(weight / torch.where(total > 0, total, 1.0))
        return self.mdp.with_transitions(moved[1:], moved[0])

    def parameters(self, theta: Tensor, prefix: str = "") -> dict[str, Tensor]:
        parts = theta[:-1].split([shape.numel() for shape in self.shapes])
        return {
            prefix + name: part.view(shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def implicit(self, loss: Tensor, theta: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        options = {"mdp": self.tilted(logits)}
        return functional_call(
            Both(self.step), self.parameters(theta, "step."), (loss, theta[-1]), options
        )

    def unrolled(self, loss: Tensor, theta: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Four recorded Newton steps from a nearby policy: enough for two derivatives."""
        mdp = self.tilted(logits)
        named = {
            name.removeprefix("regularizer."): value
            for name, value in self.parameters(theta).items()
        }

        def psi(*arguments):
            return functional_call(self.psi, named, arguments)

        with torch.no_grad():
            policy = occ.policy_of(self.mdp, self.step(self.loss, self.theta[-1])) ** 0.999
            q = occ.occupancy(self.mdp, policy / policy.sum(-1, keepdim=True))
        for _ in range(4):
            q, value = dense_newton(mdp, psi, loss, theta[-1], q)
        return q, value


def case(name: str) -> Case:
    return Case(name, masked())


def leaves(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.clone().requires_grad_() for x in inputs)


def close(found: Tensor, expected: Tensor, rtol: float = 1e-10) -> None:
    scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=rtol, atol=rtol * scale)


# -- implicit = finite differences = unrolled ------------------------------------------------------


@both
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_gradcheck(regularizer):
    this = case(regularizer)
    assert torch.autograd.gradcheck(
        this.implicit,
        leaves(this.inputs),
        check_forward_ad=True,
        fast_mode=True,
        rtol=1e-5,
        atol=1e-7,
    )


@both
def test_gradgradcheck():
    """Also in the cotangents of q and of the multipliers, which the unrolled test holds fixed."""
    this = case("jin_luo")

    def both_outputs(loss):
        return this.implicit(loss, *this.inputs[1:])

    assert torch.autograd.gradgradcheck(both_outputs, leaves(this.inputs[:1]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_every_entry_of_the_jacobian_equals_the_unrolled_one(regularizer):
    this = case(regularizer)
    expected = torch.autograd.functional.jacobian(this.unrolled, this.inputs)
    for mode in (jacrev, jacfwd):
        found = mode(this.implicit, argnums=(0, 1, 2))(*this.inputs)
        for found_row, expected_row in zip(found, expected, strict=True):  # q, value
            for a, b in zip(found_row, expected_row, strict=True):  # loss, theta, logits
                close(a, b)


@both
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_second_derivatives_equal_the_unrolled_ones(regularizer):
    this = case(regularizer)
    weights = [
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for shape in ((4, 2), (4,))
    ]

    def twice(function):
        inputs = leaves(this.inputs)
        scalar = sum((w * z).sum() for w, z in zip(weights, function(*inputs), strict=True))
        first = torch.autograd.grad(scalar, inputs, create_graph=True)
        return torch.autograd.grad(
            sum((x.cos() * g).sum() for x, g in zip(inputs, first, strict=True)), inputs
        )

    for a, b in zip(twice(this.implicit), twice(this.unrolled), strict=True):
        close(a, b, 1e-9)


# -- transforms ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "regularizer", ["jin_luo", "shannon", "custom_separable", "custom_statewise", "custom_joint"]
)
def test_vmap_equals_a_loop(regularizer):
    """vmap over the loss, theta, the logits or all of them, and nested; for q and for Jacobians."""
    this = case(regularizer)
    batch = tuple(torch.stack([x, 1.1 * x + 0.01, 1.3 * x + 0.1]) for x in this.inputs)
    for in_dims in [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)]:
        elements = [
            tuple(
                x if dim is None else b[i]
                for x, b, dim in zip(this.inputs, batch, in_dims, strict=True)
            )
            for i in range(3)
        ]
        arguments = tuple(
            x if dim is None else b for x, b, dim in zip(this.inputs, batch, in_dims, strict=True)
        )
        close(
            vmap(this.implicit, in_dims)(*arguments)[0],
            torch.stack([this.implicit(*e)[0] for e in elements]),
            1e-12,
        )
    for dim in (1, 2):  # of the loss, (3, S, A)
        moved = batch[0].movedim(0, dim)
        found = vmap(lambda x: this.implicit(x, *this.inputs[1:])[0], in_dims=dim)(moved)
        close(found, torch.stack([this.implicit(x, *this.inputs[1:])[0] for x in batch[0]]), 1e-12)
    jacobian = jacrev(lambda *inputs: this.implicit(*inputs)[0], argnums=1)
    close(
        vmap(jacobian)(*batch),
        torch.stack([jacobian(*(b[i] for b in batch)) for i in range(3)]),
        1e-12,
    )
    nested = vmap(vmap(this.implicit, (0, None, None)), (None, 0, None))(
        batch[0], batch[1], this.inputs[2]
    )[0]
    loop = [
        [this.implicit(loss, theta, this.inputs[2])[0] for loss in batch[0]] for theta in batch[1]
    ]
    close(nested, torch.stack([torch.stack(row) for row in loop]), 1e-12)


def test_compositions_of_modes_agree():
    this = case("jin_luo")

    def scalar(theta: Tensor) -> Tensor:
        return this.implicit(this.loss, theta, this.inputs[2])[0].square().sum()

    expected = hessian(scalar)(this.theta)
    close(jacrev(jacrev(scalar))(this.theta), expected)
    close(jacrev(jacfwd(scalar))(this.theta), expected)
    third = jacfwd(jacrev(jacrev(scalar)))(this.theta)
    small = torch.zeros_like(this.theta).index_fill(0, torch.tensor(1), 1e-4)
    close(
        third[..., 1],
        (hessian(scalar)(this.theta + small) - hessian(scalar)(this.theta - small)) / 2e-4,
        1e-5,
    )


def test_forward_over_forward_is_right_or_refused():
    """torch drops tangents of a Function under two forward modes (pytorch/pytorch#197867).

    The result must not be returned as a derivative.
    """
    this = case("jin_luo")

    def scalar(theta: Tensor) -> Tensor:
        return this.implicit(this.loss, theta, this.inputs[2])[0].square().sum()

    try:
        found = jacfwd(jacfwd(scalar))(this.theta)
    except (NotImplementedError, RuntimeError) as error:
        assert "jacrev" in str(error)  # noqa: PT017
    else:
        close(found, hessian(scalar)(this.theta))


@both
def test_probabilities_inside_the_model_are_differentiated_in_every_mode():
    """A model built from tensors that carry derivatives, rather than passed as `mdp=`."""
    mdp, loss, t = masked()
    kernel, direction = mdp.transitions[0], torch.zeros_like(mdp.transitions[0])
    direction[0, 0] = tensor([1.0, -1.0])

    def first(kernel: Tensor) -> Tensor:
        model = occ.LayeredMDP(
            [kernel, mdp.transitions[1]], actions=mdp.actions, initial=mdp.initial
        )
        return occ.FTRLStep(model, occ.jin_luo(model, beta=0.5))(loss, t)[0, 0]

    small = 1e-5
    expected = (first(kernel + small * direction) - first(kernel - small * direction)) / (2 * small)
    leaf = kernel.clone().requires_grad_()
    close((torch.autograd.grad(first(leaf), leaf)[0] * direction).sum(), expected, 1e-7)
    close((grad(first)(kernel) * direction).sum(), expected, 1e-7)
    close(jvp(first, (kernel,), (direction,))[1], expected, 1e-7)
