r"""math_verify as a reward: right, wrong and empty answers of each kind that data sets have, as they
write them. Each row was decided by hand; those with "once 1" were accepted by math-verify 0.9.0
though they are wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl_jax.tasks.rewards import math_verify_reward

MATRIX = r"\begin{pmatrix} -1 \\ 7 \end{pmatrix}"
CASES = r"\begin{cases} x = 1 \\ y = 2 \end{cases}"

# (the right answer as a data set has it, answers that are right, answers that are wrong)
ANSWERS = [
    ("12", ["12", "12.0", r"3 \cdot 4", r"\text{12 apples}"], ["13", "-12", "1.2", "x", "12, 13"]),
    ("$12$", ["12"], ["13", "$12"[1:] + "0"]),
    (r"\(7\)", ["7"], ["8"]),
    (r"\[7\]", ["7"], ["8"]),
    (r"\boxed{7}", ["7"], ["8"]),
    ("-2.5E-1", [r"-\frac14", "-0.25"], ["0.25", "-2.5"]),
    ("1e3", ["1,000", "1000", r"1\,000", "1 000", "10^3"], ["13", "1", "0"]),
    ("1,234", ["1234", r"1{,}234", r"1,\!234"], ["1", "234"]),
    ("1 234", ["1234"], ["235"]),  # once 1
    (r"1\,000", ["1000"], ["0"]),  # once 1
    ("1 1/2", ["1.5", r"\frac32", r"1\frac{1}{2}"], ["1", "11/2"]),  # once 1
    (r"\frac{1}{2}", ["0.5", "1/2", ".5", r"50\%"], ["0.05", "2", "1"]),
    (r"0.\overline{3}", [r"\frac13", "1/3", r"0.\overline{3}"], ["0", "0.3", "3"]),  # once 1
    (r"0.1\overline{6}", [r"\frac16"], ["0.1", "0.16"]),
    ("0.00000003", [r"3 \times 10^{-8}"], ["0", "0.00000002", r"2 \times 10^{-8}"]),  # once 1
    ("50%", [r"50\%", "0.5", "50"], ["5", r"0.5\%"]),
    # money, units
    (r"\$18.90", ["18.90", "18.9", r"\$18.90", r"\$18.9"], ["18", "90", "1890"]),
    (r"\$32,\!348", ["32348", "32,348"], ["32", "348"]),
    ("$36", ["36", r"\$36"], ["3", "6"]),
    (r"\$5\text{ million}", ["5000000", "5 million"], ["5"]),  # once 1
    (r"-\$5", ["-5", r"-\$5"], ["5"]),
    ("5 dollars", ["5", r"\$5", r"5 \text{ dollars}"], ["6"]),
    ("5 cm^2", ["5", r"5 \text{ cm}^2"], ["25", "2"]),
    (r"5\text{ minutes}", ["5", "5 min", r"5\,\mathrm{minutes}"], [r"5\text{ hours}", "5 s"]),  # once 1
    ("12 inches", ["12 in", "12"], ["12 feet", "12 cm"]),
    (r"90^\circ", ["90", r"90^{\circ}"], ["9"]),
    # matrices, vectors, equations
    (MATRIX, [MATRIX, r"\begin{bmatrix}-1\\7\end{bmatrix}"], ["7", "-1", MATRIX[:-13] + "8" + MATRIX[-13:]]),
    (f"${MATRIX}$", [MATRIX], ["7"]),
    (r"\begin{smallmatrix} 1 & 2 \end{smallmatrix}", [r"\begin{pmatrix} 1 & 2 \end{pmatrix}"], ["2"]),
    (r"\langle 1, 2 \rangle", [r"\langle 1, 2 \rangle", "(1, 2)"], ["1.2", r"\langle 2, 1 \rangle"]),
    (CASES, [CASES], ["2", "1"]),  # once 1
    ("2", ["2"], [CASES]),  # once 1
    ("x = 5", ["x = 5", "5"], ["y = 5", "x = 6"]),
    ("y = 2x + 3", ["y = 2x + 3", "2y = 4x + 6"], ["y = 2x + 4", "3"]),
    ("x+1", ["1 + x", "x + 1"], ["x", "1", "x - 1"]),
    ("pi/4", [r"\frac{\pi}{4}", "pi/4"], [r"\frac{\pi}{2}"]),
    ("2\u221a3", [r"2\sqrt{3}", "2sqrt(3)", "sqrt12"], [r"\sqrt{6}", "3"]),
    ("(\u221a(5)\u22121)/2", [r"\frac{\sqrt{5}-1}{2}"], [r"\frac{\sqrt{5}+1}{2}"]),
    ("sqrt(2) units", [r"\sqrt{2}", r"\sqrt{2} \text{ units}"], ["2"]),
    ("pi/4 radians", [r"\frac{\pi}{4}"], [r"\pi"]),
    ("x\u00b2 + 1", ["x^2+1"], ["x^3+1", "2x+1"]),
    ("[0, \u221e)", [r"[0, \infty)", "[0, inf)"], [r"(0, \infty)", "0"]),
    ("2\u00b7x", ["2x"], ["x", "2"]),
    ("sin(x)", [r"\sin(x)", r"\sin x"], [r"\cos x", "x"]),
    # sets, intervals, tuples
    (r"$\{1,2\}$", [r"\{2, 1\}", "1, 2"], [r"\{1\}", "1", r"\{1, 2, 3\}", "12"]),
    ("1, 2", ["2, 1", r"1 \text{ and } 2"], ["1", "2", "1.2", "1, 3"]),
    ("(1, 2)", ["(1,2)"], ["(2, 1)", "[1, 2]", r"\{1, 2\}", "1.2"]),  # once 1
    (r"(-\infty, 5]", [r"(-\infty, 5]"], [r"(-\infty, 5)", "5"]),
    (r"[0,1] \cup [2,3]", [r"[2,3] \cup [0,1]"], ["[0,1]", "[0,3]"]),
    (r"\pm 3", ["3, -3", r"\pm 3"], ["3", "-3"]),
    (r"\varnothing", [r"\emptyset"], ["0"]),
    # text, choices
    ("east", ["east", r"\text{east}", "East"], ["seat", r"\text{seat}", "e"]),  # once 1
    (r"\text{Monday}", ["Monday", r"\text{Monday}"], ["Dynamo", "Sunday"]),
    ("New York", ["New York", r"\text{New York}"], ["York", "York New"]),
    ("no", ["no", r"\text{No}"], ["on", "yes"]),  # once 1
    ("A", ["A", r"\text{A}", r"\text{(A)}"], ["B", r"\text{B}"]),
    (r"\text{(C)}", ["C", "(C)"], ["B", "(B)"]),
    ("True", ["True"], ["False"]),
    # no arithmetic
    ("2024-05-01", ["2024-05-01"], ["2018", "2024"]),  # once 1
    ("05/01/2024", ["05/01/2024"], [r"\frac{5}{2024}", "2024"]),
    ("12:30", ["12:30", r"\text{12:30}"], ["0.4", "12", "30"]),  # once 1
    ("3:4", ["3:4"], ["3", "4", "4:3"]),
    ("1010_2", ["1010_2", "1010_{2}"], ["1011_2", "1010_3"]),  # once 1
    ("10", ["10"], ["10_2"]),  # once 1
]  # fmt: skip


@pytest.fixture(scope="module")
def verify():
    return math_verify_reward()


@pytest.mark.parametrize(("answer", "right", "wrong"), ANSWERS, ids=[row[0] for row in ANSWERS])
def test_right_wrong_and_empty_answers(verify, answer, right, wrong):
    scores = {said: verify(rf"So it is $\boxed{{{said}}}$.", answer) for said in right + wrong}
    assert scores == dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)
    for said in ("", r"\boxed{}", "I do not know.", r"\boxed{?}"):
        assert verify(said, answer) == 0


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("3 * 4 makes 12.", "12", 1),
        ("3 * 4 makes 13.", "12", 0),
        ("It is $0.5$", r"\frac{1}{2}", 1),
        ("1,000", "1e3", 1),
        ("$-1/4$", "-2.5E-1", 1),
        ("0.5", "50%", 1),
        (r"$x = \boxed{5}$", "5", 1),
        (r"$-\boxed{5}$", "5", 0),
        (r"$-\boxed{5}$", "-5", 1),
        (r"$\boxed{50}\%$", "0.5", 1),
        (r"\boxed{1} and \boxed{2}", "1, 2", 1),
        (r"\boxed{3}, or maybe \boxed{4}", "3", 0),
        (r"\boxed{5}, as \boxed{} was asked for", "5", 1),
        (r"\fbox{5}", "5", 1),
        ("<think>41</think><answer>42</answer>", "42", 1),
        (r"<think>\boxed{41}</think><answer> $42 </answer>", "42", 1),
        (r"<answer>\boxed{42}</answer>", "42", 1),
        ("<answer>(1,2)</answer>", "(1,2)", 1),
        ("<answer>x+1</answer>", "x+1", 1),
        ("<answer>New York</answer>", "New York", 1),
        ("<answer>There are 3 cats and 4 dogs, so 7 in all.</answer>", "7", 1),
        ("<answer>41</answer> and not 42", "42", 0),
        ("<answer>41 or 42</answer>", "42", 0),
        ("Final answer: **1/2**", "1/2", 1),
        (r"She makes \$18 every day.", "18", 1),
        ("\u7b54\u6848\u662f42\u3002", "42", 1),
        ("\u7b54\u6848\u662f42\u3002", "4", 0),
    ],
)
def test_where_in_a_completion_the_answer_stands(verify, completion, answer, score):
    assert verify(completion, answer) == score


@pytest.mark.parametrize("answer", ["", "$$", r"\boxed{}"])
def test_an_answer_that_cannot_be_read_is_named(verify, answer):
    with pytest.raises(ValueError, match="no expression in the answer"):
        verify("12", answer)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="0123456789+-*/^(){}[]$\\=x,. \nfracsqrt%boxed", max_size=12))
def test_any_completion_has_a_score(verify, text):
    assert verify(text, "12") in (0.0, 1.0)
