"""Ranking (§4.3, §5): by words, by vector, by both, or by age. Results are `seq` numbers, best first.

Every SQL query contains the filter. Results are never filtered afterwards, so a search returns as many records as the
limit allows if so many match.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import apsw
import msgspec

from a2m_router.protocol.server import vectors
from a2m_router.protocol.wire.records import vector_from_bytes
from a2m_router.protocol.wire.vectors import similarity
from a2m_router.storage.nearest import MAX_NEAREST
from a2m_store.filters import Filter, SqlCondition

# only this many different words of a query are used: bm25 looks up each of them
_MOST_WORDS: Final = 1024

# When two rankings are blended, each is read to this multiple of the limit, and at least to this depth: a record that
# is low in one may be high in the other.
_DEPTH: Final = 4
_LEAST_DEPTH: Final = 64

# the usual constant of reciprocal rank fusion
_K: Final = 60


class Ranked(msgspec.Struct, frozen=True):
    """One record found, and its score in [0, 1]."""

    seq: int
    score: float


class Query(msgspec.Struct, frozen=True):
    """What a search looks for: words, a vector, both or neither.

    `vector` is the vector as the caller sent it, and `probe` is the same in the form of the index. `probe` is None for
    a vector without direction if the metric needs one: no record is near it.
    """

    words: Sequence[str]
    vector: Sequence[float] | None
    probe: bytes | None
    metric: str


def ranked(connection: apsw.Connection, query: Query, filter: Filter, limit: int) -> list[Ranked]:
    """Return at most `limit` records, best first. Scores descend, strictly as far as floats allow."""
    if query.vector is None and not query.words:
        newest = newest_first(connection, filter, limit)
        return [Ranked(seq, 1 / place) for place, seq in enumerate(newest, start=1)]
    if query.vector is None:
        return _descending(_lexical(connection, query.words, filter, limit))
    if not query.words:
        return _descending(_nearest(connection, query, filter, limit))
    depth = min(MAX_NEAREST, max(_LEAST_DEPTH, _DEPTH * limit))
    rankings = [_lexical(connection, query.words, filter, depth), _nearest(connection, query, filter, depth)]
    return _descending(_blended(rankings)[:limit])


def newest_first(connection: apsw.Connection, filter: Filter, limit: int | None) -> list[int]:
    """Return the newest `limit` records, or all if it is None: by created_at, then by insertion, latest first."""
    # an index yields each arm in this order, up to the limit: few rows remain to be sorted
    arms = filter.arms
    order = "ORDER BY created_at DESC, seq DESC LIMIT ?"
    most = -1 if limit is None else limit
    if len(arms) == 1:
        sql = f"SELECT seq FROM record WHERE {arms[0].sql} {order}"
    else:
        parts = (f"SELECT * FROM (SELECT seq, created_at FROM record WHERE {arm.sql} {order})" for arm in arms)
        sql = f"SELECT seq FROM ({' UNION ALL '.join(parts)}) {order}"
    values = [value for arm in arms for value in (*arm.values, most)]
    return [seq for (seq,) in connection.execute(sql, values if len(arms) == 1 else [*values, most])]


def matching(connection: apsw.Connection, words: Sequence[str], filter: Filter) -> list[int]:
    """Return every record that a recall of `words` could return; without words, every record that passes."""
    whole = filter.condition or SqlCondition("1")
    if not words:
        return [seq for (seq,) in connection.execute(f"SELECT seq FROM record WHERE {whole.sql}", whole.values)]
    sql = f"SELECT seq FROM lexical CROSS JOIN record ON seq = lexical.rowid WHERE lexical MATCH ? AND {whole.sql}"
    return [seq for (seq,) in connection.execute(sql, (_match(words), *whole.values))]


def _match(words: Sequence[str]) -> str:
    # quoted, no token is read as FTS5 syntax; tokens contain no quotes themselves
    return " OR ".join(f'"{word}"' for word in words[:_MOST_WORDS])


def _lexical(connection: apsw.Connection, words: Sequence[str], filter: Filter, limit: int) -> list[Ranked]:
    """Rank by bm25, with FTS5's formula.

    Word frequencies and record lengths are measured over the records that the owner can see. Otherwise the order of an
    owner's records would reveal which words other owners' records contain.
    """
    if filter.owner is not None:
        return _lexical_for(connection, words, filter, filter.owner, limit)
    # CROSS JOIN makes SQLite start from the matches: the cost follows them, not the records that pass the filter.
    condition = filter.condition
    joined, test = (" CROSS JOIN record ON seq = lexical.rowid", f" AND {condition.sql}") if condition else ("", "")
    sql = (
        f"SELECT lexical.rowid, bm25(lexical) AS weight FROM lexical{joined} WHERE lexical MATCH ?{test} "
        "ORDER BY weight, lexical.rowid DESC LIMIT ?"
    )
    rows = connection.execute(sql, (_match(words), *(condition.values if condition else ()), limit))
    # FTS5 returns bm25 negated; it is never 0 for a match
    return [Ranked(seq, weight / (weight - 1)) for seq, weight in rows]


_SCOPED: Final = """
WITH hit AS MATERIALIZED (
    SELECT term, record.seq, record.tokens, count(*) AS times
    FROM occurrence CROSS JOIN record ON record.seq = occurrence.doc
    WHERE term IN (SELECT value FROM json_each(?)) AND {scope}
    GROUP BY term, occurrence.doc
), rarity AS (
    SELECT term, max(1e-6, ln((? - count(*) + 0.5) / (count(*) + 0.5))) AS weight FROM hit GROUP BY term
)
SELECT hit.seq, sum(weight * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * hit.tokens / ?))) AS score
FROM hit JOIN rarity USING (term) CROSS JOIN record ON record.seq = hit.seq
WHERE {rest} GROUP BY hit.seq ORDER BY score DESC, hit.seq DESC LIMIT ?
"""


def _lexical_for(
    connection: apsw.Connection, words: Sequence[str], filter: Filter, owner: str, limit: int
) -> list[Ranked]:
    """Rank one owner's view, by the formula of `bm25()`, which has no owners, with k1 = 1.2 and b = 0.75."""
    records, length = connection.execute(
        "SELECT sum(records), sum(tokens) FROM share WHERE owner IN ('', '=' || ?)", (owner,)
    ).fetchone() or (None, None)
    if not records:
        return []
    scope = Filter(owner=owner).condition
    rest = Filter(filter.conditions).condition or SqlCondition("1")
    assert scope is not None
    sql = _SCOPED.format(scope=scope.sql, rest=rest.sql)
    terms = json.dumps(words[:_MOST_WORDS])
    rows = connection.execute(sql, (terms, *scope.values, records, length / records, *rest.values, limit))
    return [Ranked(seq, score / (score + 1)) for seq, score in rows]


