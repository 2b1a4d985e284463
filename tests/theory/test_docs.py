"""docs/theory.md maps every label of the paper, its examples run, and the code names no label that the paper does not have."""

import io
import re
from contextlib import redirect_stdout

from documents import ROOT, documented

from torch_occ import theory

TEXT = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")

#: Every \label of the paper's LaTeX source, spelled as it is there.
SOURCE_LABELS = """
alg:main_alg
app:Hessian app:Hessian_inverse app:appendix_corollary_stochastic app:appendix_parameter_choices app:appendix_proof_ftrl
app:appendix_proof_penalty app:appendix_proof_stability app:appendix_theorem_main app:stability_proof
col:adversarial_bound col:stochastic_bound
eq:M_k_inv_decomp eq:R eq:R0 eq:R_bound eq:bound_optimal_case_1 eq:bound_optimal_case_2 eq:convex_eq eq:def_M eq:def_N eq:derivative_1
eq:derivative_2 eq:derivative_3 eq:earlier_argument eq:hybrid eq:hybrid_alternative eq:induction_ineq eq:key_ineq_sqrt_diff eq:log-barrier
eq:mab_main_result eq:main eq:main_goal eq:occupancy_measure_cond_2 eq:penalty_decomposition eq:quadratic_form eq:reachability
eq:related_terms eq:self_bounding_constraint eq:simple_decomposition eq:state_reach_prob_bound eq:tilde_q_def
lem:H_and_N lem:M_inverse lem:M_k_inverse_decomp lem:N_properties lem:bound_penalty lem:bound_stability lem:close_hessian lem:convex_combine
lem:def_M lem:hessian_derivaties lem:induction_state_reach_prob lem:key_lemma_bound_penalty lem:key_lemma_bound_stability lem:key_lemma_ftrl
lem:opt_implict_bound lem:penalty_term_1 lem:proper_comparator lem:quadratic_form_diagonal lem:smooth_update lem:sqrt_diff lem:sqrt_diff_2
lem:stability_first_step lem:stability_second_step lem:state_reach_probabilty
prf:proof_ftrl
sec:FTRL sec:algoritm_main_result sec:analysis sec:broader_impact sec:conclusion sec:preliminaries_self_bounding sec:probform sec:result
thm:main thm:main_general
"""
LABELS = SOURCE_LABELS.split()

PATTERN = re.compile(r"\b(?:alg|app|col|eq|lem|prf|sec|thm):[\w-]*\w")


def test_every_label_is_mapped():
    rows = [line for line in TEXT.split("## Every label")[1].split("## What was read how")[0].splitlines() if line.startswith("| `")]
    mapped = [label for row in rows for label in re.findall(r"`([^`]*)`", row.split("|")[1])]
    assert sorted(mapped) == sorted(LABELS)  # each once
    assert len(LABELS) == len({*LABELS}) == 77


def test_what_the_map_names_exists():
    rows = [line for line in TEXT.split("## Every label")[1].split("## What was read how")[0].splitlines() if line.startswith("| `")]
    for row in rows:
        _, _, _, code, test, _, _ = re.split(r"(?<!\\)\|", row)
        for name in re.findall(r"`([A-Za-z_]\w*)", code):
            assert hasattr(theory, name) or name in ("occ", "recursion"), row
        for name in re.findall(r"[a-z_]+", test.partition(",")[0].replace("`", "")):
            assert list((ROOT / "tests").glob(f"*/test_{name.removeprefix('test_')}.py")), row


def test_the_code_uses_the_papers_labels():
    for path in [
        *(ROOT / "torch_occ" / "theory").glob("*.py"),
        ROOT / "experiments" / "theory.py",
        ROOT / "experiments" / "theory_figures.py",
    ]:
        found = {*PATTERN.findall(path.read_text(encoding="utf-8"))}
        assert found <= {*LABELS}, f"{path.name}: {sorted(found - {*LABELS})}"
    assert {*PATTERN.findall(TEXT)} <= {*LABELS}


def test_every_statement_kind_has_code():
    """Lemmas, theorems and corollaries are all named in a docstring of the package."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "torch_occ" / "theory").glob("*.py"))
    missing = [label for label in LABELS if label.startswith(("lem:", "thm:", "col:")) and f"`{label}`" not in source]
    assert missing == []


def test_the_examples_run_and_print_what_they_say():
    session: dict[str, object] = {"__name__": "theory"}
    for block in re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE):
        output = io.StringIO()
        with redirect_stdout(output):
            exec(compile(block, "docs/theory.md", "exec"), session)
        assert output.getvalue().splitlines() == documented(block), block


def test_links_and_pictures_are_there():
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
