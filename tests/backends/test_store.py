"""a2m-store's methods, as a caller sees them."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.timestamps import render
from a2m_router.storage.database import DatabaseError
from a2m_store.batch import carry_out
from a2m_store.drafts import StoreLimits
from a2m_store.filters import beneath
from a2m_store.store import Store
from tests.support.examples import scaled
from tests.support.older_stores import set_back
from tests.support.store_calls import ANYBODY, START, Asked


@pytest.fixture
def asked() -> Iterator[Asked]:
    asked = Asked()
    yield asked
    asked.store.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


# describe


def test_a_store_says_what_it_is_and_what_it_can(path: Path) -> None:
    asked = Asked(path)
    described = asked("describe", protocol="a2m/0.1")
    assert (described["protocol"], described["name"]) == ("a2m/0.1", "store")
    assert described["capabilities"] == [
        *("core", "salience", "scopes", "sessions", "keys", "embeddings", "external", "events"),
    ]
    assert "memory/fetch" in described["methods"]
    assert "memory/promote" not in described["methods"]
    assert described["embeddings"] == {
        "dimensions": None,
        "metric": "cosine",
        "metrics": ["cosine", "l2"],
        "model": None,
    }
    assert described["limits"]["max_recall_limit"] == 4096
    asked.remember({"content": "a", "embedding": [1, 2]}, {"content": "b"})
    described = asked("describe")
    assert described["store"]["records"] == 2
    assert described["embeddings"]["dimensions"] == 2
    asked.store.close()
    again = Asked(path)
    assert again("describe") == described
    again.store.close()


def test_another_protocol_is_refused(asked: Asked) -> None:
    assert asked.refused("describe", protocol="a2m/0.2").code == Code.PROTOCOL_NOT_SUPPORTED


def test_where_callers_are_not_told_apart_there_are_no_owners(asked: Asked) -> None:
    assert "scopes" not in asked("describe", ANYBODY)["capabilities"]
    asked("remember", ANYBODY, records=[{"content": "a", "owner": "x"}], owner="y")
    [record] = asked("timeline", ANYBODY, owner="z")["records"]
    assert "owner" not in record
    assert asked("timeline", ANYBODY, where={"owner": "x"})["records"] == []


# remember


def test_ids_come_in_the_order_of_the_records(asked: Asked) -> None:
    ids = asked.remember({"content": "a", "id": "1"}, {"content": "b"}, {"content": "c", "id": "3"})
    assert [ids[0], ids[2]] == ["1", "3"]
    assert [record["id"] for record in asked("timeline")["records"]] == ids


def test_everything_written_is_returned_unchanged(asked: Asked) -> None:
    record = {
        "id": "\0id\U0001f600",
        "content": "e\u0301\0\u202e",
        "created_at": "0001-02-03T04:05:06.007Z",
        "role": "whatever",
        "group": "g",
        "salience": 2.5,
        "owner": "o",
        "session": "s\0",
        "key": "k\0/\u00e9",
        "revision": 7,
        "embedding": [0.1, -0.0, 5e-324],
        "uri": "urn:x",
        "media_type": "text/plain",
        "metadata": {"a": None},
    }
    asked.remember(record)
    [read] = asked("timeline", embeddings=True)["records"]
    assert read == {**record, "access_count": 0}
    assert asked("fetch", key=record["key"], owner="o", embeddings=True)["record"] == read


@pytest.mark.parametrize(
    "text",
    [
        b'{ "a" : 1.0, "a": 2,"n":1e400,  "i":123456789012345678901234567890 }',
        b"{}",
        rb'{"\u0000":"\u00e9\ud83d\ude00"}',
        b'{"deep":' + b"[" * 100 + b"]" * 100 + b"}",
    ],
)
def test_metadata_is_kept_to_the_byte(asked: Asked, text: bytes) -> None:
    asked.remember({"content": "a", "metadata": Raw(text)})
    [outcome] = carry_out(asked.store, [asked.call("timeline")], durable=False)
    assert bytes(outcome["records"][0].metadata) == text


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_a_vector_is_kept_to_the_bit(vector: list[float]) -> None:
    for metric in ("cosine", "l2"):
        asked = Asked(metric=metric)
        asked.remember({"embedding": vector})
        [read] = asked("timeline", embeddings=True)["records"]
        assert list(map(float.hex, map(float, read["embedding"]))) == list(map(float.hex, vector))
        for found in asked("recall", embedding=vector)["records"]:
            assert 0 <= found["score"] <= 1
        asked.store.close()


def test_an_id_that_exists_is_returned_and_nothing_changes(asked: Asked) -> None:
    asked.remember({"id": "1", "content": "a", "session": "s"})
    before = list(asked.everything())
    assert asked.remember({"id": "1", "content": "b", "key": "k"}) == ["1"]
    assert list(asked.everything()) == before


def test_an_id_twice_in_a_batch_is_one_record(asked: Asked) -> None:
    assert asked.remember({"id": "1", "content": "a"}, {"id": "1", "content": "b"}) == ["1", "1"]
    assert asked.contents() == ["a"]


def test_an_occupied_key_is_replaced_and_keeps_what_the_record_was(asked: Asked) -> None:
    asked.remember({"id": "1", "content": "tea", "key": "drink", "role": "user", "metadata": {"a": 1}, "salience": 3})
    asked("recall", query="tea")
    asked.clock.now += 1000
    assert asked.remember({"id": "2", "content": "coffee", "key": "drink", "session": "s"}) == ["1"]
    record = asked("fetch", key="drink")["record"]
    assert record == {
        "id": "1",
        "content": "coffee",
        "key": "drink",
        "session": "s",
        "revision": 1,
        "salience": 3.0,
        "access_count": 1,
        "accessed_at": record["accessed_at"],
        "created_at": "2026-09-21T14:13:20.000Z",
    }
    assert asked.contents("recall", query="tea") == []
    assert asked("timeline", where={"a": 1})["records"] == []
    assert asked("describe")["store"]["records"] == 1


def test_a_key_twice_in_a_batch_is_a_write_and_its_replacement(asked: Asked) -> None:
    ids = asked.remember({"content": "a", "key": "k"}, {"content": "b", "key": "k"})
    assert ids[0] == ids[1]
    assert asked("fetch", key="k")["record"]["revision"] == 1


def test_the_same_id_and_key_is_a_replacement_only_with_another_content(asked: Asked) -> None:
    record = {"id": "1", "content": "a", "key": "k", "embedding": [1, 2], "metadata": {"a": 1}}
    asked.remember(record)
    asked.remember(record)
    assert asked("fetch", key="k")["record"]["revision"] == 0
    for changed in ({"content": "b"}, {"embedding": [1, 3]}, {"metadata": {"a": 2}}, {"role": "user"}):
        asked.remember({**record, **changed})
    assert asked("fetch", key="k")["record"]["revision"] == 4


def test_a_key_belongs_to_its_owner(asked: Asked) -> None:
    asked.remember({"content": "everybody's", "key": "k"})
    asked.remember({"content": "alice's", "key": "k"}, owner="alice")
    assert [asked("fetch", key="k", owner=owner)["record"]["content"] for owner in ("alice", "bob", None)] == [
        "alice's",
        "everybody's",
        "everybody's",
    ]
    asked("forget", where={"owner": None})
    assert asked("fetch", key="k", owner="bob") == {"record": None}


def test_another_owners_id_cannot_be_written(asked: Asked) -> None:
    asked.remember({"id": "1", "content": "a"}, owner="alice")
    assert asked.refused("remember", records=[{"id": "1", "content": "b"}], owner="bob").code == Code.SCOPE_DENIED
    assert asked.refused("remember", records=[{"id": "1", "content": "b", "owner": "bob"}]).code == Code.SCOPE_DENIED
    refused = asked.refused("remember", records=[{"content": "b", "owner": "alice"}], owner="bob")
    assert refused.code == Code.SCOPE_DENIED
    assert asked.remember({"id": "1", "content": "b"}) == ["1"]
    assert asked.contents() == ["a"]


def test_a_record_is_never_dated_before_the_newest_of_its_conversation(path: Path) -> None:
    asked = Asked(path)
    ahead = asked.clock.now = START + 5 * 365 * 24 * 3600 * 1000
    asked.remember({"content": "ahead", "session": "s", "owner": "a"})
    asked.store.close()
    again = Asked(path)
    again.clock.now = START - 5000
    conversations = [("s", "a"), ("s", None), ("t", "a"), (None, "a"), (None, None)]
    for session, owner in conversations:
        again.remember({"content": "after", "session": session, "owner": owner})
    again.remember({"content": "imported", "session": "t", "owner": "a", "created_at": render(ahead)})
    again.remember({"content": "after the import", "session": "t", "owner": "a"})
    told = [(record["content"], record["created_at"]) for record in again("timeline")["records"]]
    now = render(START - 5000)
    later = [("ahead", ahead), ("imported", ahead), ("after", ahead + 1), ("after the import", ahead + 1)]
    assert told == [("after", now)] * 4 + [(content, render(moment)) for content, moment in later]
    again.store.close()


BAD = [
    ({}, Code.INVALID_PARAMS, "records[1]"),
    ({"content": 3}, Code.INVALID_PARAMS, "records[1].content"),
    ({"content": "a", "id": ""}, Code.INVALID_PARAMS, "records[1].id"),
    ({"content": "a", "key": ""}, Code.INVALID_PARAMS, "records[1].key"),
    ({"content": "a", "metadata": [1]}, Code.INVALID_PARAMS, "records[1].metadata"),
    ({"content": "a", "metadata": "x"}, Code.INVALID_PARAMS, "records[1].metadata"),
    ({"content": "a", "created_at": "2026-01-01"}, Code.INVALID_PARAMS, "records[1].created_at"),
    ({"content": "a", "created_at": "2026-02-30T00:00:00.000Z"}, Code.INVALID_PARAMS, "records[1].created_at"),
    ({"content": "a", "salience": -1}, Code.INVALID_PARAMS, "records[1].salience"),
    ({"content": "a", "revision": -1}, Code.INVALID_PARAMS, "records[1].revision"),
    ({"content": "a", "embedding": []}, Code.INVALID_PARAMS, "records[1].embedding"),
    ({"content": "a", "embedding": [None]}, Code.INVALID_PARAMS, "records[1].embedding"),
    ({"content": "a", "embedding": [1, 2, 3]}, Code.EMBEDDING_MISMATCH, "records[1].embedding"),
    ({"content": "a", "tier": "x"}, Code.CAPABILITY_NOT_SUPPORTED, "tiers"),
    ({"content": "a" * 21}, Code.QUOTA_EXCEEDED, "records[1].content"),
    ({"content": "a", "owner": "bob"}, Code.SCOPE_DENIED, "records[1].owner"),
]


@pytest.mark.parametrize(("bad", "code", "named"), BAD)
def test_a_bad_record_changes_nothing_and_is_named(bad: Any, code: Code, named: str) -> None:
    asked = Asked(limits=StoreLimits(max_content_length=20))
    asked.remember({"content": "a", "embedding": [1, 2]})
    before = list(asked.everything())
    with pytest.raises(A2MError) as refused:
        asked("remember", records=[{"content": "good", "embedding": [2, 1]}, bad], owner="alice")
    assert refused.value.code == code
    assert named in refused.value.message
    assert list(asked.everything()) == before
    asked.store.close()


def test_a_failure_after_the_first_record_was_written_undoes_it(asked: Asked) -> None:
    asked.remember({"id": "1", "content": "alice's", "owner": "alice"})
    before = list(asked.everything())
    asked.refused(
        "remember", records=[{"content": "good", "embedding": [1]}, {"id": "1", "content": "a", "owner": "b"}]
    )
    assert list(asked.everything()) == before


def test_content_may_be_missing_or_empty_where_something_else_is_there(asked: Asked) -> None:
    asked.remember({"uri": "urn:x"}, {"embedding": [1.0]}, {"content": ""})
    assert asked.contents() == ["", "", ""]
    assert asked("forget", where={"content": ""}) == {"forgotten": 3}


def test_too_many_records_are_over_the_quota() -> None:
    asked = Asked(limits=StoreLimits(max_records_per_call=2))
    assert asked.refused("remember", records=[{"content": "a"}] * 3).code == Code.QUOTA_EXCEEDED
    assert asked.contents() == []
    asked.store.close()


# recall


def test_a_word_finds_its_inflections_and_rarer_words_weigh_more(asked: Asked) -> None:
    asked.remember(*({"content": f"the deploy key number {n} rotates"} for n in range(9)), {"content": "a rare deploy"})
    assert asked.contents("recall", query="rarely deploying?", limit=1) == ["a rare deploy"]
    assert len(asked.contents("recall", query="rotating", limit=20)) == 9


def test_a_query_without_a_match_returns_nothing_or_the_newest(asked: Asked) -> None:
    """A query of stop words, or an empty one, returns the newest."""
    asked.remember({"content": "old"}, {"content": "new"})
    assert asked.contents("recall", query="zebra") == []
    for query in (None, "", "what is the", "?!"):
        assert asked.contents("recall", query=query) == ["new", "old"]


@pytest.mark.parametrize("query", ['"', "a OR", "NEAR(", "content:x", "*", "^a", "-a", "'; --", "\0", "日本語"])
def test_no_query_is_taken_for_a_command(asked: Asked, query: str) -> None:
    asked.remember({"content": f"x {query} y zebra"})
    assert asked.contents("recall", query=f"{query} zebra") == [f"x {query} y zebra"]


def test_a_recall_counts_only_what_it_returns(asked: Asked) -> None:
    asked.remember({"content": "old"}, {"content": "new"})
    asked.clock.now += 1
    for count in (1, 2):
        [record] = asked("recall", limit=1)["records"]
        assert (record["content"], record["access_count"]) == ("new", count)
        assert record["accessed_at"] == "2026-09-21T14:13:20.001Z"
    assert [record["access_count"] for record in asked("timeline")["records"]] == [0, 2]


@pytest.mark.parametrize(
    ("metric", "similarities"), [("cosine", [1.0, 1.0, 0.0, -1.0]), ("l2", [0.0, -1.0, -(2**0.5), -2.0])]
)
def test_vectors_are_compared_by_the_stores_metric(metric: str, similarities: list[float]) -> None:
    asked = Asked(metric=metric)
    vectors = {"same": [1, 0], "longer": [2, 0], "square": [0, 1], "opposite": [-1, 0]}
    asked.remember({"content": "none"}, *({"content": name, "embedding": v} for name, v in vectors.items()))
    found = asked("recall", embedding=[1, 0])["records"]
    assert [record["similarity"] for record in found] == similarities
    assert {found[0]["content"], found[1]["content"]} == {"same", "longer"}
    assert asked("recall", embedding=[1, 0], embeddings=True, limit=1)["records"][0]["embedding"] in ([1, 0], [2, 0])
    asked.store.close()


def test_words_and_a_vector_together_find_what_either_finds(asked: Asked) -> None:
    asked.remember(
        {"content": "apple", "embedding": [0, 1]},
        {"content": "pear", "embedding": [1, 0]},
        {"content": "apple pear", "embedding": [1, 0.1]},
        {"content": "apple"},
    )
    found = asked("recall", query="pear", embedding=[1, 0])["records"]
    assert [record["content"] for record in found[2:]] == ["apple"]
    assert {record["content"] for record in found[:2]} == {"pear", "apple pear"}
    assert all("similarity" in record for record in found)
    everything = asked("recall", query="apple", embedding=[1, 0])["records"]
    assert len(everything) == 4
    assert sum("similarity" in record for record in everything) == 3


def test_a_vector_without_direction_is_kept_but_nothing_is_near_it(asked: Asked) -> None:
    asked.remember({"content": "zero", "embedding": [0, 0]}, {"content": "one", "embedding": [1, 0]})
    assert asked.contents("recall", embedding=[1, 0]) == ["one"]
    assert asked.contents("recall", embedding=[0, 0]) == []
    assert asked("forget", where={"content": "zero"}) == {"forgotten": 1}


def test_a_filter_does_not_cost_places(asked: Asked) -> None:
    asked.remember(*({"content": "apple", "embedding": [1, n], "session": str(n % 20)} for n in range(100)))
    where = {"session": "7"}
    assert len(asked.contents("recall", query="apple", where=where)) == 5
    assert len(asked.contents("recall", embedding=[1, 0], where=where)) == 5
    assert len(asked.contents("recall", query="apple", embedding=[1, 0], where=where)) == 5
    assert len(asked.contents("recall", where=where)) == 5


def test_scores_descend_strictly_down_to_the_opposite(asked: Asked) -> None:
    asked.remember(*({"content": "a", "embedding": [-1, 0]} for _ in range(9)))
    scores = [record["score"] for record in asked("recall", embedding=[1, 0], limit=9)["records"]]
    assert scores == sorted(set(scores), reverse=True)
    assert len(scores) == 9


def test_min_score_leaves_out_the_tail(asked: Asked) -> None:
    asked.remember(*({"content": "a", "embedding": [1, n]} for n in range(9)))
    scores = [record["score"] for record in asked("recall", embedding=[1, 0], limit=9)["records"]]
    assert scores == sorted(set(scores), reverse=True)
    assert len(asked.contents("recall", embedding=[1, 0], min_score=scores[3], limit=9)) == 4


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"limit": 0}, Code.INVALID_PARAMS),
        ({"limit": 4097}, Code.QUOTA_EXCEEDED),
        ({"limit": -1}, Code.INVALID_PARAMS),
        ({"embedding": []}, Code.INVALID_PARAMS),
        ({"embedding": [1, 2, 3]}, Code.EMBEDDING_MISMATCH),
        ({"where": [1]}, Code.INVALID_PARAMS),
        ({"query": 1}, Code.INVALID_PARAMS),
    ],
)
def test_a_bad_recall_is_refused(asked: Asked, params: Any, code: Code) -> None:
    asked.remember({"content": "a", "embedding": [1, 2]})
    with pytest.raises(A2MError) as refused:
        asked("recall", **params)
    assert refused.value.code == code


# where and key_prefix


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"n": 1}, ["one", "float"]),
        ({"n": True}, ["true"]),
        ({"n": [True, "1"]}, ["true", "text"]),
        ({"n": None}, ["null", "absent"]),
        ({"n": [None, 1]}, ["one", "float", "null", "absent"]),
        ({"n": [[1, 2]]}, ["list"]),
        ({"n": []}, []),
        ({"n": {"a": 1, "b": None}}, ["object"]),
        ({"n": 123456789012345678901234567890}, ["long"]),
        ({"n": 123456789012345678901234567891}, []),
        ({"n": "x" * 5000}, ["big"]),
        ({"metadata": {"n": 1}}, ["one", "float"]),
        ({"metadata": [None, {"n": [1, 2]}]}, ["list", "absent"]),
        ({"tier": None, "n": 1}, ["one", "float"]),
        ({"tier": "x"}, []),
        ({"role": ["user", None], "n": 1}, ["one", "float"]),
        ({"salience": 1, "n": 1, "access_count": 0}, ["one", "float"]),
        ({"salience": True}, []),
        ({"accessed_at": None, "n": 1.0, "embedding": None}, ["one", "float"]),
        ({"embedding": [[1]]}, []),
        ({"created_at": "2026-09-21T14:13:20.000Z", "content": ["one", "text", 7]}, ["one", "text"]),
        ({"created_at": "yesterday"}, []),
        ({"score": 1}, []),
    ],
)
def test_where_is_json_equality(asked: Asked, where: Any, expected: list[str]) -> None:
    members: dict[str, Any] = {
        "one": Raw(b"1"), "float": Raw(b"1.0"), "true": True, "text": "1", "null": None, "list": [1, 2],
        "object": {"b": None, "a": 1}, "long": Raw(b"123456789012345678901234567890"), "big": "x" * 5000,
    }  # fmt: skip
    asked.remember(*({"content": name, "metadata": {"n": value}} for name, value in members.items()))
    asked.remember({"content": "absent"})
    assert asked.contents(where=where) == expected


def test_a_prefix_has_the_key_itself_and_what_is_beneath(asked: Asked) -> None:
    keys = ["a", "a/b", "a/b/", "a/b/c", "a/bc", "a/b0", "a/b.", "A/b", "a/b/\U0001f600"]
    asked.remember({"content": "none"}, *({"content": key, "key": key} for key in keys))
    assert asked.contents(key_prefix="a/b") == ["a/b", "a/b/", "a/b/c", "a/b/\U0001f600"]
    assert asked.contents(key_prefix="a/b/") == ["a/b/", "a/b/c", "a/b/\U0001f600"]
    assert asked.contents(key_prefix="") == keys
    assert asked("forget", key_prefix="a/b/", where={"content": ["a/b/c", "a"]}) == {"forgotten": 1}


@given(st.text("a/0.", max_size=5), st.text("a/0.", min_size=1, max_size=5))
@settings(max_examples=scaled(100))
def test_a_prefix_is_a_range_of_keys(prefix: str, key: str) -> None:
    condition = beneath(prefix)
    with sqlite3.connect(":memory:") as connection:
        sql = f"SELECT {condition.sql} FROM (SELECT ? AS key) AS record"
        # FROM binds the key, after the values of the condition
        [matches] = connection.execute(sql, (*condition.values, key)).fetchone()
    connection.close()
    assert bool(matches) == (not prefix or key == prefix or key.startswith(prefix.removesuffix("/") + "/"))


# timeline, forget, sessions, reinforce


def test_a_timeline_ascends_and_its_limit_keeps_the_newest(asked: Asked) -> None:
    for content, second in (("c", 3), ("a", 1), ("b", 2), ("b2", 2)):
        asked.remember({"content": content, "created_at": f"2020-01-01T00:00:0{second}.000Z"})
    assert asked.contents() == ["a", "b", "b2", "c"]
    assert asked.contents(limit=2) == ["b2", "c"]
    assert asked.contents("recall", limit=2) == ["c", "b2"]
    assert asked.refused("timeline", limit=0).code == Code.INVALID_PARAMS


def test_a_walk_sees_everything_once_in_order_of_insertion(asked: Asked) -> None:
    asked.remember(
        *({"id": str(n), "content": f"{n}", "created_at": f"20{99 - n}-01-01T00:00:00.000Z"} for n in range(25))
    )
    seen, after = [], None
    while True:
        answer = asked("timeline", page=10, **({"after": after} if after else {}))
        births = [record["created_at"] for record in answer["records"]]
        assert births == sorted(births)
        seen += sorted(int(record["id"]) for record in answer["records"])
        after = answer["next"]
        if after is None:
            break
        asked("forget", ids=[str(seen[-1])])
    assert seen == list(range(25))
    assert asked.refused("timeline", after="x").code == Code.INVALID_PARAMS
    assert asked.refused("timeline", page=0).code == Code.INVALID_PARAMS


def test_a_number_is_never_given_twice_so_a_walk_misses_nothing(asked: Asked) -> None:
    asked.remember({"id": "1", "content": "a"}, {"id": "2", "content": "b"}, {"id": "3", "content": "c"})
    after = asked("timeline", page=2)["next"]
    asked("forget", ids=["2", "3"])
    asked.remember({"content": "d"})
    assert asked.contents(after=after) == ["d"]


@pytest.mark.parametrize(
    "params", [{}, {"owner": "a"}, {"where": {}}, {"query": ""}, {"query": "the"}, {"key_prefix": ""}, {"tier": "x"}]
)
def test_forgetting_everything_takes_a_real_selector(asked: Asked, params: Any) -> None:
    asked.remember({"content": "the", "key": "k"})
    assert asked.refused("forget", **params).code == Code.INVALID_PARAMS
    assert asked.contents() == ["the"]


def test_selectors_narrow_each_other(asked: Asked) -> None:
    asked.remember(*({"id": str(n), "content": "apple" if n % 2 else "pear", "key": f"k/{n}"} for n in range(8)))
    assert asked("forget", ids=["1", "2", "9"], query="apples", key_prefix="k") == {"forgotten": 1}
    assert asked("forget", ids=[]) == {"forgotten": 0}
    assert asked("forget", query="apple") == {"forgotten": 3}
    assert asked("describe")["store"]["records"] == 4
    assert asked.contents("recall", query="apple") == []


def test_a_scoped_caller_sees_and_forgets_its_own_and_what_is_ownerless(asked: Asked) -> None:
    for owner in ("alice", "bob", None):
        asked.remember({"id": f"{owner}", "content": f"apple {owner}", "session": f"s-{owner}"}, owner=owner)
    mine = ["apple alice", "apple None"]
    assert asked.contents(owner="alice") == mine
    assert set(asked.contents("recall", query="apple", owner="alice")) == set(mine)
    assert asked.contents("recall", owner="alice") == mine[::-1]
    assert asked.contents(owner="alice", where={"owner": "bob"}) == []
    assert [each["session"] for each in asked("session/list", owner="alice")["sessions"]] == ["s-None", "s-alice"]
    assert asked("reinforce", ids=["alice", "bob", "None", "None", "?"], owner="alice") == {"reinforced": 2}
    assert asked("forget", ids=["alice", "bob", "None"], owner="alice") == {"forgotten": 2}
    assert asked.contents() == ["apple bob"]


def test_sessions_are_listed_with_their_ages(asked: Asked) -> None:
    asked.remember({"content": "no session"})
    asked.remember({"content": "a"}, {"content": "b", "session": "t"}, session="s")
    asked.clock.now += 1500
    asked.remember({"content": "c"}, session="s")
    assert asked("session/list")["sessions"] == [
        {
            "session": "s",
            "records": 2,
            "opened_at": "2026-09-21T14:13:20.000Z",
            "touched_at": "2026-09-21T14:13:21.500Z",
        },
        {
            "session": "t",
            "records": 1,
            "opened_at": "2026-09-21T14:13:20.000Z",
            "touched_at": "2026-09-21T14:13:20.000Z",
        },
    ]
    assert asked("session/close", session="s") == {
        "moved": 0, "promoted": 0, "dropped": 0, "summarized": 0, "counts": {}, "closed": "s", "flushed": 0,
    }  # fmt: skip
    assert asked.refused("session/close", session="").code == Code.INVALID_PARAMS
    assert len(asked.contents()) == 4


def test_salience_stays_within_what_a_number_can_be(asked: Asked) -> None:
    asked.remember({"id": "1", "content": "a"})

    def salience() -> float:
        return float(asked("timeline")["records"][0]["salience"])

    asked("reinforce", ids=["1"])
    assert salience() == 2
    asked("reinforce", ids=["1"], amount=-7)
    assert salience() == 0
    asked("reinforce", ids=["1"], amount=1.7e308)
    asked("reinforce", ids=["1"], amount=1.7e308)
    assert salience() == 1.7976931348623157e308


def test_an_empty_key_cannot_be_fetched(asked: Asked) -> None:
    assert asked.refused("fetch", key="").code == Code.INVALID_PARAMS


# the file


def test_another_metric_builds_the_index_anew(path: Path) -> None:
    asked = Asked(path)
    asked.remember({"content": "far", "embedding": [9, 0]}, {"content": "near", "embedding": [1, 0.5]})
    assert asked.contents("recall", embedding=[1, 0]) == ["far", "near"]
    asked.store.close()
    again = Asked(path, metric="l2")
    assert again("describe")["embeddings"]["metric"] == "l2"
    assert again.contents("recall", embedding=[1, 0]) == ["near", "far"]
    again.store.close()
    kept = Asked(path)
    assert kept("describe")["embeddings"]["metric"] == "l2"
    kept.store.close()


def test_a_file_of_another_program_is_left_alone(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    with pytest.raises(DatabaseError, match="another program"):
        Store(path, clock=lambda: 0)


def test_a_full_disk_acknowledges_nothing_and_the_store_goes_on(path: Path) -> None:
    asked = Asked(path)
    asked.remember({"id": "0", "content": "kept", "embedding": [1.0]})
    before = list(asked.everything())
    with asked.store.transaction() as connection:
        pages = connection.pragma("max_page_count")
        connection.pragma("max_page_count", connection.pragma("page_count"))
    calls = [
        asked.call("remember", records=[{"id": "small", "content": "a"}]),
        asked.call("timeline"),
        asked.call("remember", records=[{"id": "big", "content": "b" * 1_000_000}]),
        asked.call("recall", query="kept"),
        asked.call("remember", records=[{}]),
    ]
    written, seen, big, found, bad = carry_out(asked.store, calls, durable=True)
    for lost in (written, big, bad):
        assert isinstance(lost, A2MError)
        assert lost.code == Code.INTERNAL_ERROR
        assert lost.data is not None
        assert "full" in lost.data["reason"]
    assert [record.id for record in seen["records"]] == ["0"]
    assert [record.id for record in found["records"]] == ["0"]
    assert list(asked.everything()) == before
    with asked.store.transaction() as connection:
        connection.pragma("max_page_count", pages)
    assert asked.remember({"id": "big", "content": "b" * 1_000_000}) == ["big"]
    asked.store.close()


def test_a_disk_that_does_not_confirm_acknowledges_no_write(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync() -> None:
        raise OSError(5, "the disk failed")

    monkeypatch.setattr(asked.store, "sync", sync)
    calls = [asked.call("remember", records=[{"content": "a"}]), asked.call("timeline")]
    written, seen = carry_out(asked.store, calls, durable=True)
    assert isinstance(written, A2MError)
    assert (written.code, "the disk failed" in str(written.data)) == (Code.INTERNAL_ERROR, True)
    assert len(seen["records"]) == 1


def test_one_failure_in_a_batch_hurts_nobody_else(asked: Asked) -> None:
    asked.remember({"id": "1", "content": "alice's", "owner": "alice"})
    foreign = {"id": "1", "content": "x", "owner": "bob"}
    calls = [
        asked.call("remember", records=[{"content": "apple", "embedding": [1, 2]}]),
        asked.call("remember", records=[{"content": "undone apple"}, foreign]),
        asked.call("remember", records=[{"content": "bad width", "embedding": [1]}]),
        asked.call("recall", query="apple"),
        asked.call("remember", records=[{"content": "last"}]),
    ]
    outcomes = carry_out(asked.store, calls, durable=True)
    assert [isinstance(outcome, A2MError) for outcome in outcomes] == [False, True, True, False, False]
    assert [record.content for record in outcomes[3]["records"]] == ["apple"]
    assert asked.contents() == ["alice's", "apple", "last"]
    assert asked("describe")["store"]["records"] == 3


def test_no_step_of_the_daily_work_reads_a_whole_table(asked: Asked) -> None:
    asked.remember(*({"content": f"{n}", "session": f"{n % 9}", "owner": f"{n % 3}"} for n in range(100)))
    statements: dict[str, tuple[Any, ...]] = {}
    with asked.store.transaction() as connection:

        def trace(_: Any, sql: str, bindings: Any) -> bool:
            statements[sql] = tuple(bindings or ())
            return True

        connection.exec_trace = trace
    record = {"id": "x", "content": "a", "key": "k", "metadata": {"a": 1}, "embedding": [1], "session": "1"}
    asked.remember(record)
    asked.remember({**record, "content": "b"})
    asked("fetch", key="k", owner="o")
    scopes: list[dict[str, Any]] = [{}, {"owner": "1"}]
    for scope in scopes:
        asked("timeline", where={"session": "1"}, **scope)
        asked("timeline", limit=5, where={"session": ["1", "2"]}, **scope)
        asked("timeline", limit=5, **scope)
        asked("timeline", page=5)
        asked("timeline", key_prefix="a/b", **scope)
        asked("timeline", where={"a": 1}, **scope)
        asked("timeline", where={"group": "g"}, **scope)
        asked("recall", **scope)
        asked("recall", where={"id": ["x", "y"]}, **scope)
        asked("reinforce", ids=["x"], **scope)
        asked("forget", ids=["x", "y"], **scope)
        asked("forget", ids=["x", "y"], where={"session": "1"}, **scope)
    with asked.store.transaction() as connection:
        connection.exec_trace = None
        for sql, bindings in statements.items():
            if sql.lstrip().startswith(("SELECT", "UPDATE record", "DELETE")):
                plan = [step[3] for step in connection.execute(f"EXPLAIN QUERY PLAN {sql}", bindings)]
                whole = [f"SCAN {table}" for table in ("record", "member", "vector", "access")]
                # a scan that begins with the newest reads its index only up to the limit
                walks = [step for step in plan if step in whole or step.startswith(tuple(f"{w} " for w in whole))]
                assert all("USING INDEX record_created" in w or "COVERING" in w for w in walks), (sql, plan)
                assert not walks or "LIMIT" in sql, (sql, plan)
    assert len(statements) > 20


# --- how common a word is, for each owner


texts = st.lists(st.sampled_from(["alpha", "beta", "gamma", "delta"]), min_size=1, max_size=6).map(" ".join)


@settings(max_examples=scaled(25))
@given(mine=st.lists(texts, min_size=1, max_size=8), query=texts, data=st.data())
def test_an_owners_ranking_is_that_of_a_store_that_holds_only_what_he_sees(
    mine: list[str], query: str, data: st.DataObject
) -> None:
    others = data.draw(st.lists(texts, max_size=8))
    alone, among = Asked(), Asked()
    for store in (alone, among):
        # written, replaced and forgotten, so that the counts have gone up and down
        store.remember({"content": "alpha alpha omega", "owner": "a", "key": "k"})
        store.remember({"content": "beta", "owner": "a", "key": "k"})
        store("forget", where={"key": "k"})
    for number, text in enumerate(mine):
        record = {"id": str(number), "content": text, "owner": "a" if number % 3 else None}
        alone.remember(record)
        if number < len(others):
            among.remember({"content": others[number], "owner": "b"})
        among.remember(record)
    # without an owner the store ranks by FTS5's own bm25: the same formula over all records
    plain = alone("recall", query=query, limit=20)["records"]
    scoped = among("recall", query=query, limit=20, owner="a")["records"]
    told = {record["id"]: record["score"] for record in plain}
    assert {record["id"]: record["score"] for record in scoped} == pytest.approx(told)
    # the two add in different orders, so records that differ in a score's last bit may have swapped places
    assert [told[record["id"]] for record in scoped] == pytest.approx(sorted(told.values(), reverse=True))
    alone.store.close()
    among.store.close()


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_an_earlier_schema_is_brought_up_to_date(version: int, tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    asked = Asked(path)
    records = [{"content": "one two two", "owner": "a", "embedding": [1, 2]}, {"content": "three"}, {"uri": "u:1"}]
    asked.remember(*records)
    with asked.store.transaction() as connection:
        before = [list(connection.execute(f"SELECT * FROM {table}")) for table in ("share", "record", "occurrence")]
    asked.store.close()
    set_back(path, version)
    again = Asked(path)
    with again.store.transaction() as connection:
        after = [list(connection.execute(f"SELECT * FROM {table}")) for table in ("share", "record", "occurrence")]
    assert [sorted(rows, key=repr) for rows in after] == [sorted(rows, key=repr) for rows in before]
    for query, found in (("two", ["one two two"]), ("three", ["three"]), ("oldsecretword", [])):
        assert [record["content"] for record in again("recall", query=query)["records"]] == found
    assert [record["content"] for record in again("recall", embedding=[1, 2])["records"]] == ["one two two"]
    again.store.close()
    assert b"oldsecret" not in path.read_bytes()


def test_how_common_a_word_is_does_not_depend_on_the_filter(asked: Asked) -> None:
    asked.remember(*({"content": "common", "owner": "a", "session": "t"} for _ in range(50)))
    asked.remember(
        {"content": "common", "owner": "a", "session": "s", "id": "common"},
        {"content": "rare", "owner": "a", "session": "s", "id": "rare"},
    )
    scopes: list[dict[str, Any]] = [{}, {"owner": "a"}]
    for params in scopes:
        found = asked("recall", query="rare common", where={"session": "s"}, **params)["records"]
        assert [record["id"] for record in found] == ["rare", "common"]
