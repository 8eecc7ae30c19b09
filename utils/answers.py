"""The number that a written answer gives, read as a person would read it, and exactly: numbers are fractions.

What is not clearly one number (3\\sqrt{2}, 5x, 10:30, a pair) is none, so that no two different answers are equal.
All of it takes time in proportion to the text.
"""

import re
import unicodedata
from fractions import Fraction

# math-verify 0.9 was tried in place of what follows. It reads more LaTeX, but 12 of the 35 answers in
# tests/test_rewards.py wrong (a minus sign, \fbox, "#### 72" before more text) and 6 of 2,000 solutions of GSM8K.
# It takes 2 ms an answer for our 0.2. Outside the main thread it needs its timeouts off, and then
# \boxed{9^{9^{9^{9}}}} holds the whole process for good.

LONGEST = 100  # characters of a number; more is a model that repeats itself
END = 20_000  # characters of a text's end in which its answer is looked for, where no mark and no box shows it

# ------------------------------------------------------------------------------------------------------ plain text

UNREADABLE = "\ue000"  # a character of no script stands for a part of a formula that is no number
_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-")  # hyphens, the en dash, minus signs
    | dict.fromkeys("\u2014\u2015", " - ")
    | dict.fromkeys("\u00a0\u2002\u2003\u2007\u2008\u2009\u200a\u202f~", " ")
    | dict.fromkeys("\u200b\u2060\ufeff")
    | {"\u2018": "'", "\u2019": "'", "\u2044": "/", "\u2215": "/", "\u22c5": "*", "\u00b7": "*"}
    | dict.fromkeys("\u221a\u03c0\u221e\u00b1", UNREADABLE)  # root, pi, infinity, plus-minus
)
_DECIMAL = r"\d[\d,]*(?:\.\d+)?"
_FRACTION = re.compile(rf"(\d ?)?\\[cdt]?frac *(?:\{{ *(-?{_DECIMAL}) *\}}|(\d)) *(?:\{{ *({_DECIMAL}) *\}}|(\d))")
_FORMULA = re.compile(r"\\(?:[cdt]?frac *\{[^{}]*\}|binom *\{[^{}]*\}|sqrt *(?:\[[^][{}]*\])?|log|ln) *\{[^{}]*\}")
_FUNCTION = re.compile(r"\\(?:[cdt]?frac|binom|sqrt|log|ln|exp|sin|cos|tan|pi|theta|alpha|beta|infty|pm)(?![A-Za-z])")
_WORTH = {"k": "thousand", "K": "thousand", "M": "million", "B": "billion"}
_CURRENCY = r"(?:\b[A-Z]{1,3})?[$€£¥₹₩₽฿]|\b(?:USD|EUR|GBP|INR|CAD|AUD|CNY|RMB|JPY|Rs\.?)(?= ?-?[\d.])"
_REWRITES = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"(\d ?)?([\u00bc-\u00be\u2150-\u215e])", lambda m: _beside(m[1]) + unicodedata.normalize("NFKC", m[2])),
        ("\u2044", "/"),
        ("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+", lambda m: "^" + unicodedata.normalize("NFKC", m[0])),
        ("\u2212", "-"),
        (r"\\\\", "\n"),
        (r"\\!|\\(?:left|right|displaystyle)(?![A-Za-z])|(?<!\d)\*\*|\*\*(?!\d)", ""),
        (r"\*\*", "^"),
        (r"\\[,;:> ()\[\]]|\\q?quad(?![A-Za-z])", " "),
        (r"\\([$%#&_])", r"\1"),
        (r"\{,\}", ","),
        (r"\^ ?\{? ?\\circ(?![A-Za-z]) ?\}?", "°"),
    )
]
_LAST_REWRITES = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\times(?![A-Za-z])", "×"),
        (r"\\cdot(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "÷"),
        (r"\\approx(?![A-Za-z])", "≈"),
        (r"\\(?:[A-Za-z]+)?", r" \\ "),
        (r"(?<=[A-Za-z])( ?)\^ ?(?:\{ ?-?\d ?\}|-?\d)(?!\d)", r"\1"),  # of a unit: m^2
        (r"(?<=\d)(?:[inyz]|x(?! [a-z]{2}))(?![\w'])", UNREADABLE),  # a variable, but not 3x as many
        (r"(?<=[$€£])(\d[\d.,]*) ?([kKMB])\b", lambda m: f"{m[1]} {_WORTH[m[2]]}"),
        (rf"(?<=-)(?:{_CURRENCY}) ?(?=[.\d])", ""),
        (_CURRENCY, " "),
    )
]


