"""docs/theory.md lists every label of the paper, and its examples run.

The code names no label that the paper does not have.
"""

import inspect
import pkgutil
import re

from documents import ROOT

TEXT = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")

#: Every \label of the paper's LaTeX source, spelled as it is there.
SOURCE_LABELS = """
alg:main_alg
app:Hessian app:Hessian_inverse app:appendix_corollary_stochastic app:appendix_parameter_choices
app:appendix_proof_ftrl
app:appendix_proof_penalty app:appendix_proof_stability app:appendix_theorem_main
app:stability_proof
col:adversarial_bound col:stochastic_bound
eq:M_k_inv_decomp eq:R eq:R0 eq:R_bound eq:bound_optimal_case_1 eq:bound_optimal_case_2
eq:convex_eq eq:def_M eq:def_N eq:derivative_1
eq:derivative_2 eq:derivative_3 eq:earlier_argument eq:hybrid eq:hybrid_alternative
eq:induction_ineq eq:key_ineq_sqrt_diff eq:log-barrier
eq:mab_main_result eq:main eq:main_goal eq:occupancy_measure_cond_2 eq:penalty_decomposition
eq:quadratic_form eq:reachability
eq:related_terms eq:self_bounding_constraint eq:simple_decomposition eq:state_reach_prob_bound
eq:tilde_q_def
lem:H_and_N lem:M_inverse lem:M_k_inverse_decomp lem:N_properties lem:bound_penalty
lem:bound_stability lem:close_hessian lem:convex_combine
lem:def_M lem:hessian_derivaties lem:induction_state_reach_prob lem:key_lemma_bound_penalty
lem:key_lemma_bound_stability lem:key_lemma_ftrl
lem:opt_implict_bound lem:penalty_term_1 lem:proper_comparator lem:quadratic_form_diagonal
lem:smooth_update lem:sqrt_diff lem:sqrt_diff_2
lem:stability_first_step lem:stability_second_step lem:state_reach_probabilty
prf:proof_ftrl
sec:FTRL sec:algoritm_main_result sec:analysis sec:broader_impact sec:conclusion
sec:preliminaries_self_bounding sec:probform sec:result
thm:main thm:main_general
"""
LABELS = SOURCE_LABELS.split()

PATTERN = re.compile(r"\b(?:alg|app|col|eq|lem|prf|sec|thm):[\w-]*\w")


KINDS = ("statement", "formula", "coefficients", "right-hand side", "code", "not evaluated")


def entries(heading):
    """The entries of a list below a heading, each as one line."""
    section = re.split(r"^## ", TEXT.split(f"\n{heading}\n")[1], flags=re.MULTILINE)[0]
    if heading.startswith("### "):
        section = section.split("\n### ")[0]
    found = re.findall(r"^- .*(?:\n  .*)*", section, re.MULTILINE)
    return [" ".join(line.strip() for line in entry[2:].split("\n")) for entry in found]


def parsed(entry):
    """Labels, kind, names of code and names of tests."""
    head, _, tail = entry.partition("): ")
    labels, _, kind = head.partition(" (")
    assert kind in KINDS, entry
    code, _, tests = tail.rpartition("Code: ")[2].partition(" Tests: ")
    names = (re.findall(r"`([^`]*)`", code), re.findall(r"\w+", tests))
    return (re.findall(r"`([^`]*)`", labels), kind, *(names if tests else ([], [])))


def test_every_label_is_mapped():
    mapped = [label for entry in entries("## Every label") for label in parsed(entry)[0]]
    assert sorted(mapped) == sorted(LABELS)  # each once
    assert len(LABELS) == len({*LABELS}) == 77


def found(name):
    """The object that the map calls `name`; without a package it is one of torch_occ.theory."""
    package = {"occ": "torch_", "experiments": ""}.get(name.split(".")[0], "torch_occ.theory.")
    return pkgutil.resolve_name(package + name)


def test_what_the_map_names_exists():
    for entry in entries("## Every label"):
        _, kind, code, tests = parsed(entry)
        assert bool(code) == bool(tests) == (kind != "not evaluated"), entry
        objects = [found(name) for name in code]
        if kind == "statement":  # the first name is the function that returns it
            assert "Statement" in str(inspect.signature(objects[0]).return_annotation), entry
        for name in tests:
            pattern = f"*/{name}.py" if name.startswith("test_") else f"theory/test_{name}.py"
            assert list((ROOT / "tests").glob(pattern)), entry


def test_what_is_false_as_printed_has_a_test():
    files = (ROOT / "tests" / "theory").glob("test_*.py")
    written = "".join(path.read_text(encoding="utf-8") for path in files)
    listed = entries("### False as printed")
    assert len(listed) == 17
    for entry in listed:
        _, counterexample, test = re.split(r" Counterexample: | Test: ", entry)
        assert counterexample, entry
        name = re.fullmatch(r"`(test_\w+)`\.", test)
        assert name, entry
        assert f"def {name[1]}(" in written, entry


def test_the_code_uses_the_papers_labels():
    for path in [
        *(ROOT / "torch_occ" / "theory").glob("*.py"),
        *(ROOT / "experiments" / name for name in ("theory.py", "statements.py")),
    ]:
        found = {*PATTERN.findall(path.read_text(encoding="utf-8"))}
        assert found <= {*LABELS}, f"{path.name}: {sorted(found - {*LABELS})}"
    assert {*PATTERN.findall(TEXT)} <= {*LABELS}
