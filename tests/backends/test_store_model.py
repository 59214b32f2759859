"""a2m-store against a plain list of records: for any calls in any order, both give the same answers."""

import json
import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import Raw

from a2m_router.protocol.wire.errors import Code
from a2m_router.protocol.wire.timestamps import parse, render
from a2m_router.ranking.text import query_tokens, tokens
from tests.support.examples import scaled
from tests.support.store_calls import Asked

odd = st.sampled_from(["", "a", "b", "\0", "a\0b", "\U0001f600", "é", "e\u0301", "A", "\u202e", "a b"])
names = odd.filter(bool)
ids = names | st.sampled_from(["1", "2", "3", "4", "5"])
owners = st.none() | st.sampled_from(["alice", "bob", "b\0b"])
keys = st.none() | st.sampled_from(["k", "k/a", "k/a/b", "k/ab", "k/", "é/a", "k\0/a"])
words = st.lists(
    st.sampled_from(["apple", "apples", "pear", "the", "naïve", "日本語", "\0", "zebra", "x\0y", "\U0001f600", '"OR"']),
    max_size=4,
).map(" ".join)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from([1.0, 0.5, 2**53, 2**53 + 1, 10**30, 1e300, -0.0])
    | odd
    | st.text(st.characters(codec="utf-8"), max_size=80)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(odd, inner, max_size=2), max_leaves=4
)
members = st.dictionaries(st.sampled_from(["x", "tier", "role", "", "\0", "é", "n" * 70]), values, max_size=3)
moments = st.sampled_from(["2026-09-21T14:13:20.000Z", "1969-12-31T23:59:59.999Z", "2026-09-21T14:13:20.002Z"])
drafts = st.fixed_dictionaries(
    {"content": words},
    optional={
        "id": ids,
        "key": keys,
        "owner": owners,
        "session": st.none() | names,
        "group": names,
        "role": st.sampled_from(["user", "tool"]),
        "metadata": members,
        "created_at": moments,
        "salience": st.sampled_from([0, 0.5, 1, 7.25]),
        "revision": st.integers(0, 3),
        "embedding": st.lists(st.sampled_from([-1.0, -0.0, 0.0, 0.5, 1.0]), min_size=2, max_size=2),
        "uri": odd,
        "media_type": odd,
    },
)
tests = st.dictionaries(
    st.sampled_from(["x", "tier", "", "\0", "é", "n" * 70]), values | st.lists(scalars, max_size=3), max_size=1
) | st.one_of(
    st.fixed_dictionaries({"id": ids | st.lists(ids, max_size=3)}),
    st.fixed_dictionaries({"session": st.none() | names, "role": st.sampled_from([None, "user", ["user", None], 1])}),
    st.fixed_dictionaries({"owner": owners}),
    st.fixed_dictionaries({"salience": st.sampled_from([1, 0.5, [0, 7.25], None, "1"])}),
    st.fixed_dictionaries({"access_count": st.sampled_from([0, 1, [1, 2], True])}),
    st.fixed_dictionaries({"revision": st.sampled_from([0, None, [1, 2]]), "key": keys}),
    st.fixed_dictionaries({"accessed_at": st.none() | moments, "created_at": moments}),
    st.fixed_dictionaries({"embedding": st.none(), "group": st.none() | names}),
    st.fixed_dictionaries({"metadata": st.none() | members, "uri": st.none() | odd}),
)
selections = st.fixed_dictionaries(
    {}, optional={"where": tests, "owner": owners, "key_prefix": st.sampled_from(["k", "k/", "k/a", "é", "k\0"])}
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    return type(a) is type(b) and bool(a == b)


FIELDS = [
    "id",
    "content",
    "created_at",
    "role",
    "metadata",
    "group",
    "salience",
    "access_count",
    "accessed_at",
    "owner",
    "session",
    "key",
    "revision",
    "embedding",
    "uri",
    "media_type",
]  # fmt: skip


def passes(record: dict[str, Any], selection: dict[str, Any]) -> bool:
    owner, prefix = selection.get("owner"), selection.get("key_prefix")
    if owner is not None and record.get("owner") not in (owner, None):
        return False
    if prefix is not None:
        key, folder = record.get("key") or "", prefix if prefix.endswith("/") else prefix + "/"
        if key != prefix and not key.startswith(folder):
            return False
    for name, wanted in selection.get("where", {}).items():
        value = record.get(name) if name in FIELDS else (record.get("metadata") or {}).get(name)
        if not any(same(value, each) for each in (wanted if isinstance(wanted, list) else [wanted])):
            return False
    return True


def changed(record: dict[str, Any], draft: dict[str, Any]) -> bool:
    """Return whether a draft, with defaults from `record`, changes the content."""
    kept: dict[str, Any] = {name: record[name] for name in ("created_at", "revision") if name in record}
    whole: dict[str, Any] = {**kept, **draft, "salience": None}
    return any(
        repr(whole.get(name)) != repr(record.get(name))
        for name in FIELDS
        if name not in ("salience", "access_count", "accessed_at")
    )


class StoreAndModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[dict[str, Any]] = []

    @initialize(metric=st.sampled_from(["cosine", "l2"]))
    def opened(self, metric: str) -> None:
        self.asked = Asked(metric=metric)
        self.metric = metric

    def teardown(self) -> None:
        self.asked.store.close()

    @property
    def now(self) -> str:
        return render(self.asked.clock())

    def selected(self, selection: dict[str, Any]) -> list[dict[str, Any]]:
        return [record for record in self.records if passes(record, selection)]

    @rule(step=st.integers(0, 2))
    def time_passes(self, step: int) -> None:
        self.asked.clock.now += step

    @rule(batch=st.lists(drafts, min_size=1, max_size=4), owner=owners, session=st.none() | names)
    def remember(self, batch: list[dict[str, Any]], owner: str | None, session: str | None) -> None:
        written = [dict(record) for record in self.records]
        expected = [self._remember(written, draft, owner, session) for draft in batch]
        texts = [{**d, "metadata": Raw(spelt(d["metadata"]))} if "metadata" in d else d for d in batch]
        params: dict[str, Any] = {"records": texts, "owner": owner, "session": session}
        if None in expected:
            assert self.asked.refused("remember", **params).code == Code.SCOPE_DENIED
            return
        got = self.asked("remember", **params)["ids"]
        for place, id in enumerate(expected):
            # the store chooses these ids; the model takes them from its answer
            for record in written:
                if record["id"] == id and isinstance(id, int):
                    record["id"] = got[place]
        assert got == [got[expected.index(id)] if isinstance(id, int) else id for id in expected]
        self.records = written

    def _remember(
        self, written: list[dict[str, Any]], draft: dict[str, Any], owner: str | None, session: str | None
    ) -> Any:
        """Return the id: a number if the store chooses one; None if the write is denied."""
        if owner and draft.get("owner") not in (None, owner):
            return None
        draft = {name: value for name, value in draft.items() if value is not None}
        for name, default in (("owner", owner), ("session", session)):
            if default is not None:
                draft.setdefault(name, default)
        there = next((each for each in written if "id" in draft and each["id"] == draft["id"]), None)
        address = (draft.get("key"), draft.get("owner"))
        if there is not None:
            if there.get("owner") not in (None, draft.get("owner")) and "owner" in draft:
                return None
            if "key" not in draft or address != (there.get("key"), there.get("owner")) or not changed(there, draft):
                return there["id"]
        else:
            there = next(
                (each for each in written if "key" in draft and (each.get("key"), each.get("owner")) == address), None
            )
        if there is None:
            made = {"id": len(written), "created_at": self.dated(draft, written), "salience": 1.0, "access_count": 0}
            if "key" in draft:
                made["revision"] = 0
            written.append({**made, **draft})
            return written[-1]["id"]
        kept = ("id", "created_at", "salience", "access_count", "accessed_at")
        new = {name: there[name] for name in kept if name in there}
        new |= {"revision": there.get("revision", 0) + 1, **draft, "id": there["id"]}
        there.clear()
        there.update(new)
        return there["id"]

    def dated(self, draft: dict[str, Any], written: list[dict[str, Any]]) -> str:
        """Return the clock's time or, if that is later, a moment after the newest of the draft's own conversation."""
        conversation = (draft.get("session"), draft.get("owner"))
        there = [
            parse(each["created_at"]) for each in written if (each.get("session"), each.get("owner")) == conversation
        ]
        newest = max(there, default=0) if "session" in draft else 0
        return self.now if newest <= parse(self.now) else render(newest + 1)

    @rule(selection=selections, limit=st.none() | st.integers(1, 4))
    def timeline(self, selection: dict[str, Any], limit: int | None) -> None:
        expected = sorted(self.selected(selection), key=lambda record: record["created_at"])
        expected = expected[-limit:] if limit else expected
        self.assert_same(self.read("timeline", selection, limit), expected)

    @rule(selection=selections, limit=st.integers(1, 4))
    def newest(self, selection: dict[str, Any], limit: int) -> None:
        expected = sorted(self.selected(selection), key=lambda record: record["created_at"])[-limit:][::-1]
        self._accessed(expected)
        self.assert_same(self.read("recall", selection, limit), expected)

    @rule(selection=selections, query=words, limit=st.integers(1, 20))
    def recall_words(self, selection: dict[str, Any], query: str, limit: int) -> None:
        asked_for = query_tokens(query)
        if not asked_for:
            return
        matching = [r for r in self.selected(selection) if set(tokens(r["content"])) & set(asked_for)]
        self._check_ranked(self.read("recall", {**selection, "query": query}, limit), matching, limit)

    @precondition(lambda self: any("embedding" in record for record in self.records))
    @rule(selection=selections, limit=st.integers(1, 20), vector=st.tuples(*[st.sampled_from([-1.0, 0.0, 2.0])] * 2))
    def recall_vector(self, selection: dict[str, Any], limit: int, vector: tuple[float, float]) -> None:
        if self.metric == "cosine":
            near = {
                r["id"]: math.cos(math.atan2(*vector) - math.atan2(*r["embedding"]))
                for r in self.records
                if any(r.get("embedding", ())) and any(vector)
            }
        else:
            near = {r["id"]: -math.dist(vector, r["embedding"]) for r in self.records if "embedding" in r}
        matching = [record for record in self.selected(selection) if record["id"] in near]
        found = self.read("recall", {**selection, "embedding": vector}, limit)
        exact = [record["similarity"] for record in found]
        self._check_ranked(found, matching, limit)
        similarities = sorted((near[record["id"]] for record in matching), reverse=True)[:limit]
        assert all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(exact, similarities, strict=True))

    def _check_ranked(self, found: list[Any], matching: list[dict[str, Any]], limit: int) -> None:
        assert len(found) == min(limit, len(matching))
        scores = [record["score"] for record in found]
        assert scores == sorted(set(scores), reverse=True)
        assert all(0 <= score <= 1 for score in scores)
        by_id = {record["id"]: record for record in matching}
        expected = [by_id[record["id"]] for record in found]
        self._accessed(expected)
        self.assert_same(found, expected)

    def _accessed(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            record["access_count"] += 1
            record["accessed_at"] = self.now

    @rule(selection=selections, query=st.none() | words, some=st.none() | st.lists(ids, max_size=4))
    def forget(self, selection: dict[str, Any], query: str | None, some: list[str] | None) -> None:
        asked_for = query_tokens(query or "")
        params = {**selection, "query": query, "ids": some}
        narrow = asked_for or selection.get("where") or selection.get("key_prefix") or some is not None
        if not narrow or (query is not None and not asked_for):
            assert self.asked.refused("forget", **spelt_where(params)).code == Code.INVALID_PARAMS
            return
        gone = [
            record
            for record in self.selected(selection)
            if (some is None or record["id"] in some)
            and (query is None or set(tokens(record["content"])) & set(asked_for))
        ]
        assert self.asked("forget", **spelt_where(params)) == {"forgotten": len(gone)}
        self.records = [record for record in self.records if not any(record is each for each in gone)]

    @rule(some=st.lists(ids, max_size=4), owner=owners, amount=st.sampled_from([-3, 0.5, 1]))
    def reinforce(self, some: list[str], owner: str | None, amount: float) -> None:
        raised = [record for record in self.selected({"owner": owner}) if record["id"] in some]
        for record in raised:
            record["salience"] = max(0, record["salience"] + amount)
        assert self.asked("reinforce", ids=some, owner=owner, amount=amount) == {"reinforced": len(raised)}

    @rule(key=keys.filter(bool), owner=owners)
    def fetch(self, key: str, owner: str | None) -> None:
        record = self.asked("fetch", key=key, owner=owner, embeddings=True)["record"]
        of = {each.get("owner"): each for each in self.records if each.get("key") == key}
        self.assert_same([record] if record else [], [r for r in (of.get(owner) or of.get(None),) if r])

    @rule(owner=owners)
    def list_sessions(self, owner: str | None) -> None:
        born: dict[str, list[str]] = {}
        for record in self.selected({"owner": owner}):
            if "session" in record:
                born.setdefault(record["session"], []).append(record["created_at"])
        assert self.asked("session/list", owner=owner)["sessions"] == [
            {"session": session, "records": len(times), "opened_at": min(times), "touched_at": max(times)}
            for session, times in sorted(born.items(), key=lambda item: item[0].encode())
        ]

    @rule(selection=selections, page=st.integers(1, 3))
    def walk(self, selection: dict[str, Any], page: int) -> None:
        seen: list[str] = []
        after = None
        while True:
            answer = self.asked("timeline", **spelt_where(selection), page=page, after=after)
            order = [record["id"] for record in self.records]
            seen += sorted((record["id"] for record in answer["records"]), key=order.index)
            if (after := answer["next"]) is None:
                break
        assert seen == [record["id"] for record in self.selected(selection)]

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "asked"):
            assert self.asked("describe")["store"]["records"] == len(self.records)

    def read(self, method: str, params: dict[str, Any], limit: int | None) -> list[Any]:
        found = self.asked(method, **spelt_where(params), limit=limit, embeddings=True)["records"]
        assert isinstance(found, list)
        return found

    def assert_same(self, found: list[Any], expected: list[dict[str, Any]]) -> None:
        for record in found:
            for extra in ("score", "similarity"):
                record.pop(extra, None)
        # repr distinguishes 1 from 1.0 and -0.0 from 0.0, and so shows whether a value is unchanged
        assert [readable(record) for record in found] == [readable(record) for record in expected]


def readable(record: dict[str, Any]) -> dict[str, str]:
    read = {**record, "salience": float(record["salience"])}
    if "metadata" in read:
        read["metadata"] = spelt(read["metadata"])
    return {name: repr(value) for name, value in read.items()}


def spelt(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def spelt_where(params: dict[str, Any]) -> dict[str, Any]:
    """Encode by json: msgspec's encoder has no integers of more than 64 bits."""
    where = params.get("where")
    return params if where is None else {**params, "where": {name: Raw(spelt(each)) for name, each in where.items()}}


TestStoreAndModel = StoreAndModel.TestCase
TestStoreAndModel.settings = settings(max_examples=scaled(40), stateful_step_count=30)
