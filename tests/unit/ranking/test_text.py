"""The tokenizer and the sentence splitter: properties that hold for any text."""

import sys
import threading
import time
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from snowballstemmer.english_stemmer import EnglishStemmer

from a2m_router.ranking.text import MAX_TOKEN, STOP_WORDS, query_tokens, sentences, tokens

# Scripts, marks, symbols and separators of real texts, and those of hostile texts only.
LETTERS = "abcdeinorstyz ABCDEINORSTYZ éèñüçÅøßİı ΣσςЖж שלום العربية हिन्दी ไทย 猫漢字カナがぱ한국어 ﬁ½²①ｶﾞ"
ODDITIES = (
    "\0\t\n _-.'’,!?。！？「」\u0300\u0301\u0323\u3099\u200d\ufe0f\xad\u202e\U0001f389\U000e0101\ufdfa\u1100\u1161"
)
texts = st.one_of(st.text(), st.text(alphabet=LETTERS + ODDITIES, max_size=60))
plain_words = st.text(alphabet="abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=12)
latin = st.text(alphabet="abcdeilnorstu éèêëñüçåà", max_size=40)
cjk_runs = st.text(alphabet="猫漢字日本語かなカナー한국어中文", min_size=1, max_size=20)


@given(texts)
@example("\u0301\u0301")
@example("\xb4\u037a")
def test_no_token_is_empty_or_longer_than_the_bound(text: str) -> None:
    assert all(0 < len(token) <= MAX_TOKEN for token in tokens(text))


@given(texts, texts)
def test_a_space_between_two_texts_keeps_their_tokens_apart(one: str, other: str) -> None:
    assert tokens(one + " " + other) == tokens(one) + tokens(other)


@given(texts)
def test_whatever_is_asked_for_is_what_was_indexed(text: str) -> None:
    asked = query_tokens(text)
    assert len(asked) == len(set(asked))
    assert set(asked) <= set(tokens(text))


@given(before=texts, word=plain_words, after=texts)
def test_a_query_made_of_a_documents_word_finds_it(before: str, word: str, after: str) -> None:
    document = tokens(f"{before} {word.title()}, {after}")
    assert set(query_tokens(word)) <= set(document)
    assert query_tokens(word) or word in STOP_WORDS


@given(texts)
def test_how_unicode_is_composed_does_not_matter(text: str) -> None:
    assert tokens(unicodedata.normalize("NFD", text)) == tokens(unicodedata.normalize("NFC", text))


@given(st.text(alphabet="abcdeiorst ÉéÜüßΣσЖж猫", max_size=40))
def test_case_does_not_matter(text: str) -> None:
    assert tokens(text.upper()) == tokens(text) == tokens(text.casefold())


@given(latin)
def test_accents_are_gone_from_tokens(text: str) -> None:
    assert all(token.isascii() for token in tokens(text))


def test_accents_are_folded_after_stemming() -> None:
    assert tokens("cafés café cafe") == ["cafe"] * 3
    assert tokens("naïve naive") == ["naiv"] * 2
    # The English stemmer removes an e, but not an é.
    assert tokens("résumé resume") == ["resume", "resum"]


def test_forms_of_an_english_word_are_one_token() -> None:
    assert len(set(tokens("connect connected Connecting connections"))) == 1


@given(cjk_runs)
def test_a_run_without_spaces_becomes_its_overlapping_pairs(run: str) -> None:
    pairs = [one + other for one, other in pairwise(run)]
    assert tokens(run) == (pairs or [run])


def test_mixed_scripts_part_where_the_script_changes() -> None:
    assert tokens("漢字kanji2カナ") == ["漢字", "kanji2", "カナ"]


def test_voiced_kana_stay_apart_and_narrow_ones_are_widened() -> None:
    assert tokens("ガラ") != tokens("カラ")
    assert tokens("ｶﾞﾗｽ") == tokens("ガラス")


def test_words_keep_the_marks_they_are_written_with() -> None:
    assert tokens("हिन्दी में") == ["हिन्दी", "में"]
    assert tokens("שָׁלוֹם") == tokens("שלום") == ["שלום"]


@pytest.mark.parametrize("text", ["", "\0", "\u0301", "🎉 👩‍👩‍👧", "__--__", " \n\t"])
def test_a_text_without_words_has_no_tokens(text: str) -> None:
    assert tokens(text) == query_tokens(text) == []


def test_underscores_nul_and_symbols_part_words_and_digits_do_not() -> None:
    assert tokens("snake_case a\0b x1y2 3.14 1\ufe0f\u20e3🎉") == ["snake", "case", "a", "b", "x1y2", "3", "14", "1"]


def test_a_long_word_is_known_by_its_beginning() -> None:
    assert tokens("x" * 1000) == tokens("x" * MAX_TOKEN) == ["x" * MAX_TOKEN]


@pytest.mark.parametrize("query", ["", "what is it?", "WHO are You", "It's what I didn't", "?!"])
def test_a_query_of_stop_words_asks_for_nothing(query: str) -> None:
    assert query_tokens(query) == []


def test_stop_words_are_compared_before_stemming() -> None:
    assert tokens("having") == tokens("have")
    assert query_tokens("haves having") == tokens("haves")


def test_stop_words_are_indexed() -> None:
    assert tokens("to be or not to be") == ["to", "be", "or", "not", "to", "be"]


HOSTILE = {
    "one word": "a",
    "one accented word": "é",
    "one run of Han": "猫",
    "marks that normalizing sorts": "\u0301\u0323",
    "stops": ".",
    "initials": "a. ",
    "wide stops": "。」",
    "line ends": "\n ",
    "NULs": "\0",
    "letters that expand": "ﬃ",
}


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
def test_time_is_linear_in_the_length(unit: str) -> None:
    # A quadratic algorithm would take minutes for this text; a linear one takes a second at most on a slow machine.
    text = "a" + unit * (300_000 // len(unit))
    began = time.process_time()
    tokens(text)
    query_tokens(text)
    sentences(text)
    assert time.process_time() - began < 20


def test_threads_do_not_disturb_each_others_stems() -> None:
    found: dict[int, list[str]] = {}
    words = {thread: [f"x{thread}y{number}izations" for number in range(500)] for thread in range(4)}

    def work(thread: int) -> None:
        found[thread] = tokens(" ".join(words[thread]))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in words]
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(usual)
    english = EnglishStemmer()
    assert found == {thread: [english.stemWord(word) for word in mine] for thread, mine in words.items()}


@given(texts)
def test_sentences_are_verbatim_in_order_and_lose_only_white_space(text: str) -> None:
    at = 0
    for sentence in sentences(text):
        assert sentence
        assert sentence == sentence.strip()
        found = text.index(sentence, at)
        assert not text[at:found].strip()
        at = found + len(sentence)
    assert not text[at:].strip()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("It cost 3.50 today. Fine.", ["It cost 3.50 today.", "Fine."]),
        ("Dr. Smith met J. Doe. They spoke.", ["Dr. Smith met J. Doe.", "They spoke."]),
        ("Fruit, e.g. apples. More.", ["Fruit, e.g. apples.", "More."]),
        ('He said "Go." Then left.', ['He said "Go."', "Then left."]),
        ("1. Open it.\n2. Close it.", ["1. Open it.", "2. Close it."]),
        ("好きです。「はい。」本当？", ["好きです。", "「はい。」", "本当？"]),
        ("यह एक है। वह दो है।", ["यह एक है।", "वह दो है।"]),
        ("title\r\n\r\n  body", ["title", "body"]),
    ],
)
def test_sentences_end_where_a_reader_ends_them(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected
