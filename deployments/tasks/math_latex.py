"""Brings the ways in which people write one answer to the one that math-verify reads. Takes linear time.

Each rule is for a form that math-verify 0.9 reads as another number, or not at all.
"""

import operator
import re
from collections.abc import Callable
from fractions import Fraction
from math import prod

VULGAR_FRACTIONS = {2: "½", 3: "⅓⅔", 4: "¼ ¾", 5: "⅕⅖⅗⅘", 8: "⅛ ⅜ ⅝ ⅞"}
CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u00a0\u2002\u2003\u2005\u2007\u2009\u202f", "~"),
        **dict.fromkeys("\u2012\u2013\u2212", "-"),
        **dict.fromkeys("€£¥", ""),
        **{"×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt "},
        **{"≤": r"\le ", "≥": r"\ge ", "°": r"^\circ ", "…": r"\ldots ", "²": "^2", "³": "^3"},
        **{
            character: f" {numerator}/{denominator}"
            for denominator, characters in VULGAR_FRACTIONS.items()
            for numerator, character in enumerate(characters, 1)
            if character != " "
        },
    }
)
ELLIPSIS = r"\Xi_{99} "
"""A symbol that no answer has: lists with an ellipsis are equal if they have it in common with all else."""
END = r"(?=\s*+\.?\s*+(?:[}$,;]|\\[)\]]|\Z))"
"""The end of a formula or of an item of a list."""
SPACE = r"(?<!\\)\\[,;:> ]|~|\\(?:quad|qquad|thinspace|enspace)(?![a-zA-Z])|\\[hm]space\*?\{[^{}]*+\}"
GROUP = r"(?:\\[,;: !]|~|\{(?:\\?,)\}|,\\!\s?| )\d{3}(?!\d)"
"""Three more digits of a number."""
NO_LIST = r"(?!\s*+,)"
NOT_MIXED = r"(?!\d{1,3}(?:\\[,;: ]|~| )[1-9]\d\d *+/ *+\d)"
AS_TEXT = r"\\(?:text(?:bf|rm|it|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|emph)\s*+(?=\{)"
BOLD = r"\\(?:boldsymbol|bm|pmb|bold)"
WORDS = r"[^{}$\\]*+"
POWER = r"\^(?:\{\s*+-?\d\s*+\}|-?\d)"
UNIT = rf"\\text\{{{WORDS}(?>(?:(?:\\[,;: ]|\\cdot|{POWER}){WORDS})*)\}}(?>(?:{POWER})?)"
PLAIN_UNIT = (
    r"[kcmd]m\^(?:[23]|\{[23]\})|(?:k?m|ft|mi)/(?:h|s|hr|min|s\^(?:2|\{2\}))|USD|EUR|GBP|dollars?|euros?|degrees?|radians?|units?"
    r"|(?:square|cubic) (?:units?|centimeters?|met(?:er|re)s?|inches|feet|miles?|yards?|cm|ft|m)"
)
SOME = r"{1,20}"
"""How often a part may come where a longer text would be looked through again and again. It stands in an atomic group:
before 3.11.5 Python matches the possessive repetition of a group wrongly if that may fail after some of it."""
NEXT_NUMBER = r"(?:and|or)\s++[-$\\\d]"
LETTERS = rf"(?!{NEXT_NUMBER})[^\W\d_]++(?>(?:['\u2019-][^\W\d_]++)*)"
END_OF_WORDS = rf"(?:{END}|(?=[)\]]|{NEXT_NUMBER}))"
COUNTED = (
    r"(?:(?<=[\d}!)])|(?<=\\pi))((?>(?:\$|\\\))?)\s*+)"
    rf"((?>(?:{LETTERS}(?>(?:\s*+/\s*+|\s++)?)){SOME})){END_OF_WORDS}"
)
NUMBER = re.compile(r"(?:(?:\A|[^\w\s.]|(?:\\[a-zA-Z]++|\b(?:and|or)\s)\s*+)[\d.,/ ]*\d|\d[^{}]*\}|\d\)|\\pi)!?\Z")
LONGEST_NUMBER = 30
"""Characters before words in which their number is looked for."""
NO_UNIT = re.compile(
    r"and|n?or|all|any|every|if|when|where|unless|not?|none|squared|cubed|factorial|pi|inf(?:inity|inite|ty)?|undefined"
    r"|base|binary|octal|hex(?:adecimal)?|percent(?:age)?|pct|mille|permille|mod(?:ulo)?|sqrt"
    r"|(?:sin|cos|tan|cot|csc|log|exp)[ntx-z]?|sec[x-z]|arc(?:sin|cos|tan)|half|halves|(?:quarter|third)s?"
    r"|(?:hundred|thousand)(?:th)?s?|\w*illion(?:th)?s?|(?:dozen|lakh|crore)s?|(?:four|fif|six|seven|eigh|nin|ten)ths?"
    r"|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
    r"|january|february|march|april|may|june|july|august|september|october|november|december"
)
"""Words behind a number that make another number of it, or a condition, or a date."""
WORD_OR_VARIABLES = re.compile(r"(?=.*[aeiouy])[a-z'\u2019-]{3,}+|(?=.*[^\x00-\x7f])[^\u0370-\u03ff万萬億亿百千分半]++")