def _beside(digit: str | None) -> str:
    """What a fraction follows: of 2 and a half, or nothing."""
    return digit.strip() + " " if digit else ""


def plain(text: str) -> str:
    """LaTeX, Markdown and typography as plain characters; a formula that is no number becomes UNREADABLE."""
    text = text.translate(_CHARACTERS)
    for pattern, by in _REWRITES:
        text = pattern.sub(by, text)
    for _ in range(5 if "\\" in text else 0):  # from the innermost braces outwards
        before = text
        text = _FRACTION.sub(lambda m: f"{_beside(m[1])}{m[2] or m[3]}/{m[4] or m[5]}", text)
        text = _FORMULA.sub(UNREADABLE, text)
        text = re.sub(r"\\(?!(?:[cdt]?frac|binom|sqrt|log|ln)\b)[A-Za-z]+\*? ?\{([^{}]*)\}", r" \1 ", text)
        if text == before:
            break
    text = _FUNCTION.sub(UNREADABLE, text)
    for pattern, by in _LAST_REWRITES:
        text = pattern.sub(by, text)
    return text


# --------------------------------------------------------------------------------------------------------- numbers

_NUMBER = r"(?>(?:\d{1,3}(?:,\d{3}(?!\d))++|\d{1,3}(?:[ '_]\d{3}(?!\d))++|\d++)(?:\.\d++)?|(?<![\w.])\.\d++)"
_TOKEN = re.compile(
    rf"""(?: (?<![A-Za-z\d]) (?<![A-Za-z]_) (?<!_\{{) (?<!\d\.) | (?<=\dx) )
    (?: (?P<none> {_NUMBER}[ ]?{UNREADABLE} (?:[ ]?[-+*/]?[ ]?{_NUMBER})*+
                | \d++(?::\d++)+ | \d{{4}}-\d\d?-\d\d?(?!\d) | \d++/\d++/\d++
                | {_NUMBER}[eE][-+]?\d{{4,}} )  # a time, a ratio, dates
      | (?P<dots> \d++(?:\.\d++){{2,}} )
      | (?: (?P<times> {_NUMBER} ) [ ]?[x×*][ ]? )? 10\^\{{?[ ]?(?P<ten> -?\d{{1,3}} )(?![\d.^])[ ]?\}}?
      | (?P<power> {_NUMBER}[ ]?\^ [{{(]?-?\w*+ )
      | (?P<mantissa> {_NUMBER} )[eE](?P<exponent> [-+]?\d{{1,3}} )(?!\w)
      | (?P<whole> \d++ )(?:[ ]|[ ]and[ ])(?P<part> \d++/\d++ )(?![/\d])
      | (?P<top> {_NUMBER} )[ ]?/[ ]?(?P<bottom> {_NUMBER} )
      | (?P<plain> {_NUMBER} )(?:[ -](?P<worth> hundred|thousand|million|billion|trillion )\b)?
    )
    | (?P<formula> {UNREADABLE} (?:[ ]?[-+*/]?[ ]?{_NUMBER})*+ )
    """,
    re.VERBOSE,
)
_WORDS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


def _exact(digits: str) -> Fraction:
    return Fraction(re.sub("[ ,'_]", "", digits))


def _size(m: re.Match) -> Fraction | None:
    """What the number is without its sign; None where it is not one number."""
    if m["plain"]:
        return _exact(m["plain"]) * _WORDS.get(m["worth"], 1)
    if m["top"]:
        return _exact(m["top"]) / below if (below := _exact(m["bottom"])) else None
    if m["part"]:
        top, below = map(int, m["part"].split("/"))
        return Fraction(top, below) + (int(m["whole"]) if top < below else 0) if below else None
    if m["ten"]:
        return _exact(m["times"] or "1") * Fraction(10) ** int(m["ten"])
    if m["mantissa"]:
        return _exact(m["mantissa"]) * Fraction(10) ** int(m["exponent"])
    if m["dots"] and re.fullmatch(r"\d{1,3}(?:\.\d{3}){2,}", m["dots"]):  # 1.234.567
        return _exact(m["dots"].replace(".", ""))
    return None


