"""Splits text into tokens and sentences: the one tokenizer that ranking, storing and summarizing share.

Rules: documents and queries go through the same steps, so a word of a document finds the document; time is linear in
the length of any text; no token is empty or longer than `MAX_TOKEN`.
"""

import re
import threading
import unicodedata
from collections.abc import Iterator
from functools import cache, cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snowballstemmer.english_stemmer import EnglishStemmer

MAX_TOKEN = 64
"""The characters of a token, at most. A longer word is cut to its beginning."""

_STOPS = """
a about after again all also am an and any are as at be because been before being but by can could d did do does doing
during each few for from had has have having he her here hers herself him himself his how i if in into is it its itself
just ll m me more most my myself no nor not of off on once only or other our ours ourselves over own re s same she
should so some such t than that the their theirs them themselves then there these they this those through to too under
until up ve very was we were what when where which while who whom whose why will with would you your yours yourself
yourselves aren couldn didn doesn hadn hasn haven isn shouldn wasn weren wouldn
"""
STOP_WORDS = frozenset(_STOPS.split())
"""English words, case folded and not stemmed, that are too common to distinguish texts. The parts of contractions
("it's", "didn't") are among them."""


def tokens(text: str) -> list[str]:
    """Return the tokens of `text`, in order, with repeats.

    A word becomes one token: case folded, stemmed (English), then without its accents. Han, Hiragana, Katakana and
    Hangul put no spaces between words, so a run of them becomes its overlapping pairs of characters; a single character
    is one token. Underscores, punctuation, symbols and emoji separate words and are not tokens.
    """
    return [token for term in _terms(text) if (token := _token(term))]


def query_tokens(text: str) -> list[str]:
    """Return the distinct tokens to search for, in order of appearance, without stop words.

    The list is empty if `text` contains only stop words; callers then rank by recency.
    """
    return list(dict.fromkeys(token for term in _terms(text) if term not in STOP_WORDS and (token := _token(term))))


def sentences(text: str) -> list[str]:
    """Return the sentences of `text`, in order: verbatim substrings, stripped of white space and never empty.

    A sentence ends at the end of a line, after 。！？ and similar signs, and after .!?… if white space follows. A point
    does not end it after an abbreviation, an initial or a list's number, or if the next word begins in lower case.
    """
    pieces = []
    start = 0
    for match in _SENTENCE_END.finditer(text):
        if _ends_sentence(text, start, match):
            pieces.append(text[start : match.end()].strip())
            start = match.end()
    pieces.append(text[start:].strip())
    return [piece for piece in pieces if piece]


_CJK = (
    "\u1100-\u11ff\ua960-\ua97f\uac00-\ud7ff\u3131-\u318e"  # Hangul
    "\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\U0001b000-\U0001b16f"  # Kana
    "\u3005-\u3007\u3021-\u3029\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"  # Han
)
_ASCII_WORD = re.compile(r"[A-Za-z0-9]+")
# Characters inside a word that change only how it is drawn: soft hyphen, joiners, variation selectors.
_UNSEEN = re.compile("[\u00ad\u034f\u200c\u200d\ufe00-\ufe0f\U000e0100-\U000e01ef]")


def _terms(text: str) -> Iterator[str]:
    """Yield case folded words and pairs of CJK characters: tokens before stemming and removal of accents."""
    if text.isascii():
        yield from (word[:MAX_TOKEN].lower() for word in _ASCII_WORD.findall(text))
        return
    marked_word, mark_run = _patterns()
    # Normalizing sorts each run of combining marks by insertion, in quadratic time. So runs are first cut to the 30
    # marks that Unicode's stream-safe format allows.
    text = unicodedata.normalize("NFKC", mark_run.sub(r"\1", _UNSEEN.sub("", text)))
    for match in marked_word.finditer(text):
        if match.lastgroup == "cjk":
            run = match[0]
            yield from (run[at : at + 2] for at in range(max(1, len(run) - 1)))
        else:
            # Case folding decomposes some letters again.
            yield unicodedata.normalize("NFKC", match[0][:MAX_TOKEN].casefold())


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    r"""Return two patterns: a word or a CJK run, and a run of combining marks that is too long.

    `\w` does not match combining marks, and without them Hindi would fall into single letters. Finding all marks takes
    about 50 ms, so it happens at the first text that is not ASCII.
    """
    marks = [code for code in range(0x300, 0x20000) if unicodedata.category(chr(code)) in ("Mn", "Mc")]
    # As ranges of neighbours, since `re` tries single characters beyond U+FFFF one after the other.
    stretches = [list(run) for _, run in groupby(enumerate(marks), lambda numbered: numbered[1] - numbered[0])]
    mark = "".join(f"{chr(stretch[0][1])}-{chr(stretch[-1][1])}" for stretch in stretches)
    word = rf"(?P<cjk>[{_CJK}]++)|(?:[^\W_{_CJK}]++[{mark}]*+)+"
    return re.compile(word), re.compile(rf"([{mark}]{{30}})[{mark}]++")


class _Stemmer(threading.local):
    """A stemmer for each thread: a stemmer keeps the current word as its state, so threads cannot share one."""

    @cached_property
    def english(self) -> "EnglishStemmer":
        # Loaded at the first word, since the package contains thirty other languages. The Python stemmer by name:
        # `snowballstemmer.stemmer` would use PyStemmer if that is installed, and queries stemmed with one release of
        # the English rules would not match an index written with another.
        from snowballstemmer.english_stemmer import EnglishStemmer

        return EnglishStemmer()


_stemmer = _Stemmer()
_ENGLISH = re.compile("[a-z]")

# Kana voicing, nukta and virama turn the letter before them into another one; they are not accents.
_LETTER_MARKS = frozenset((0, 7, 8, 9))


@lru_cache(maxsize=1 << 15)
def _token(term: str) -> str:
    # the stemmer is slow, and changes nothing in a term without an English letter
    stem: str = _stemmer.english.stemWord(term) if _ENGLISH.search(term) else term
    if stem.isascii():
        return stem
    apart = unicodedata.normalize("NFKD", stem)
    plain = "".join(char for char in apart if unicodedata.combining(char) in _LETTER_MARKS)
    return unicodedata.normalize("NFC", plain)[:MAX_TOKEN]


# Every match takes all stops and closing signs at its place, so that none is scanned twice.
_SENTENCE_END = re.compile(
    "(?P<line>[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]++)"
    "|(?P<wide>[。！？｡．]++[」』）】》〉”’]*+)"
    "|[.!?…।॥؟۔]++[\"'”’»)\\]]*+"
)
_NUMBERED = re.compile(r"\s?\d{1,3}\.")
_LAST_WORD = re.compile(r"[^\W\d_]+\Z")
_ABBREVIATIONS = frozenset(("dr", "mr", "mrs", "ms", "prof", "st", "sr", "jr", "vs", "cf", "approx"))
_LOOK_BACK = 8  # more than the longest of them


def _ends_sentence(text: str, start: int, stop: re.Match[str]) -> bool:
    """Return whether the sentence from `start` ends with `stop`. Reads only a few characters, however long it is."""
    if stop.lastgroup or stop.end() == len(text):
        return True
    if not text[stop.end()].isspace():
        return False
    if stop[0] != ".":
        return True
    if text[stop.end() + 1 : stop.end() + 2].islower() or _NUMBERED.fullmatch(text, start, stop.end()):
        return False
    before = _LAST_WORD.search(text, max(start, stop.start() - _LOOK_BACK), stop.start())
    return before is None or not (len(before[0]) == 1 or before[0].casefold() in _ABBREVIATIONS)