def _digits_of(number: re.Match[str]) -> str:
    return "".join(filter(str.isdigit, number[0].replace(r"\!", "")))


def _without_commas(number: re.Match[str]) -> str:
    return number[0].replace(",", "")


def _number_and_words(text: re.Match[str]) -> str:
    """`\\text{13 cm}` as a number and its unit; a text with several numbers as it is."""
    number, words = text.groups()
    return f"{number}{words}" if any(map(str.isdigit, words)) or not words.strip() else rf"{number}\text{{{words}}}"


def _mixed_number(number: re.Match[str]) -> str:
    """A fraction; `2 4/3` stays a product."""
    whole, numerator, denominator = map(int, number.groups())
    return f"{whole * denominator + numerator}/{denominator}" if numerator < denominator else number[0]


def _repeating_decimal(number: re.Match[str]) -> str:
    whole, fixed, period = number.groups()
    scale = 10 ** len(fixed)
    value = Fraction(int(whole + fixed), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _number_alone(text: re.Match[str]) -> str:
    """A number without the words behind it that say what is counted: `73 people per hour` is 73."""
    between, words = text.groups()
    first, *others = words.replace("/", " ").lower().split()
    if (
        not (_is_word(first, is_attached=between == "") or (first in ("of", "in") and others))
        or any(word not in CONNECTIVES and (len(word) < 2 or NO_UNIT.fullmatch(word)) for word in others)
        or NUMBER.search(text.string[max(0, text.start() - LONGEST_NUMBER) : text.start()]) is None
    ):
        return text[0]
    return between.strip() + " " * text.string[text.end() : text.end() + 1].isalpha()


CONNECTIVES = ("a", "and", "or", "all")
"""Words that may stand among those that say what is counted."""


def _is_word(letters: str, is_attached: bool) -> bool:
    """Whether small letters behind a number are a word, not variables: these stand in the order of the alphabet."""
    if not WORD_OR_VARIABLES.fullmatch(letters) or NO_UNIT.fullmatch(letters):
        return False
    if all(map(operator.lt, letters, letters[1:])) and letters.isascii():
        return "o" in letters or ("i" in letters and len(letters) > 3)
    return not is_attached or len(letters) > 3 or not letters.isascii()


RULES: list[tuple[str, str, str | Callable[[re.Match[str]], str]]] = [
    (r"\fbox", r"\\fbox(?=\s*+\{)", r"\\boxed"),
    ("", rf"(?<![\d.,]){NOT_MIXED}\d{{1,3}}(?>(?:{GROUP}){SOME})(?!,?\d)", _digits_of),
    (r"\!", r"(?<!\\)\\!", ""),
    ("", SPACE, " "),
    ("}{", r"\\(?:SI|qty)\s*+(?>(?:\[[^\]{}]{0,99}+\])?)\{([^{}]*+)\}\s*+\{[^{}]*+\}", r"\1"),
    ("\\", r"\\(?:num|ang)\s*+\{([^{}]*+)\}", r"\1"),
    (r"\unit", r"\\unit\s*+\[([^\]{}]{0,99}+)\]\s*+\{[^{}]*+\}", r"\1"),
    ("dots", r"\\[lc]?dots[cbmio]?(?![a-zA-Z])", r"\\ldots"),
    ("...", r"(?:(?<=[,+-])|(?<=[,+-] )|(?<=\d))\.\.\.", r"\\ldots"),
    (r"\ldots", r"(?<![\d.])(\d*+\.\d++)\s*+\\ldots", r"\1"),
    (r"\ldots", r"\\ldots", lambda _: ELLIPSIS),
    ("\\", AS_TEXT, r"\\text"),
    (r"\text", r"\\text\{T\}", "T"),
    (r"\text", r"\\text\{\s*+([dei])\s*+\}", r" \1"),
    (" i", r"(?<=\d) ++i(?![a-zA-Z])", "i"),
    (r"\text", r"\\text\{\s*+\\\$\s*+\}", ""),
    (r"\text", r"(?>(?:,\s*+)?)\\text\{\s*+(?>(?:,\s*+)?)(?:and|or)\s*+\}", ", "),
    ("\\", rf"(?:\\text|{BOLD}\s*+)\{{(\s*+[-+$]?+\d[\d.,/]*+)({WORDS})\}}", _number_and_words),
    ("\\", rf"(?:\\text|{BOLD}\s*+)\{{(\s*+\([^{{}}\d]*+\d[^{{}}]*\))\s*+\}}", r"\1"),
    (r"\text", r"\\text(?=\{\s*+[-+(]?+[\d\\])", ""),
    ("\\", rf"{BOLD}(?![a-zA-Z])", ""),
    ("{", r"\{\s*+\\(?:bf|rm|it|displaystyle|textstyle)(?![a-zA-Z])([^{}\\]*+)\}", r"\1"),
    ("{", r"\{\s*+\\(?:bf|rm|it|displaystyle|textstyle)(?![a-zA-Z])", "{"),
    ("**", r"(?<![\w)*])\*\*(?=[^\s*])([^*\n]*+)\*\*", r"\1"),
    (r"\circ", rf"(?<=[\d}}])\s*+\^(?:\\circ|\{{\s*+\\circ\s*+\}})\s*+(?>[CFK]|\\text\{{\s*+[CFK]\s*+\}}|){END}", ""),
    (r"\text", rf"(?<=[\d}}%)])\s*+(?>(?:(?>(?:\\cdot|\\times|/)?)\s*+{UNIT}\s*+){SOME})(?:{END}|(?=[)\]]))", ""),
    ("", rf"(?<=[\d}}])\s*+(?:{PLAIN_UNIT}){END}", ""),
    ("pi", r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
    ("sqrt", r"(?<![\\a-zA-Z])sqrt\s*+\(([^()]*+)\)", r"\\sqrt{\1}"),
    ("", COUNTED, _number_alone),
    ("!!", r"(?<![\w.])(\d{1,3})!!(?!!)", lambda number: str(prod(range(int(number[1]), 0, -2)))),
    ("", r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,4})(?![\w.])", r"\1\\times 10^{\2}"),
    (
        ",",
        rf"(?<![\d.,(\[])(?<!\\\{{)\d{{1,3}}(?>(?:,\d{{3}}){SOME})(?=\s*+\\[dt]?frac\s*+\{{| ++\d{{1,4}} *+/)",
        _digits_of,
    ),
    ("/", r"(?<![\w.,/^)}])(\d{1,12}) ++([1-9]\d{0,3}) *+/ *+(\d{1,4})(?![\d/!^]|\.\d)", _mixed_number),
    *(
        (rf"\{above}{{", rf"(?<![\d.])(\d{{1,20}})\.(\d{{0,20}})\\{above}\{{(\d{{1,20}})\}}", _repeating_decimal)
        for above in ("overline", "bar", "dot")
    ),
    (".", r"(?<=[\d}])\.(?=\s*+[}$])", ""),
    ("=", rf"(?<==)\s*+-?+\d{{1,3}}(?>(?:,\d{{3}}){SOME})(?=(?>(?:\.\d++)?){NO_LIST}{END})", _without_commas),
    (r"\boxed", r"(\\boxed\s*+\{)\s*+(?:=|\\approx(?![a-zA-Z]))", r"\1"),
    (r"\lg", r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
    (r"\log_", r"\\log_(?:e(?![a-zA-Z])|\{e\})", r"\\ln "),
    ("brace", r"\\([lr])brace(?![a-zA-Z])", lambda brace: r"\{" if brace[1] == "l" else r"\}"),
    (r"\varnothing", r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
]
"""Substrings without which a rule is skipped, the rule's pattern, and its replacement."""
COMPILED = [(literal, re.compile(pattern), replacement) for literal, pattern, replacement in RULES]


def normalized(text: str, keeps_words: bool = False) -> str:
    """The text with these forms brought to those of math-verify; words behind numbers stay if they may be variables."""
    text = text.translate(CHARACTERS)
    for literal, pattern, replacement in COMPILED:
        if literal in text and not (keeps_words and replacement is _number_alone):
            text = pattern.sub(replacement, text)
    return text


DELIMITERS = re.compile(r"\\[()\[\]]|\$|\\(?:left|right)(?![a-zA-Z])")
WRAPPED = re.compile(rf"(?:{AS_TEXT}|\\(?:boxed|fbox)\s*+(?=\{{))\{{([^{{}}]*+)\}}")
MOST_WRAPPERS = 4
"""Around one another, such as `\\boxed{\\textbf{\\text{even}}}`."""
NO_WORDS = re.compile(rf"\\text\{{{WORDS}\}}|\\(?:begin|end)\{{{WORDS}\}}|\\[a-zA-Z]++")
WORD = re.compile(r"(?<![^\W\d_])(?:[^\W\d_]{3,}+|is|it|of|we|he|at|by|so|as|be)(?![^\W\d_])", re.IGNORECASE)
CJK_SENTENCE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]{3,}+")
OF_A_FORMULA = re.compile(
    r"and|for|all|mod|per|sin|cos|tan|cot|sec|csc|log|exp|sqrt|arc(?:sin|cos|tan)|max|min|gcd|lcm|inf|infinity|percent"
    r"|(?:second|minute|hour|day|week|month|year|degree|radian|cent|dollar|euro|mile|yard|unit|lb|hr|min|sec|pound|ounce)s?"
    r"|(?:kilo|centi|milli)?(?:meter|metre|gram|liter|litre)s?|inch|inches|foot|feet|square|cubic|mph|kph",
    re.IGNORECASE,
)


def is_prose(ground_truth: str) -> bool:
    """Whether words say what is right: two or more outside of `\\text{}` that are neither of a formula nor a unit.

    A box among them says which part of the text is the answer.
    """
    if r"\boxed" in ground_truth:
        return False
    plain = NO_WORDS.sub(" ", re.sub(AS_TEXT, r"\\text", ground_truth))
    words = [word for word in WORD.findall(plain) if not (word.isupper() or OF_A_FORMULA.fullmatch(word))]
    return len(words) > 1 or CJK_SENTENCE.search(plain) is not None


def as_text(text: str) -> str:
    """A text without delimiters of LaTeX, further spaces, and the case of words; variables keep theirs.

    Braces that group a formula stay: `\\sqrt{2 x}` is not `\\sqrt{2} x`.
    """
    for _ in range(MOST_WRAPPERS):
        text = WRAPPED.sub(r" \1 ", text)
    plain = " ".join(DELIMITERS.sub(" ", text).strip(" .\n").split())
    return plain.lower() if WORD.search(plain) else plain
