"""Weak labels for the demo's three quality classifiers, from the form of a text alone.

Here: counts that a regular expression can make, and the named thresholds that turn them into labels. They stand in for
the data the published classifiers learned from (instruction answers for DCLM, encyclopaedia pages for the wiki
reference, judged educational value for FineWeb-Edu) and **are not quality**: they exist so that a first run trains,
scores and calibrates something real on a machine without a model hub. What learns from them is a demo model and is
called one wherever it appears. Not here: training, or choosing documents.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

# A line of prose: this many words at least, beginning like a sentence or its continuation.
PROSE_WORDS = 6
# dclm: prose that explains and shows.
DCLM_MIN_SENTENCES = 3
DCLM_MIN_PROSE = 0.35
# dclm and wiki negatives: lists, parameters, release notes, licence text, or hardly a sentence.
LISTING_SHARE = 0.45
CHANGELOG_SHARE = 0.12
MAX_NEGATIVE_PROSE = 0.12
# wiki: description in the third person, nothing else.
INTRODUCTION_MIN_PROSE = 0.5
WIKI_MIN_SENTENCES = 2
WIKI_MIN_PROSE = 0.6
WIKI_MIN_SENTENCE_WORDS = 10.0
WIKI_MAX_MARKUP = 0.03
# edu: the sentence lengths that count as easy to follow, in words.
EDU_SENTENCE_WORDS = (10.0, 26.0)

_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")
_SENTENCE_END = re.compile(r"[.!?:](?=\s|$)")
_PROSE_START = re.compile(r"\s{0,8}[A-Za-z\"'(`*]")
_CODE_LINE = re.compile(
    r"\s*(>>>|\.\.\. |\$ |@\w|def \w|class \w|import \w|from \w+[\w.]* import|return\b|"
    r"[\w.\[\]]+\s*=[^=]|[\w.]+\(.*\)\s*[,:]?$|[)\]}]+,?$)"
)
_CODE_BLOCK = re.compile(r"(^\s*>>> )|(^\s*```)|(\.\. code)|(::\s*$)", re.MULTILINE)
_PARAMETER_LINE = re.compile(
    r"\s*([:@]\w[\w ]*:|[*\w.][*\w., ]{0,40}(\([^)]*\))?\s?:(\s|$)|-{3,}\s*$|"
    r"(Args|Arguments|Parameters|Params|Returns?|Yields?|Raises?|Attributes|Keyword Args|Other Parameters):?\s*$)"
)
_CHANGELOG_LINE = re.compile(
    r"[#\s\[*]{0,12}(version |release )?v?\d+\.\d+(\.\d+)?\S*(\s.{0,30})?$|"
    r"\s*[-*+•]\s+.{0,12}(Fix|Fixed|Fixes|Add|Added|Adds|Remove|Removed|Drop|Dropped|Update|Updated|Bump|Change|Changed|"
    r"Deprecate|Deprecated|Improve|Improved|Support|Make|Use)\b|.*\b(issues?|pull|PR)[ /]?#?\d+|.*\(#\d+",
    re.IGNORECASE,
)
_MARKUP = re.compile(r"https?://|!\[|\]\(|<[a-z/!][^>]*>|\.\. \w|:\w+:`|\|\w*\||`_|img\.shields|badge")
# Words are matched whole, phrases anywhere, both in lower case: one pass of each text instead of one per pattern.
_LICENCE_PHRASES = (
    "copyright",
    "all rights reserved",
    "permission is hereby granted",
    "without warrant",
    "licensed under",
    'provided "as is"',
)
_EXAMPLE_WORDS = frozenset({"example", "examples", "instance"})
_EXAMPLE_PHRASES = ("e.g.", "such as", "as follows")
_ADDRESS_WORDS = frozenset({"you", "your", "how", "let's", "we", "why", "when", "if"})
_PERSONAL_WORDS = frozenset({"you", "your", "we", "our", "us", "let's"})
_EXPLAINING_WORDS = frozenset({"because", "therefore", "thus", "hence", "since", "however", "whereas", "consider"})
_EXPLAINING_PHRASES = (
    "so that",
    "that is",
    "i.e.",
    "which means",
    "means that",
    "in other words",
    "note that",
    "in order to",
    "instead of",
    "rather than",
    "for example",
    "for instance",
)
_DESCRIBING_WORDS = frozenset(
    [
        "is",
        "are",
        "was",
        "were",
        "provides",
        "contains",
        "consists",
        "represents",
        "describes",
        "implements",
        "has",
        "have",
    ]
)
_HEADING = re.compile(r"^(#{1,6} \S.*|[=\-~^]{4,}\s*)$", re.MULTILINE)


@dataclass(frozen=True)
class Form:
    """What the rules see of a text: counts, and shares of its non-blank lines in [0, 1]."""

    words: int
    sentences: int
    sentence_words: float
    prose: float
    code: float
    parameters: float
    changelog: float
    markup: float
    licence: int
    examples: int
    code_blocks: int
    addresses: int
    personal: int
    explaining: int
    describing: int
    headings: int


def form(text: str) -> Form:
    """Counts over one text. An empty or blank text has zeros everywhere. `markup` is per word."""
    lines = [line for line in text.splitlines() if line.strip()]
    prose: list[str] = []
    code = parameters = changelog = 0
    for line in lines:
        if _CHANGELOG_LINE.match(line):
            changelog += 1
        elif _PARAMETER_LINE.match(line):
            parameters += 1
        elif _CODE_LINE.match(line):
            code += 1
        elif _PROSE_START.match(line) and len(_WORD.findall(line)) >= PROSE_WORDS:
            prose.append(line)
    joined = " ".join(prose).lower()
    lowered = text.lower()
    prose_words = _WORD.findall(joined)
    all_words = _WORD.findall(lowered)
    sentences = len(_SENTENCE_END.findall(joined))
    total = max(len(lines), 1)
    return Form(
        words=len(all_words),
        sentences=sentences,
        sentence_words=len(prose_words) / sentences if sentences else 0.0,
        prose=len(prose) / total,
        code=code / total,
        parameters=parameters / total,
        changelog=changelog / total,
        markup=len(_MARKUP.findall(text)) / max(len(all_words), 1),
        licence=_count(lowered, [], frozenset(), _LICENCE_PHRASES),
        examples=_count(lowered, all_words, _EXAMPLE_WORDS, _EXAMPLE_PHRASES),
        code_blocks=len(_CODE_BLOCK.findall(text)),
        addresses=_count(joined, prose_words, _ADDRESS_WORDS, ("?",)),
        personal=_count(joined, prose_words, _PERSONAL_WORDS, ()),
        explaining=_count(joined, prose_words, _EXPLAINING_WORDS, _EXPLAINING_PHRASES),
        describing=_count(joined, prose_words, _DESCRIBING_WORDS, ()),
        headings=len(_HEADING.findall(text)),
    )


def _count(text: str, words: Sequence[str], among: frozenset[str], phrases: Sequence[str]) -> int:
    return sum(word in among for word in words) + sum(text.count(phrase) for phrase in phrases)


def _is_listing(f: Form) -> bool:
    return (
        f.changelog >= CHANGELOG_SHARE
        or f.parameters + f.code >= LISTING_SHARE
        or f.licence >= 2
        or f.prose < MAX_NEGATIVE_PROSE
    )


def introduction(text: str) -> str:
    """The leading paragraphs that hold no listing, code or heading: what a reference work would open with."""
    kept: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        f = form(paragraph)
        if f.prose < INTRODUCTION_MIN_PROSE and f.words > PROSE_WORDS:
            break
        if _CODE_BLOCK.search(paragraph) or _HEADING.search(paragraph) or f.parameters + f.code > 0.3:
            break
        kept.append(paragraph)
    return "\n\n".join(kept).strip()


def dclm_label(f: Form) -> int | None:
    """1: prose that addresses a reader's question and shows an example (instruction answers, ELI5). 0: release notes,
    licences, parameter listings, bare code. None: neither clearly."""
    if _is_listing(f):
        return 0
    explains = f.addresses >= 1 and (f.examples >= 1 or f.code_blocks >= 1 or f.explaining >= 2)
    if f.sentences >= DCLM_MIN_SENTENCES and f.prose >= DCLM_MIN_PROSE and explains:
        return 1
    return None


def wiki_label(f: Form) -> int | None:
    """1: plain descriptive paragraphs in the third person (an encyclopaedia's register). 0: API listings, markup,
    badges, release notes. None: neither clearly."""
    if _is_listing(f) or f.markup > 4 * WIKI_MAX_MARKUP:
        return 0
    plain = f.code_blocks == 0 and f.markup <= WIKI_MAX_MARKUP and f.parameters <= 0.1 and f.code <= 0.1
    describes = f.describing >= 1 and f.personal == 0
    if (
        plain
        and describes
        and f.prose >= WIKI_MIN_PROSE
        and f.sentences >= WIKI_MIN_SENTENCES
        and f.sentence_words >= WIKI_MIN_SENTENCE_WORDS
    ):
        return 1
    return None


def edu_label(f: Form) -> float:
    """A rubric in [0, 5], one point each: prose in full sentences; explanation; a worked example beside the prose;
    sentences of a length that is easy to follow; structure and enough length to teach something. Release notes,
    listings and licence text lose in proportion to their share."""
    low, high = EDU_SENTENCE_WORDS
    prose = min(f.prose / 0.6, 1.0)
    explanation = min(f.explaining / 3, 1.0)
    example = min((f.examples + f.code_blocks) / 3, 1.0) * min(f.sentences / 3, 1.0)
    readable = 1.0 if f.sentences and low <= f.sentence_words <= high else 0.0
    length = min(f.sentences / 12, 1.0)
    structure = 0.7 * length + 0.3 * min(f.headings / 3, 1.0)
    penalty = min(1.0, 2.0 * f.changelog + 0.7 * f.parameters + 0.5 * f.code + 5.0 * f.markup * (f.prose < 0.3))
    points = prose + explanation + example + readable + structure
    return round(points * (1.0 - penalty) * (0.5 if f.licence >= 2 else 1.0), 3)
