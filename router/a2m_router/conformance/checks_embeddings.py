"""Vectors (§3.7, §3.8.1)."""

import random

from a2m_router.conformance.checking import (
    EMBEDDING_MISMATCH,
    NotApplicable,
    Record,
    Target,
    an_object,
    check,
    expect,
    ids_of,
    shown,
)

_METRICS = ("cosine", "dot", "l2")

# the width of the first vector for a store without vectors
_WIDTH = 8


@check("3.7-4", needs="embeddings", writes=False)
def describe_says_how_vectors_are_compared(target: Target) -> None:
    entry = _entry(target)
    expect("dimensions" in entry, f"memory/describe: expected dimensions in embeddings, got {shown(entry)}")
    width = entry["dimensions"]
    expect(width is None or (type(width) is int and width > 0), f"embeddings: expected a width or null, got {width!r}")
    expect(
        entry.get("metric") in _METRICS, f"embeddings: expected metric one of {_METRICS}, got {entry.get('metric')!r}"
    )
    expect(
        isinstance(entry.get("model"), str | None),
        f"embeddings: expected a string as model, got {entry.get('model')!r}",
    )


@check("3.7-5", needs="embeddings", writes=False)
def describe_says_how_they_could_be(target: Target) -> None:
    entry = _entry(target)
    metrics = entry.get("metrics")
    expect(
        isinstance(metrics, list) and set(metrics) <= set(_METRICS) and entry.get("metric") in metrics,
        f"embeddings: expected metrics with the one in use, of {_METRICS}, got {shown(entry)}",
    )


@check("3.7-1", "3.7-2", "3.7-3", "3.7-a", needs="embeddings")
def a_vector_comes_back_exactly(target: Target) -> None:
    vector = [0.1, -1 / 3, 1e-5, 3.0, *(number / 7 for number in range(1, 2000))][: _width(target)]
    note = target.note(embedding=vector)
    (id,) = target.remember(note)
    for method, params in (("timeline", {}), ("recall", {"query": note["content"]}), ("recall", {"embedding": vector})):
        found = target.records(method, **params, embeddings=True, where=target.mine, limit=5)
        came = found[0].get("embedding") if ids_of(found) == [id] else None
        expect(came == vector, f"memory/{method} with embeddings: true: expected {shown(vector)}, got {shown(came)}")


@check("3.7-a", needs="embeddings")
def vectors_come_back_only_where_they_are_asked_for(target: Target) -> None:
    note = target.note(embedding=_vector(target, 0))
    target.remember(note)
    for params in ({}, {"embeddings": False}):
        for method in ("timeline", "recall"):
            for record in target.records(method, where=target.mine, limit=5, **params):
                expect(
                    record.get("embedding") is None,
                    f"memory/{method} with {params}: expected no embedding, got {shown(record)}",
                )


@check("3.7-a", "4.9-2", needs=("embeddings", "keys"))
def fetch_returns_a_vector_where_it_is_asked_for(target: Target) -> None:
    key, vector = target.word(), _vector(target, 0)
    target.remember(target.note(key=key, embedding=vector))
    came = (target.ask("fetch", key=key, embeddings=True).get("record") or {}).get("embedding")
    expect(came == vector, f"memory/fetch with embeddings: true: expected {shown(vector)}, got {shown(came)}")
    came = (target.ask("fetch", key=key).get("record") or {}).get("embedding")
    expect(came is None, f"memory/fetch: expected no embedding unless asked for, got {shown(came)}")


@check("3.7-8", "3.7-4", needs="embeddings")
def another_width_is_refused(target: Target) -> None:
    vector = _vector(target, 0)
    target.remember(target.note(embedding=vector))
    entry = target.ask("describe").get("embeddings") or {}
    expect(
        entry.get("dimensions") == len(vector),
        f"a vector of {len(vector)} is stored: expected that as dimensions, got {entry.get('dimensions')!r}",
    )
    for wrong in ([*vector, 0.5], vector[:-1] or [0.5, 0.5]):
        target.refused(EMBEDDING_MISMATCH, "remember", records=[target.note(embedding=wrong)])
        target.refused(EMBEDDING_MISMATCH, "recall", embedding=wrong)
    expect(len(target.timeline()) == 1, "vectors of another width were rejected: expected none of their records")


@check("3.7-b", needs="embeddings")
def a_vector_finds_what_is_near_it(target: Target) -> None:
    vectors = [_vector(target, number) for number in range(3)]
    ids = target.remember(*[target.note(embedding=vector) for vector in vectors])
    for id, vector in zip(ids, vectors, strict=True):
        found = ids_of(target.records("recall", embedding=vector, where=target.mine, limit=3))
        expect(found[:1] == [id], f"memory/recall by the vector of {id!r} itself: expected it first, got {found}")


@check("3.8.1-a", needs="embeddings")
def a_record_may_have_a_vector_and_no_words(target: Target) -> None:
    vector = _vector(target, 0)
    ids = target.remember(target.note(content="", embedding=vector), target.note(embedding=_vector(target, 1)))
    found = ids_of(target.records("recall", embedding=vector, where=target.mine, limit=2))
    expect(
        found[:1] == ids[:1],
        f"memory/recall by the vector of a record without words: expected {ids[0]!r} first, got {found}",
    )


def _entry(target: Target) -> Record:
    return an_object(target.ask("describe").get("embeddings"), "memory/describe with embeddings declared: embeddings")


def _width(target: Target) -> int:
    width = _entry(target).get("dimensions")
    if width is not None and (type(width) is not int or width < 3):
        raise NotApplicable(f"too few different vectors have the width {width!r}")
    return width or _WIDTH


def _vector(target: Target, number: int) -> list[float]:
    """Return one of a few vectors with the same length and different directions."""
    width = _width(target)
    chosen = random.Random(target.tag)
    places = chosen.sample(range(width), 3)
    return [1.0 if place == places[number] else 0.0 for place in range(width)]
