"""Mathematics: answers are compared exactly, problems are right, files are read or refused with their line."""

from __future__ import annotations

import json
import re
from fractions import Fraction

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_nlac.envs.math_problems import generate, latex, worked_out
from rllib_nlac.envs.math_reasoning import MathReasoning
from rllib_nlac.rewards.grading import after_hashes, as_number, boxed, exact_equal, math_equal

fractions = st.fractions(min_value=-1000, max_value=1000, max_denominator=500)


@given(fractions)
def test_a_number_is_read_back_from_every_way_of_writing_it(value):
    sign, a, b = "-" if value < 0 else "", abs(value.numerator), value.denominator
    ways = [
        latex(value),
        f"{value.numerator}/{b}",
        rf"{sign}\dfrac{{{a}}}{{{b}}}",
        rf"\left( {sign}{a}/{b} \right)"[6:-7].strip(" ()"),
    ]
    ways += [f"${latex(value)}$", f"{latex(value)}.", rf"{latex(value)}\,"]
    whole, rest = divmod(Fraction(a, b), 1)
    if whole and rest:
        ways.append(rf"{sign}{whole}\frac{{{rest.numerator}}}{{{rest.denominator}}}")
    assert [as_number(way) for way in ways] == [value] * len(ways)


@given(fractions, fractions)
def test_two_numbers_are_equal_exactly_when_they_are(a, b):
    assert exact_equal(latex(a), latex(b)) == (a == b)


@settings(max_examples=300)
@given(st.text(max_size=60))
def test_no_text_breaks_the_graders(text):
    boxed(text), after_hashes(text), as_number(text)
    assert exact_equal(text, text)


@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    [
        ("1,234", "1234", True),
        ("-1,234,567.50", "-1234567.5", True),
        ("1{,}000", "1000", True),
        (r"1,\!000", "1000", True),
        (r"\frac{1,000}{3}", "1000/3", True),
        ("1,23", "123", False),
        ("0,100", "100", False),
        ("1,2", "1{,}2", True),
        ("(0, 100)", "(0,100)", True),
        ("(0100)", "(0,100)", False),
        ("[1,000]", "[1000]", False),
        (r"\{1, 200\}", r"\{1,200\}", True),
        ("(1,2)", "(1, 2)", True),
        (r"\text{red}", "red", True),
        ("50\\%", "50", True),
        ("0.50", "1/2", True),
        ("1,2", "12", False),
        ("1/0", "0", False),
        ("", "0", False),
        ("x+1", "1+x", False),
        ("12 3", "123", False),
        ("12", "1 2", False),
        ("23/4", "2 3/4", False),
        ("11/4", "2 3/4", True),
        ("-2 3/4", "-2.75", True),
        (r"2\frac{3}{4}", "2 3/4", True),
        ("-1+1/2", "-3/2", False),
        ("-1 1/2", "-3/2", True),
        ("1+1/2", "3/2", True),
        (r"1\ 2", "12", False),
        (r"10\ \text{cm}", "10cm", True),
        ("x + 1", "x+1", True),
        ("3 / 4", "0.75", True),
        ("1, 234", "1234", False),
        ("12345", "12, 345", False),
        ("1 ,234", "1234", False),
        (r"1,\ 234", "1234", False),
        ("$1$, $234$", "1234", False),
        ("1, 234", "1, 234", True),
        ("$1,234$", "1234", True),
        ("2 , 3", "2,3", True),
        (r"\bigl(3,4\bigr)", r"\left(3,4\right)", True),
        (r"\Biggl[3,4\Biggr]", "[3,4]", True),
        (r"x \leftarrow y", "x arrow y", False),
        (r"\dfrac{\pi}{2}", r"\frac{\pi}{2}", True),
        (r"\frac{\sqrt{3}}{2}", r"\tfrac{\sqrt{3}}{2}", True),
        (r"2\dfrac{3}{4}", "2.75", True),
        ("1e3", "1000", False),
        ("5" * 3000, "5", False),
    ],
)
def test_exact_equality(answer, truth, equal):
    assert exact_equal(answer, truth) is equal


def test_boxes_and_hashes():
    assert boxed(r"so \boxed{1} or \boxed{\frac{1}{2}} it is") == r"\frac{1}{2}"
    assert boxed(r"\boxed{a{b}") is None and boxed("none") is None and boxed(r"\boxed 7.") == "7"
    assert after_hashes("a #### 1\n#### 42 \nb") == "42" and after_hashes("42") is None


@pytest.mark.process
def test_math_verify_knows_more_and_cannot_be_hung():
    assert math_equal(r"\{2,1\}", r"\{1,2\}") and math_equal(r"2\sqrt{2}", r"\sqrt{8}") and not math_equal("x", "y")
    assert math_equal("9^{9^{9^{9}}}", r"\sqrt{2}") is False  # ended after five seconds
    assert math_equal("1+x", "x+1")  # and a new worker answers


@settings(max_examples=150)
@given(st.integers(1, 5), st.integers(0, 10**6))
def test_generated_problems_are_reproducible_and_their_answers_canonical(level, seed):
    problem = generate(level, seed)
    assert problem == generate(level, seed) and problem.level == level
    assert latex(as_number(problem.answer)) == problem.answer