def _negative(m: re.Match) -> bool:
    """Whether the minus before the number is its sign, not a dash, a bullet or a subtraction."""
    text, start = m.string, m.start()
    before = text[max(0, start - 12) : start]
    spaced = before.endswith("- ")
    if not spaced and not before.endswith("-"):
        return False
    before = before.rstrip(" ")[:-1]
    line = before.rstrip(" \t")
    if spaced and (not line or line[-1] == "\n"):  # a bullet, unless the number is all there is
        return not line and not text[m.end() :].strip(" .%\n")
    if spaced:
        return line[-1] in "=:(,[{<>≈"
    return not re.search(r"[A-Za-z\d)\]}%$\ue000-]\Z|[\d)][ \t]+\Z", before)


def _value(m: re.Match) -> Fraction | None:
    size = _size(m) if len(m[0]) <= LONGEST else None
    return -size if size and _negative(m) else size


def _alone(m: re.Match) -> Fraction | None:
    """Its value; None for one of several, 1,2 or (1, 2), and for a sum that is not worked out, 84 / 14 or 5 =."""
    before, after = m.string[max(0, m.start() - 60) : m.start()], m.string[m.end() : m.end() + 3]
    several = re.search(r"\d,-?\Z", before) or re.match(r",\d", after)
    several = several or after[:1] in (")", "]") and re.search(r"[(\[][^()\[\]\n]*\d, -?\Z", before)
    unfinished = m["top"] and " " in m[0] or re.match(r" ?= ?\Z", after)
    return None if several or unfinished else _value(m)


def _scan(text: str) -> list[re.Match]:
    """All numbers of a plain text, in order."""
    return list(_TOKEN.finditer(text))


def numbers(text: str) -> list[Fraction]:
    """All numbers of a text, in order, exactly.

    A comma belongs to a number only between groups of three digits, a minus only where it is neither a dash, a
    bullet nor a subtraction. Currencies are skipped, `%` is ignored (15% is 15), and 1/4 is a quarter.

    >>> [float(x) for x in numbers("from -3 to 1,234.50, 12,34 and 5-3")]
    [-3.0, 1234.5, 12.0, 34.0, 5.0, 3.0]
    """
    return [value for match in _scan(plain(text)) if (value := _value(match)) is not None]


# --------------------------------------------------------------------------------------------------------- answers

_DIGIT = re.compile(r"[\d\u00bc-\u00be\u2150-\u215e]")
_LABEL = re.compile(  # of a list's item, or of a step
    r"^[ \t>#*-]*\d{1,2}[.)][ \t]+(?=[A-Za-z])"
    r"|\b(?:[Ss]tep|Part|Case|Method|Section|Problem|Question|Example) \d{1,2}\b",
    re.MULTILINE,
)
_ANSWER = re.compile(r"\b[Aa](?:nswer|NSWER)s?(?: is| are| =|:)[^\w\ue000]{0,8}(?=[\d.])")
_SAYS = re.compile(r"(?:[:=≈]|\b(?:is|are|equals|answer))[^\w\ue000]{0,8}(?=[\d.])", re.IGNORECASE)
_GOES_ON = re.compile(r" ?[-+*/×÷x^=] ?\.?\d")


def boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...} or \fbox{...}, its braces matched, without outer spaces, or None.

    One rule for what a model answers and for a right answer that stage 1 reads from a written solution. A box
    that is never closed does not count, and the one before it does.
    """
    start, last, opened = -1, None, []
    for match in re.finditer(r"\\f?box(?:ed)?\s*\{|[{}]", text):
        if match[0] != "}":
            opened.append(match.end() if match[0] != "{" else -1)
        elif opened:
            begin = opened.pop()
            if begin > start:
                start, last = begin, text[begin : match.start()].strip()
    return last


def one_number(text: str) -> Fraction | None:
    r"""The number of a text that is nothing but a number with a unit or a few words: `x = 5`, `\$42 \text{ a day}`.

    None for a formula, a pair, a time, and for two numbers.
    """
    bare = re.sub(r"\\(?:text|textrm|mathrm|mbox) *\{[^{}]*\}(?: ?\^ ?(?:\{ ?-?\d ?\}|-?\d))?", " ", text)
    text = plain(bare if _DIGIT.search(bare) else text)
    _, sign, right = text.rpartition("=")
    text = right if sign and _DIGIT.search(right) else text
    found = _scan(text)
    if len(found) != 1:
        return None
    before, after = text[: found[0].start()], text[found[0].end() :]
    expression = re.search(r"[+*^<>\\|=÷×\ue000]|^!", after) or re.search(r"[+*^<>\\|÷×]", before.rstrip("+ "))
    variable = re.search(r"(?:\b[A-Za-z]|\)) ?- ?$", before) or re.match(r" ?[-/]? ?[inxyz]\b", after)
    return None if expression or variable else _value(found[0])


def _announced(text: str, found: list[re.Match], words: re.Pattern) -> list[Fraction | None]:
    """The last number that follows such words: [number], [None] for an unfinished sum, [] for none."""
    ends = {match.end() for match in words.finditer(text)}
    last = next((f for f in reversed(found) if f.start() in ends), None)
    if last is None:
        return []
    if not _GOES_ON.match(text, last.end()):
        return [_alone(last)]
    return [] if "=" in text[last.end() :].partition("\n")[0] else [None]


def _in_text(text: str) -> list[Fraction | None]:
    """The answer that a text gives, as [number], or [None] where it is not one number, or [] where it gives none.

    What its last box holds; else the number after "the answer is"; else the last number.
    """
    if not _DIGIT.search(text):
        return []
    box = boxed(text)
    if box is not None and _DIGIT.search(box):
        return [one_number(box)]
    whole = plain(text[-END:])
    for part in (_LABEL.sub(" ", whole), whole):  # `Step 2:` counts only where there is no other number
        if found := _scan(part):
            return _announced(part, found, _ANSWER) or [_alone(found[-1])]
    return []


def _after_mark(piece: str, strict: bool) -> list[Fraction | None]:
    """The same for what follows a ####: the number of its line. `#### Step 2: ...` and the like are headings."""
    line, _, rest = piece.strip().partition("\n")
    box, rest = boxed(line), rest if _DIGIT.search(rest) else ""
    if box is not None and _DIGIT.search(box):
        return [one_number(box)]
    line = plain(line)
    text = _LABEL.sub(" ", line)
    found = _scan(text)
    heading = not found
    if found and re.match(r"\W*[A-Za-z]{2}", text):
        if answer := _announced(text, found, _SAYS):
            return answer
        heading = bool(rest)
    if heading and rest:
        return [] if strict else _in_text(rest)
    found = found or _scan(line)
    if "=" in text and len(result := _scan(text.rpartition("=")[2])) == 1:  # 5 + 6 = 11
        return [_value(result[0])]
    return [None if _GOES_ON.match(f.string, f.end()) else _alone(f) for f in found[:1]]


def final_number(text: str, strict: bool = False) -> Fraction | None:
    """The answer that a response gives: after the last ####; else (not strict) in the last box; else after "the
    answer is"; else the last number. None if there is none, or if what stands there is not one number.

    #### marks win over boxes, because GSM8K's own solutions use them.
    """
    pieces = text.split("####")
    for piece in reversed(pieces[1:]):
        if _DIGIT.search(piece) and (answer := _after_mark(piece, strict)):
            return answer[0]
    answer = [] if strict else _in_text(text)
    return answer[0] if answer else None


def right_number(text: str) -> Fraction | None:
    """The number of a right answer: after ####, in a box, after "the answer is", or all that the text holds."""
    if "####" in text or boxed(text) is not None:
        return final_number(text)
    whole = plain(text)
    answer = _announced(whole, _scan(whole), _ANSWER)
    return answer[0] if answer else one_number(text)
