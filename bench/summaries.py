"""Measures summaries: the share of the content needed by questions that a summary keeps, over sessions.

    .venv/bin/python -m bench.summaries FILE...

A file is a JSON object with `turns` (`id`, `session`, `text`; in order) and `questions` (`question`, `answer`,
`evidence`: ids of turns). Each session is summarized by itself, with the length of `summary_budget`.
"""

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from a2m_router.protocol.wire import timestamps
from a2m_router.protocol.wire.records import Record
from a2m_router.ranking.text import query_tokens, sentences
from a2m_router.summaries.rendering import extract, summary_budget
from bench.conversations import given
from tests.support.processes import end_with

_ABOUT: Final = "How much a summary keeps of what questions ask for, against simpler choices of the same length."


class Turn(msgspec.Struct):
    id: str
    session: str
    text: str


class Question(msgspec.Struct):
    question: str
    evidence: list[str]
    answer: str | int | float = ""


class Conversation(msgspec.Struct):
    turns: list[Turn]
    questions: list[Question]

    def sessions(self) -> list[list[Turn]]:
        found: dict[str, list[Turn]] = defaultdict(list)
        for turn in self.turns:
            found[turn.session].append(turn)
        return list(found.values())


def extracted(turns: Sequence[Turn], budget: int) -> set[str]:
    records = [
        Record(id=turn.id, content=turn.text, created_at=timestamps.render(place)) for place, turn in enumerate(turns)
    ]
    return set((extract(records, budget=budget) or "").split("\n"))


def first_sentences(turns: Sequence[Turn], budget: int) -> set[str]:
    return _filled(_sentences(turns), budget)


def longest_sentences(turns: Sequence[Turn], budget: int) -> set[str]:
    return _filled(sorted(_sentences(turns), key=len, reverse=True), budget)


def random_sentences(turns: Sequence[Turn], budget: int) -> set[str]:
    shuffled = _sentences(turns)
    random.Random(turns[0].id).shuffle(shuffled)
    return _filled(shuffled, budget)


WAYS: dict[str, Callable[[Sequence[Turn], int], set[str]]] = {
    "extract": extracted,
    "the first sentences": first_sentences,
    "the longest sentences": longest_sentences,
    "random sentences": random_sentences,
}


def kept(summary: set[str], turn: Turn, question: Question) -> tuple[float, float] | None:
    """Return two shares that the summary keeps: of the turn's words that are also in the question or its answer, and of
    the turn's characters. Return None if the turn shares no word with them."""
    asked = set(query_tokens(f"{question.question} {question.answer}")) & set(query_tokens(turn.text))
    if not asked:
        return None
    still = [sentence for sentence in sentences(turn.text) if sentence in summary]
    return len(asked & set(query_tokens(" ".join(still)))) / len(asked), sum(map(len, still)) / len(turn.text)


def _sentences(turns: Sequence[Turn]) -> list[str]:
    return [sentence for turn in turns for sentence in sentences(turn.text)]


def _filled(sentences: Sequence[str], budget: int) -> set[str]:
    chosen = set()
    room = budget + 1
    for sentence in sentences:
        if len(sentence) + 1 <= room:
            chosen.add(sentence)
            room -= len(sentence) + 1
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    conversations = given(arguments, Conversation, "python -m bench.summaries", _ABOUT)
    for name, way in WAYS.items():
        shares = []
        for conversation in conversations:
            for turns in conversation.sessions():
                summary = way(turns, summary_budget(sum(len(turn.text) for turn in turns)))
                by_id = {turn.id: turn for turn in turns}
                shares += [
                    share
                    for question in conversation.questions
                    for id in question.evidence
                    if id in by_id and (share := kept(summary, by_id[id], question))
                ]
        if not shares:
            sys.exit("bench.summaries: no question names evidence, so there is nothing to keep")
        words, characters = (sum(share) / len(shares) for share in zip(*shares, strict=True))
        print(f"{words:.3f} of the words needed, {characters:.3f} of the evidence's characters  {name}")


if __name__ == "__main__":
    end_with(main)
