"""Answers as models write them, and the number that a person reads in each."""

import time
from fractions import Fraction

import pytest

from utils.answers import final_number, numbers, one_number, right_number
from utils.config import UserError
from utils.rewards import check_ground_truth, gsm8k_score

HALF = Fraction(1, 2)

SIGNS = [
    ("Answer - 42", 42),
    ("Answer \u2013 42", 42),
    ("Answer \u2014 42", 42),
    ("Answer\u201442", 42),
    ("Total cost - $42", 42),
    ("Answer:\n- 42 apples", 42),
    ("Costs:\n - $40\n - $42", 42),
    ("- 42 apples", 42),
    ("- 42", -42),
    ("42 - that is all", 42),
    ("1 + 1 = 2\n-2", -2),
    ("The profit was 10\n-$5", -5),
    ("5 -3", 3),
    ("The answer is \u20135", -5),
    ("The answer is \u22125", -5),
    ("The answer is \uff0d5", -5),
    ("The answer is -5", -5),
    ("x = - 5", -5),
    ("(-42)", -42),
    ("$-42$", -42),
    ("-$42", -42),
    ("-\u20ac5.50", Fraction(-11, 2)),
    ("-\u00bd", -HALF),
    ("36 ounces - 6 ounces", 6),
    ("\u7b54\u6848\u662f-42\u3002", -42),
    ("+42", 42),
]

MARKS = [
    ("#### Step 2: done\nThe answer is 42.", 42),
    ("#### 2. Add them up\nThe answer is 42.", 42),
    ("#### Cost of 3 shirts\nThey cost $42", 42),
    ("#### Final answer\n42", 42),
    ("#### 41\n#### Conclusion", 41),
    ("#### Conclusion", None),
    ("#### 5 + 6 = 11", 11),
    ("#### 6 * 7 = 42 apples", 42),
    ("#### 5 + 6", None),
    ("#### 10 - 15", None),
    ("#### x = 5", 5),
    ("#### The answer is 72", 72),
    ("#### Answer: 72 in 3 days", 72),
    ("#### There are 42 apples", 42),
    ("#### 42. That is all", 42),
    ("####\n72", 72),
    ("#### **72**", 72),
    (r"#### \boxed{72}", 72),
    (r"#### $\frac{1}{2}$", HALF),
    ("#### - 5", -5),
    ("#### 10:30", None),
    ("#### 72\n\nNote: 3 were left over.", 72),
]

FORMS = [
    ("3e2", 300),
    ("1.5e3", 1500),
    ("1.5E-3", Fraction(15, 10_000)),
    ("3 x 10^2", 300),
    (r"$3 \times 10^{2}$", 300),
    ("3 \u00b7 10\u00b2", 300),
    ("1.5 \u00d7 10\u207b\u00b3", Fraction(15, 10_000)),
    ("10^6", 10**6),
    ("1e999999", None),
    ("48 000", 48000),
    ("The answer is 48 000.", 48000),
    ("The answer is 1 234 567 dollars.", 1234567),
    ("48\u00a0000", 48000),
    ("48\u202f000", 48000),
    ("48\u2009000", 48000),
    ("48'000", 48000),
    ("48\u2019000.50", Fraction(96001, 2)),
    ("1.234.567", 1234567),
    ("10_000", 10000),
    ("2 1/2", Fraction(5, 2)),
    ("2 and 1/2 hours", Fraction(5, 2)),
    ("2\u00bd", Fraction(5, 2)),
    ("\u00bd", HALF),
    ("1\u20442", HALF),
    ("5 million", 5 * 10**6),
    ("$1.5 million", 1_500_000),
    ("It costs $48k.", 48000),
    ("\uff14\uff12", 42),
    ("US$42", 42),
    ("42 \u20ac", 42),
    ("Rs.500", 500),
    ("USD42", 42),
    ("42 USD", 42),
    ("$42/hour", 42),
    ("42 km/h", 42),
    ("42 m^2", 42),
    ("42 cm\u00b2", 42),
    ("42 m^{3}", 42),
    ("42kg", 42),
    ("42\u00b0", 42),
    ("42 percent", 42),
    (r"42\%", 42),
    ("42 kg of CO2", 42),
    ("42 for the mp3 player", 42),
    ("**Answer:** 42", 42),
    ("**Answer: 42**", 42),
    ("The answer is **42** apples.", 42),
    ("*42*", 42),
    ("`42`", 42),
    ("<answer>42</answer>", 42),
    ("The answer is 42. I hope that this helps you 100%!", 42),
    ("The answer is 42.\nIt took 3 steps.", 42),
    ("Answer: $42 (7 days)", 42),
    ("The answer is 5 + 37 = 42", 42),
    ("The answer is 5 + 37", None),
    ("He must answer 3 questions in 42 minutes", 42),
    ("1. First, 42 apples.\n2. That is all.", 42),
    ("Step 1: 5\nStep 2: it is 42\nStep 3: done", 42),
    ("1. Apples: 5\n2. Pears: 6", 6),
    ("x_1 = 5 and so is x_{2}", 5),
    (r"\(x = 5\)", 5),
    (r"\[ \begin{aligned} x &= 42 \end{aligned} \]", 42),
    (r"x\approx42", 42),
    ("3x as many", 3),
    ("42\ufffd", 42),  # half a character
    ("2 ** 10 = 1024", 1024),
    ("48/2 = <<48/2=24>>24 clips", 24),
    ("$1,000/4", 250),
    ("He has 84 / 14", None),  # not worked out
    ("He has 84/14 =", None),
    ("They meet at 10:30", None),
    ("The ratio is 3:4.", None),
    ("on 12/25/2024", None),
    ("on 2024-12-25", None),
    ("version 1.2.3", None),
    ("(1,2)", None),
    ("The point is (1, 2)", None),
    ("3,5", None),
    ("2^10", None),
    ("5x", None),
    (r"3\sqrt{2}", None),
    (r"\sqrt2", None),
    ("3\u221a2", None),
    ("2\u03c0", None),
    (r"\frac{2x}{3}", None),
    (r"\frac{\sqrt{3}}{2}", None),
    (r"\frac12", HALF),
    (r"\tfrac{1}{2}", HALF),
    (r"\frac1{2}", HALF),
    (r"\frac{-1}{2}", -HALF),
    (r"-\frac{1}{2}", -HALF),
    (r"2\frac{1}{2}", Fraction(5, 2)),
    (r"\frac{1{,}000}{4}", 250),
]