def test_answers_agree_with_sympy():
    """Every kind of problem whose text can be read back as a formula is solved a second time, by somebody else."""
    solved = set()
    for level in (1, 2, 3, 4, 5):
        for seed in range(60):
            problem = generate(level, seed)
            text = problem.text
            x, y = sympy.symbols("x y")
            if text.startswith("What is the remainder"):
                base, power, modulus = (
                    int(part)
                    for part in text.replace("^{", " ").replace("}", " ").split()
                    if part.rstrip("?").isdigit()
                    for part in [part.rstrip("?")]
                )
                value, kind = base**power % modulus, "modular"
            elif text.startswith("What is") and "?" in text and "common" not in text and "sum" not in text:
                formula = text[len("What is ") :].split("?")[0].replace(r"\frac{", "(").replace("}{", ")/(").replace("}", ")")
                value, kind = sympy.sympify(formula), f"formula {level}"
            elif text.startswith("Solve for x"):
                left, right = text[len("Solve for x: ") : -1].replace("x", "*x").split("=")
                (value,), kind = sympy.solve(sympy.sympify(left) - sympy.sympify(right), x), "linear"
            elif text.startswith("Given"):
                first, second = text[len("Given ") :].split(", what")[0].replace("x", "*x").replace("y", "*y").split(" and ")
                equations = [sympy.sympify(e.split("=")[0]) - sympy.sympify(e.split("=")[1]) for e in (first, second)]
                found = sympy.solve(equations, [x, y])
                value, kind = found[x] - 2 * found[y], "system"
            elif text.startswith("Let r and s"):
                formula = (
                    text.split("roots of ")[1].split(" = 0")[0].replace("^", "**").replace("x ", "*x ").replace("x** ", "x**")
                )
                formula = formula.replace("x**2", "X").replace("*X", "X").replace("X", "x**2")
                roots = sympy.roots(sympy.sympify(formula), x)
                value, kind = sum(root**2 * count for root, count in roots.items()), "quadratic"
            else:
                continue
            assert Fraction(str(value)) == as_number(problem.answer), problem
            solved.add(kind)
    assert {"formula 1", "formula 2", "formula 3", "linear", "modular", "system", "quadratic"} <= solved


def test_the_right_answer_scores_1_and_a_wrong_one_0():
    env = MathReasoning(level=[3, 4, 5])
    for seed in range(50):
        _, info = env.reset(seed=seed)
        assert env.step(f"Thus {env.expert_action()}.")[1:4] == (1.0, True, False)
        env.reset(seed=seed)
        wrong = latex(as_number(info["privileged"]["answer"]) + Fraction(1, 7))
        _, reward, terminated, _, info = env.step(rf"\boxed{{{wrong}}}")
        assert (reward, terminated, info["success"]) == (0.0, True, False)


def test_a_second_try_where_it_is_allowed():
    env = MathReasoning(level=1, max_turns=2)
    env.reset(seed=0)
    assert env.step("no box")[:4] == (r"No \boxed{} in the answer. Try again.", 0.0, False, False)
    assert env.step(env.expert_action())[1:3] == (1.0, True)


def test_splits_do_not_overlap_and_levels_are_kept():
    tasks = {
        split: {MathReasoning(level=2, split=split).reset(seed=s)[1]["task_id"] for s in range(200)}
        for split in ("train", "eval")
    }
    assert not tasks["train"] & tasks["eval"] and all(task.startswith("level-2-") for task in tasks["train"] | tasks["eval"])


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_no_text_of_an_evaluation_is_in_training(level):
    """Fails where the split goes by seeds: many of them have the same problem."""
    texts = {}
    for split, draws in (("train", 3000), ("eval", 300)):
        env = MathReasoning(level=level, split=split)
        env.reset(seed=0)
        texts[split] = {env.reset()[0] for _ in range(draws)}
    assert not texts["train"] & texts["eval"] and len(texts["eval"]) > 50


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_seed_and_a_name_give_the_same_problem_again(split):
    env, other = MathReasoning(split=split), MathReasoning()
    for seed in range(30):
        text, info = env.reset(seed=seed)
        assert MathReasoning(split=split).reset(seed=seed)[0] == text
        assert other.reset(options={"task_id": info["task_id"]})[0] == text


def test_a_split_without_problems_is_an_error_and_no_endless_search(monkeypatch):
    monkeypatch.setattr("rllib_nlac.envs.math_reasoning.EVAL_SHARE", 0.0)
    with pytest.raises(ValueError, match="none of 1000 problems of level 1 was of the split 'eval'"):
        MathReasoning(level=1, split="eval").reset(seed=0)