def _nearest(connection: apsw.Connection, query: Query, filter: Filter, limit: int) -> list[Ranked]:
    if query.probe is None or query.vector is None:
        return []
    condition = filter.condition
    test = f" AND rowid IN (SELECT seq FROM record WHERE {condition.sql})" if condition else ""
    sql = f"SELECT rowid FROM nearest WHERE vector MATCH ? AND k = ?{test}"
    values = (query.probe, min(limit, MAX_NEAREST), *(condition.values if condition else ()))
    found = [seq for (seq,) in connection.execute(sql, values)]
    near = {seq: nearness for seq in found if (nearness := similarity_to(connection, query, seq)) is not None}
    return [
        Ranked(seq, vectors.score(query.metric, nearness))
        for seq, nearness in sorted(near.items(), key=lambda pair: (-pair[1], -pair[0]))
    ]


def similarity_to(connection: apsw.Connection, query: Query, seq: int) -> float | None:
    """Return the exact similarity of a record to the query's vector; None if either has no vector."""
    if query.vector is None:
        return None
    doubles = connection.execute("SELECT doubles FROM vector WHERE record = ?", (seq,)).get
    if doubles is None:
        return None
    return similarity(query.vector, vector_from_bytes(doubles), query.metric)


def _blended(rankings: Sequence[Sequence[Ranked]]) -> list[Ranked]:
    """Fuse rankings into one by reciprocal rank. The score 1 means first place in every ranking that is not empty."""
    shares: defaultdict[int, list[float]] = defaultdict(list)
    for ranking in rankings:
        for place, found in enumerate(ranking, start=1):
            shares[found.seq].append(1 / (_K + place))
    best = sum(1 / (_K + 1) for ranking in rankings if ranking)
    blend = [Ranked(seq, math.fsum(each) / best) for seq, each in shares.items()]
    return sorted(blend, key=lambda found: (-found.score, -found.seq))


def _descending(ranking: Iterable[Ranked]) -> list[Ranked]:
    """Return the same order with strictly descending scores."""
    ceiling = 1.0
    strict = []
    for found in ranking:
        strict.append(Ranked(found.seq, min(found.score, ceiling)))
        ceiling = math.nextafter(strict[-1].score, 0.0)
    return strict