BOXES = [
    (r"1{,}234", 1234),
    (r"10,\!000", 10000),
    (r"10\,000", 10000),
    (r"42 \text{ in 3 days}", 42),
    (r"42\text{ cm}^2", 42),
    (r"42\ \mathrm{cm}^{3}", 42),
    (r"\text{42 apples}", 42),
    (r"\text{Answer: }42", 42),
    (r"\mathbf{42}", 42),
    (r"\$42", 42),
    (r"42\%", 42),
    (r"90^\circ", 90),
    (r"x = 5", 5),
    (r"x = -\dfrac{1}{2}", -HALF),
    (r"6 \times 7 = 42", 42),
    (r"\approx 3.14", Fraction(157, 50)),
    (r"2 \frac12", Fraction(5, 2)),
    (r"7/2", Fraction(7, 2)),
    (r"10^3", 1000),
    (r"-5", -5),
    (r"- 5", -5),
    (r"+5", 5),
    (r"5 + x", None),
    (r"5 - x", None),
    (r"x - 5", None),
    (r"5x", None),
    (r"5 x", None),
    (r"5/x", None),
    (r"x > 5", None),
    (r"x \ge 5", None),
    (r"\pm 5", None),
    (r"|5|", None),
    (r"5!", None),
    (r"2\pi", None),
    (r"2^{10}", None),
    (r"\log 100", None),
    (r"\frac{x+2}{3}", None),
    (r"\frac{1}{\sqrt{2}}", None),
    (r"5, 6", None),
    (r"5 \text{ or } 6", None),
    (r"(1, 2)", None),
    (r"3 : 4", None),
]


@pytest.mark.parametrize("text, answer", SIGNS + MARKS + FORMS)
def test_the_answer_that_a_person_reads(text, answer):
    assert final_number(text) == answer


@pytest.mark.parametrize("inside, answer", BOXES)
def test_a_box_is_one_number_or_none(inside, answer):
    assert final_number(rf"With 7 in mind: $\boxed{{{inside}}}$, after 9 steps.") == answer
    assert one_number(inside) == answer


@pytest.mark.parametrize(
    "text, answer",
    [
        ("#### Step 2: done\nThe answer is 42.", None),
        ("#### Cost of 3 shirts\nIt is 42", None),
        ("#### Answer: 42", 42),
        ("#### 5 + 6 = 11", 11),
        ("#### 42 apples\nin 3 days", 42),
        (r"\boxed{42}", None),
    ],
)
def test_strict_reads_the_line_of_the_mark(text, answer):
    assert final_number(text, strict=True) == answer