MATH = [
    {
        "problem": f"What is {i} + 1?",
        "solution": rf"It is \boxed{{{i + 1}}}.",
        "level": f"Level {1 + i % 5}",
        "type": "Algebra",
        "unique_id": f"test/{i}",
    }
    for i in range(50)
]


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class TestFiles:
    def test_math_rows_by_level_and_held_out_ids(self, tmp_path):
        file = write(tmp_path / "math.jsonl", MATH)
        held = tmp_path / "held.txt"
        held.write_text("test/4\ntest/9\n")
        train = MathReasoning(files=file, level=5, held_out=str(held))
        seen = {train.reset(seed=seed)[1]["task_id"] for seed in range(100)}
        assert seen == {f"test/{i}" for i in range(4, 50, 5)} - {"test/4", "test/9"}
        evaluation = MathReasoning(files=file, level=5, held_out=["test/4", "test/9"], split="eval")
        assert {evaluation.reset(seed=seed)[1]["task_id"] for seed in range(20)} == {"test/4", "test/9"}
        assert evaluation.step(evaluation.expert_action())[1] == 1.0

    def test_gsm8k_rows_in_parquet(self, tmp_path):
        rows = [
            {"question": f"Ada has {i} pears and gets 1000. How many?", "answer": f"{i}+1000\n#### {i + 1000:,}"}
            for i in range(40)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "gsm.parquet")
        env = MathReasoning(files=str(tmp_path / "*.parquet"))
        _, info = env.reset(seed=1)
        assert env.step(rf"\boxed{{{info['privileged']['answer'].replace(',', '')}}}")[1] == 1.0

    def test_without_held_out_a_share_is_kept_apart_by_the_problem_itself(self, tmp_path):
        file = write(tmp_path / "math.jsonl", MATH)
        names = {split: set(MathReasoning(files=file, split=split)._problems) for split in ("train", "eval")}
        again = write(tmp_path / "turned.jsonl", MATH[::-1])
        assert not names["train"] & names["eval"] and len(names["train"] | names["eval"]) == 50
        assert set(MathReasoning(files=again, split="eval")._problems) == names["eval"]

    @pytest.mark.parametrize(
        ("line", "complaint"),
        [
            ('{"problem": "x", ', r"math.jsonl, line 2: not valid JSON"),
            ("[1]", "line 2: a row must be a JSON object"),
            ('{"problem": 3, "solution": "1"}', "line 2: 'problem' must be a text"),
            ('{"solution": "1"}', "line 2: no column 'problem' or 'question' or 'prompt'; the row has 'solution'"),
            ('{"problem": "x", "solution": "' + "word " * 40 + '"}', "line 2: the answer is neither short"),
            ('{"problem": "x", "answer": "1", "level": "hard"}', "line 2: level must be a number"),
            ('{"problem": "x", "answer": "1", "unique_id": "test/0"}', "line 2: the id 'test/0' was there before"),
        ],
    )
    def test_a_malformed_row_is_named_with_its_line(self, tmp_path, line, complaint):
        path = tmp_path / "math.jsonl"
        path.write_text(json.dumps(MATH[0]) + "\n" + line + "\n")
        with pytest.raises(ValueError, match=complaint):
            MathReasoning(files=str(path))

    def test_other_mistakes(self, tmp_path):
        file = write(tmp_path / "math.jsonl", MATH)
        with pytest.raises(FileNotFoundError, match="no file matches"):
            MathReasoning(files=str(tmp_path / "nothing*.jsonl"))
        with pytest.raises(
            ValueError, match=r"none is left in the split 'train' with level \[7\]; the levels there are \[1, 2, 3, 4, 5\]"
        ):
            MathReasoning(files=file, level=7)
        with pytest.raises(ValueError, match="held_out has the id 'nobody'"):
            MathReasoning(files=file, held_out=["nobody"])
        with pytest.raises(ValueError, match="level is 6"):
            MathReasoning(level=6)
        (tmp_path / "bad.parquet").write_text("no")
        with pytest.raises(ValueError, match="not a parquet file"):
            MathReasoning(files=str(tmp_path / "bad.parquet"))
        (tmp_path / "a.csv").write_text("no")
        with pytest.raises(ValueError, match=r"tasks are read from .jsonl and .parquet"):
            MathReasoning(files=str(tmp_path / "a.csv"))


class TestWorkedOut:
    @given(st.integers(0, 99), st.integers(0, 99), st.sampled_from("+-"))
    def test_each_step_is_true_and_the_last_is_the_answer(self, a, b, sign):
        text = worked_out(f"What is {a} {sign} {b}?")
        steps = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", text)
        assert len(steps) == 2
        for left, operation, right, said in steps:
            assert int(said) == (int(left) + int(right) if operation == "+" else int(left) - int(right))
        assert int(re.split(" = | so ", text)[-1]) == (a + b if sign == "+" else a - b)

    @pytest.mark.parametrize("text", ["What is 3 * 4?", "What is 100 + 1?", "Add 3 + 4."])
    def test_other_problems_have_none(self, text):
        assert worked_out(text) is None

    def test_the_expert_judges_by_the_steps(self):
        env = MathReasoning(level=1)
        env.reset(options={"task_id": "level-1-3"})
        answer = boxed(env.expert_action())
        is_best, why = env.expert_judgement(env.expert_action())
        assert is_best and why == f"{worked_out(env._current.task.text)}, and {answer} was said."
        assert env.expert_judgement("I do not know.") == (False, why.replace(f"{answer} was said", "I do not know. was said"))
