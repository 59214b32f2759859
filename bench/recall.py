"""Measures fusion: the share of a question's evidence turns in the top 10, over long conversations.

    .venv/bin/python -m bench.recall FILE...

A file is a JSON object with `turns` (`id`, `speaker`, `text`, perhaps `image`, a caption; in order) and `questions`
(`question`, `evidence`: ids of turns). A conversation is divided into three tiers by age; each ranks only its own
turns.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from a2m_router.ranking.fusion import POOL_WEIGHT, Ranking, lexical, reciprocal_rank
from bench.conversations import given
from tests.support.processes import end_with
from tests.support.progress import progress

LIMIT = 10
CANDIDATES = 3  # a tier returns LIMIT times this
NEWEST = 24  # turns in the first tier; the other two share the rest


_ABOUT: Final = "How much a fusion finds: the share of a question's evidence turns in the top 10."


class Turn(msgspec.Struct):
    id: str
    speaker: str
    text: str
    image: str = ""


class Question(msgspec.Struct):
    question: str
    evidence: list[str]


class Conversation(msgspec.Struct):
    turns: list[Turn]
    questions: list[Question]

    def texts(self) -> dict[str, str]:
        """The searched text of each turn by its id, oldest first."""
        return {turn.id: f"{turn.speaker}: {turn.text} {turn.image}" for turn in self.turns}


class Asked(msgspec.Struct):
    """A question about a conversation: all texts, and the candidates of each tier, best first."""

    query: str
    texts: Mapping[str, str]
    tiers: list[list[str]]

    def pool(self) -> dict[str, str]:
        return {turn_id: self.texts[turn_id] for tier in self.tiers for turn_id in tier}


def undivided(asked: Asked) -> list[str]:
    return lexical(asked.query, asked.texts)[:LIMIT]


def tiers_alone(asked: Asked) -> list[str]:
    return _top([Ranking(tier) for tier in asked.tiers])


def lexical_beside_tiers(asked: Asked) -> list[str]:
    ranked = lexical(asked.query, asked.pool())
    return _top([*(Ranking(tier) for tier in asked.tiers), Ranking(ranked, POOL_WEIGHT)])


def whole_pool(asked: Asked) -> list[str]:
    return list(asked.pool())


WAYS: dict[str, Callable[[Asked], list[str]]] = {
    "one undivided store": undivided,
    "the tiers' ranks alone": tiers_alone,
    "with a lexical list over the pool": lexical_beside_tiers,
    "everything the pool held": whole_pool,
}


def ask(conversation: Conversation) -> list[tuple[Asked, frozenset[str]]]:
    """Yield each question with the tiers' answers, and the ids of its evidence."""
    texts = conversation.texts()
    ids = list(texts)
    older = ids[:-NEWEST]
    parts = [ids[-NEWEST:], older[len(older) // 2 :], older[: len(older) // 2]]
    tiers = [{turn_id: texts[turn_id] for turn_id in part} for part in parts]
    return [
        (
            Asked(each.question, texts, [lexical(each.question, tier)[: LIMIT * CANDIDATES] for tier in tiers]),
            frozenset(each.evidence),
        )
        for each in conversation.questions
    ]


def _top(rankings: list[Ranking]) -> list[str]:
    return [turn_id for turn_id, _ in reciprocal_rank(rankings)[:LIMIT]]


def main(arguments: Sequence[str] | None = None) -> None:
    conversations = given(arguments, Conversation, "python -m bench.recall", _ABOUT)
    asked: list[tuple[Asked, frozenset[str]]] = []
    with progress("conversations", len(conversations)) as bar:
        for conversation in conversations:
            asked += [(question, evidence) for question, evidence in ask(conversation) if evidence]
            bar.advance()
    if not asked:
        sys.exit("bench.recall: no question names evidence, so there is nothing to find")
    print(f"{len(asked)} questions; share of evidence found, mean over questions (over all evidence turns)")
    total = sum(len(evidence) for _, evidence in asked)
    with progress("", len(WAYS) * len(asked)) as bar:
        for name, way in WAYS.items():
            bar.name(name)
            found = []
            for question, evidence in asked:
                found.append((len(evidence & set(way(question))), len(evidence)))
                bar.advance()
            mean = sum(hits / of for hits, of in found) / len(found)
            print(f"{mean:.3f} ({sum(hits for hits, _ in found) / total:.3f})  {name}", flush=True)


if __name__ == "__main__":
    end_with(main)