@pytest.mark.parametrize(
    "one, other",
    [
        (r"\tfrac{1}{2}", r"\tfrac{3}{2}"),
        (r"\frac{2x}{3}", r"\frac{5x}{3}"),
        (r"\frac{2x}{3}", "3"),
        (r"3\sqrt{2}", "2"),
        (r"3\sqrt{2}", "3"),
        (r"2\pi", "2"),
        ("10:30", "30"),
        ("10:30", "10"),
        ("(1, 2)", "2"),
        ("3:4", "4"),
        ("2^10", "10"),
        ("x^2 + 3x", "3"),
        ("5 million", "5"),
        ("1.2.3", "3"),
        ("1,5", "5"),
        (r"\frac{1}{2}", "2"),
        ("2 1/2", HALF),
        ("-5", "5"),
    ],
)
def test_two_different_answers_are_never_equal(one, other):
    for form in ("{}", "The answer is {}.", "$$\\boxed{{{}}}$$", "#### {}"):
        assert gsm8k_score(form.format(one), str(other)) == gsm8k_score(form.format(other), str(one)) == 0


@pytest.mark.parametrize(
    "text, number",
    [
        ("42", 42),
        ("-1,234.50", Fraction(-2469, 2)),
        ("x=5", 5),
        ("$42", 42),
        ("42 apples", 42),
        ("15%", 15),
        (r"\frac{3}{4}", Fraction(3, 4)),
        ("She has 48 left, in all.", 48),
        ("2 + 2 = 4. 4 x 3 = 12\n#### 12", 12),
        (r"So 3 of 4, which is $\boxed{\frac34}$.", Fraction(3, 4)),
        ("In 3 days she earns 40 + 2. The answer is 42.", 42),
    ],
)
def test_right_answers(text, number):
    assert right_number(text) == number
    check_ground_truth([{"id": "r1", "ground_truth": text}])


@pytest.mark.parametrize(
    "gold",
    ["(1,2)", "(1, 2)", "10:30", "3:4", "1/0", "5 or 6", "5x", "x", r"3\sqrt{2}", r"\frac{2x}{3}", r"\boxed{5, 6}"]
    + ["12/25/2024", "5 + 6", "x > 5", "#### 10:30", "3 boys and 4 girls"],
)
def test_what_is_not_one_number_is_refused_as_a_right_answer(gold):
    with pytest.raises(UserError, match="row r1: ground_truth .* is not a number"):
        check_ground_truth([{"id": "r1", "ground_truth": gold}])
    assert gsm8k_score(gold, gold) == 0


ENDLESS = {
    "digits": lambda n: "0." + "3" * n,
    "one digit": lambda n: "9" * n,
    "numbers": lambda n: " ".join(map(str, range(n))),
    "boxes": lambda n: r"\boxed{" * n,
    "boxes of numbers": lambda n: r"\boxed{1" * n,
    "closed boxes": lambda n: r"\boxed{1" * n + "}" * n,
    "fractions": lambda n: r"\frac{1}{" * n,
    "braces": lambda n: r"\text{" * n + "1" + "}" * n,
    "marks": lambda n: "#### \n" * n,
    "headings": lambda n: "#### Step 1\nx\n" * n,
    "groups": lambda n: "1,234" + ",234" * n + "5",
    "commas": lambda n: "1," * n,
    "slashes": lambda n: "1/" * n,
    "dots": lambda n: "1." * n,
    "powers": lambda n: "2^" * n,
    "dashes": lambda n: "- " * n + "1",
    "spaces": lambda n: " " * n + "1",
    "lines": lambda n: "\n" * n + "1",
    "dollars": lambda n: "-$" * n + "1",
    "pairs": lambda n: "(1, " * n + "1)",
    "steps": lambda n: "Step 1. " * n,
    "answers": lambda n: "the answer is " * n + "1",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_answers_take_linear_time(name):
    """5,000 pieces are read in a few hundredths of a second; squared time would need minutes for 20,000."""
    started = time.perf_counter()
    final_number(ENDLESS[name](20_000))
    one_number(ENDLESS[name](5_000))
    assert time.perf_counter() - started < 5


def test_endless_numbers_are_no_answers():
    assert final_number("0." + "3" * 4400) is None
    assert final_number("9" * 4400) is None
    assert right_number("9" * 4400) is None
    assert final_number(" ".join(map(str, range(16_000)))) == 15_999
    assert numbers("1 " + "9" * 4400 + " 2") == [1, 2]
    assert numbers("9" * 99) == [10**99 - 1]
