"""The analysis of Jin and Luo (2020) as functions that are evaluated on any MDP.

Lemmas and the equations of their proofs return both sides as a `Statement`. Of the theorems and
corollaries, which hold up to constants, there are the coefficients, the explicit right-hand sides
and one summand. docs/theory.md lists what there is for each label of the paper, and
experiments/statements.py evaluates all of them on random data.

statements    what a statement is, and the parameters of the paper
curvatures    phi_H, phi_L, the Hessian and its inverse        lem:def_M, lem:M_inverse
terms         the penalty, the stability, and their bounds     lem:key_lemma_bound_penalty
bounds        conditions, constants, bounds, parameters        thm:main_general
runs          the regret of a run as penalty and stability     lem:key_lemma_ftrl
shifted       FTRL with a budgeted shift: lemmas and theorems of docs/adaptive.md
"""

# isort: skip_file
import typing as _typing

from torch_occ._support.choices import former as _former

# The order is that of the table above: a module imports only from those before it.
from torch_occ.theory.statements import Statement as Statement
from torch_occ.theory.statements import Parameters as Parameters

# The Hessian
from torch_occ.theory.curvatures import hybrid as hybrid
from torch_occ.theory.curvatures import log_barrier as log_barrier
from torch_occ.theory.curvatures import hessian as hessian
from torch_occ.theory.curvatures import hessian_of_step as hessian_of_step
from torch_occ.theory.curvatures import quadratic_form as quadratic_form
from torch_occ.theory.curvatures import bregman as bregman
from torch_occ.theory.curvatures import inverse_hessian as inverse_hessian

# Penalty
from torch_occ.theory.terms import bound_on_penalty as bound_on_penalty
from torch_occ.theory.terms import convex_combine as convex_combine
from torch_occ.theory.terms import induction as induction
from torch_occ.theory.terms import induction_equality as induction_equality
from torch_occ.theory.terms import penalty_bound as penalty_bound
from torch_occ.theory.terms import penalty_decomposition as penalty_decomposition
from torch_occ.theory.terms import penalty_term_1 as penalty_term_1
from torch_occ.theory.terms import reach as reach
from torch_occ.theory.terms import sqrt_diff as sqrt_diff
from torch_occ.theory.terms import sqrt_diff_2 as sqrt_diff_2
from torch_occ.theory.terms import state_reach_probability as state_reach_probability

# Stability
from torch_occ.theory.terms import H_and_N as H_and_N
from torch_occ.theory.terms import N_properties as N_properties
from torch_occ.theory.terms import bound_on_stability as bound_on_stability
from torch_occ.theory.terms import expected_norm as expected_norm
from torch_occ.theory.terms import layer_recursion as layer_recursion
from torch_occ.theory.terms import norm as norm
from torch_occ.theory.terms import stability_bound as stability_bound
from torch_occ.theory.terms import stability_first_step as stability_first_step
from torch_occ.theory.terms import stability_second_step as stability_second_step

# Conditions, constants, bounds
from torch_occ.theory.bounds import corruption as corruption
from torch_occ.theory.bounds import gaps as gaps
from torch_occ.theory.bounds import minimal_gap as minimal_gap
from torch_occ.theory.bounds import opt_implicit_bound as opt_implicit_bound
from torch_occ.theory.bounds import performance_difference as performance_difference
from torch_occ.theory.bounds import self_bounding_condition as self_bounding_condition
from torch_occ.theory.bounds import adversarial_bound as adversarial_bound
from torch_occ.theory.bounds import cauchy_schwarz as cauchy_schwarz
from torch_occ.theory.bounds import explicit as explicit
from torch_occ.theory.bounds import lower_order as lower_order
from torch_occ.theory.bounds import main as main
from torch_occ.theory.bounds import main_general as main_general
from torch_occ.theory.bounds import stochastic_bound as stochastic_bound
from torch_occ.theory.bounds import theorem_summand as theorem_summand
from torch_occ.theory.bounds import tune_stochastic as tune_stochastic

# Runs
from torch_occ.theory.runs import close_hessian as close_hessian
from torch_occ.theory.runs import smooth_update as smooth_update
from torch_occ.theory.runs import step_length as step_length
from torch_occ.theory.runs import tilde as tilde
from torch_occ.theory.runs import Decomposition as Decomposition
from torch_occ.theory.runs import Recorder as Recorder
from torch_occ.theory.runs import decompose as decompose
from torch_occ.theory.runs import proper_comparator as proper_comparator
from torch_occ.theory.runs import Certificate as Certificate
from torch_occ.theory import shifted as _shifted  # noqa: F401, it is occ.theory.shifted

#: Where names of version 0.2 are now. They still work here, with a warning, until version 0.4.
_MOVED = {
    "curvatures": ("Curvature M_inverse N_diagonal W curvature hybrid_alternative"),
    "terms": (
        "first_step_bound outside quadratic_form_diagonal second_step_bound state_regularizer "
        "worst_case_stability"
    ),
    "bounds": "Coefficients Summands Tuning proof_constants summands tuning_objective",
    "runs": "Trajectory comparator_point",
}

#: Names that were removed, and what to use instead.
_GONE = {
    "UnknownCertificate UnknownParts unknown_parts": (
        "`regret` of the history of occ.simulate has the sum of its parts"
    ),
    "joint_visits": "theory.reach has the probability of meeting a later state",
    "Block blocks N": "theory.curvatures.all_N has N_0, N_1, ... as matrices",
    "adversarial stochastic": "theory.adversarial_bound and stochastic_bound have all constants",
    "ProofConstants": "theory.bounds.proof_constants returns a tuple",
    "harmonic printed_tuning_order summand worst_case_coefficient": "docs/theory.md has errata",
    (
        "survey M both_definitions hessian_by_layers inverse_by_layers quadratic_form_of_hessian "
        "tangent"
    ): "experiments/statements.py has it",
}

if not _typing.TYPE_CHECKING:  # a type checker would take every name for one that exists

    def __getattr__(name: str) -> object:
        return _former(__name__, name, _MOVED, _GONE)
