"""Lifting: a lifted record comes back unchanged from a server that promises less, and only a valid rider is read."""

import json
from base64 import b64encode
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw, UnsetType

from a2m_router.catalog.changes import Changes
from a2m_router.config.loading import parse
from a2m_router.protocol.wire.equality import parse_where
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.matching import FIELDS, matches
from a2m_router.protocol.wire.records import Draft, Record, Riderless, digest, record_of
from a2m_router.protocol.wire.timestamps import UNDATED
from a2m_router.tiers.lifting import (
    RESERVED,
    VERSION,
    Lifted,
    NewerRider,
    ServerRecord,
    delegable,
    escaped,
    lifted,
    lowered,
    shows_metadata,
    unescaped,
)
from a2m_router.tiers.link_factory import links_for
from a2m_router.tiers.profile import CannotServe, Profile
from tests.servers import javascript
from tests.servers.core_only import CoreOnly
from tests.servers.habits import HABITS, FlattensMetadata
from tests.support.federated import Foreign, Mix, Steered, Trial, reconnected, redone, settings_of, told_by, trial

names = st.text(max_size=6) | st.sampled_from([RESERVED, "a", "1", "01"])
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | st.just("\0"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
texts = st.none() | st.text(max_size=6)
nasty = st.sampled_from([b'{"a":1.0,"a":2}', b'{"n":1e400}', b'{"x":-0,"2":0,"1":0}', b'{ "s" :\t"\\u2028" }', b"{}"])


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    metadata = draw(st.none() | nasty | st.dictionaries(names, json_values, max_size=4).map(encoded))
    return Draft(
        id=draw(st.text(min_size=1, max_size=6)),
        content=draw(st.text(max_size=20)),
        created_at="2026-09-21T14:13:20.002Z",
        role=draw(texts),
        group=draw(texts),
        owner=draw(texts),
        session=draw(texts),
        key=draw(texts),
        revision=draw(st.integers(0, 2**62)),
        uri=draw(texts),
        media_type=draw(texts),
        metadata=UNSET if metadata is None else Raw(metadata),
        embedding=draw(st.none() | st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=4)),
    )


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def told(draft: Draft, *, like_javascript: bool, **answered: Any) -> ServerRecord:
    """Return a lifted record as its server returns it."""
    return msgspec.json.decode(answer(draft, like_javascript=like_javascript, **answered), type=ServerRecord)


def answer(draft: Draft, *, like_javascript: bool, **answered: Any) -> Raw:
    text = msgspec.json.encode(draft).decode()
    fields = json.loads(javascript.reencoded(text) if like_javascript else text)
    fields["created_at"] = "2027-01-01T00:00:00.000Z"
    fields.update(answered)
    return Raw(encoded(fields))


@given(draft=drafts(), vector=st.booleans(), like_javascript=st.booleans())
def test_what_was_lifted_comes_down_as_it_was(draft: Draft, vector: bool, like_javascript: bool) -> None:
    back = lowered(told(lifted(draft, vector=vector, tier=None), like_javascript=like_javascript), vector=vector)
    assert digest(back) == digest(draft)


NOT_TO_BE_KEPT: Final = sorted(set(Record.__struct_fields__) - {"id", "content", "metadata", "score", "similarity"})
inventions = st.dictionaries(st.sampled_from(NOT_TO_BE_KEPT) | st.text(min_size=9, max_size=12), json_values)


@given(draft=drafts(), invented=inventions, members=st.dictionaries(names, json_values, max_size=3), data=st.data())
def test_a_server_need_keep_nothing_but_the_id_the_content_and_the_rider(
    draft: Draft, invented: dict[str, Any], members: dict[str, Any], data: st.DataObject
) -> None:
    """The server may fill in, add, normalise and drop all other fields."""
    given = lifted(draft, vector=False, tier=None)
    assert isinstance(given.metadata, Raw)
    kept = {**members, RESERVED: json.loads(bytes(given.metadata))[RESERVED]}
    dropped = data.draw(st.sets(st.sampled_from(["role", "group", "created_at"])))
    answer = {**json.loads(msgspec.json.encode(given)), "created_at": "2027-01-01T00:00:00.000Z", **invented}
    answer = {name: value for name, value in answer.items() if name not in dropped} | {"metadata": kept}
    back = lowered(msgspec.json.decode(encoded(answer), type=ServerRecord), vector=True)
    assert digest(back) == digest(draft)


@given(
    draft=drafts(), added=st.dictionaries(st.text(min_size=7, max_size=9), json_values), like_javascript=st.booleans()
)
def test_a_server_is_seen_to_keep_metadata_or_not(draft: Draft, added: dict[str, Any], like_javascript: bool) -> None:
    given = lifted(draft, vector=False, tier=None)
    assert isinstance(given.metadata, Raw)
    shown = json.loads(bytes(given.metadata))
    plain = {name: value for name, value in shown.items() if name != RESERVED}
    as_given = answer(given, like_javascript=like_javascript)
    more = answer(given, like_javascript=like_javascript, metadata={**added, **shown})
    assert shows_metadata(as_given, draft.metadata) is (True if plain else None)
    assert shows_metadata(more, draft.metadata) is (True if plain else None)
    for name in plain:
        others = [{k: v for k, v in shown.items() if k != name}, {**shown, name: [shown[name]]}]
        for other in others:
            assert shows_metadata(answer(given, like_javascript=False, metadata=other), draft.metadata) is False
        if name not in FIELDS:
            assert shows_metadata(answer(given, like_javascript=False, **{name: 1}), draft.metadata) is False


@given(draft=drafts(), like_javascript=st.booleans(), name=names, value=json_values)
def test_no_server_is_asked_for_what_it_would_take_for_another(
    draft: Draft, like_javascript: bool, name: str, value: Any
) -> None:
    """A record that matches a `where` also matches, as its server has it, the conditions that the server is sent."""
    members = {} if draft.metadata is UNSET else json.loads(bytes(draft.metadata))
    for wanted in (value, members.get(name, value)):
        where = {name: Raw(encoded(wanted))}
        shown = told(lifted(draft, vector=False, tier=None), like_javascript=like_javascript)
        if matches(record_of(draft), parse_where(where)):
            as_record = lowered(msgspec.structs.replace(shown, metadata=without_rider(shown.metadata)), vector=False)
            assert matches(as_record, parse_where(delegable(where, metadata=True)))


def without_rider(metadata: Raw | UnsetType) -> Raw:
    assert metadata is not UNSET
    members = msgspec.json.decode(metadata, type=dict[str, Raw])
    return Raw(msgspec.json.encode({name: value for name, value in members.items() if name != RESERVED}))


@given(name=names | st.sampled_from(sorted(FIELDS)), value=json_values)
def test_a_condition_on_what_a_server_need_not_keep_is_not_told_to_it(name: str, value: Any) -> None:
    assert delegable({name: Raw(encoded(value))}, metadata=False).keys() <= {"content"}
    assert delegable({name: Raw(encoded(value))}, metadata=True).keys().isdisjoint(FIELDS.keys() - {"content"})


def riding(**fields: Any) -> ServerRecord:
    return plain(metadata={"a": 1, RESERVED: json.dumps({"created_at": BORN, "owner": "forged", **fields})})


def plain(**fields: Any) -> ServerRecord:
    return msgspec.json.decode(
        encoded({"id": "x", "content": "x", "created_at": "2027-01-01T00:00:00.000Z", **fields}), type=ServerRecord
    )


BORN: Final = "2026-09-21T14:13:20.002Z"


@pytest.mark.parametrize(
    "record",
    [
        riding(embedding="AAAA"),
        riding(embedding="?"),
        riding(embedding=""),
        riding(embedding=b64encode(bytes(8 * 9000)).decode()),
        riding(embedding=b64encode(b"\xff" * 8).decode()),
        riding(revision=2**63),
        riding(revision=-1),
        riding(created_at="yesterday"),
        riding(metadata=[1]),
        riding(owner=5),
        riding(version="1"),
        plain(metadata={RESERVED: {"owner": "forged"}}),
        plain(metadata={RESERVED: "no JSON"}),
        plain(metadata=None),
        plain(),
    ],
)
def test_what_is_no_rider_is_what_its_server_says(record: ServerRecord) -> None:
    back = lowered(record, vector=True)
    assert isinstance(back, Riderless)
    assert (back.created_at, back.owner) == ("2027-01-01T00:00:00.000Z", None)
    assert back.metadata == (UNSET if record.metadata is UNSET or record.metadata == Raw(b"null") else record.metadata)


def test_a_rider_that_is_whole_is_taken() -> None:
    assert lowered(riding(embedding=b64encode(bytes(8)).decode()), vector=False).owner == "forged"


def test_role_and_group_of_a_rider_without_a_version_come_from_the_server() -> None:
    told = plain(role="tool", group="g", metadata={RESERVED: json.dumps({"created_at": BORN, "role": "x"})})
    assert (lowered(told, vector=False).role, lowered(told, vector=False).group) == ("tool", "g")
    told = plain(role="tool", group="g", metadata={RESERVED: json.dumps({"created_at": BORN, "version": 1})})
    assert (lowered(told, vector=False).role, lowered(told, vector=False).group) == (None, None)


def test_a_rider_of_a_later_version_is_taken_neither_for_one_nor_for_none() -> None:
    later = riding(version=VERSION + 1, owner={"not": "known here"})
    with pytest.raises(NewerRider, match=rf"riders of version {VERSION + 1}, this one reads up to {VERSION}"):
        lowered(later, vector=False)
    assert isinstance(unescaped(Record(id="x", content="x", created_at=BORN, metadata=later.metadata)), Lifted)


@given(draft=drafts())
def test_what_a_native_tier_is_told_comes_back_as_it_was(draft: Draft) -> None:
    given = escaped(draft)
    if given.metadata is not draft.metadata:
        assert isinstance(draft.metadata, Raw)
        assert RESERVED in json.loads(bytes(draft.metadata))
    back = unescaped(record_of(given))
    assert not isinstance(back, Lifted)
    assert digest(back) == digest(draft)
    lesser = msgspec.structs.replace(lifted(draft, vector=False, tier=None), created_at=BORN)
    assert isinstance(unescaped(record_of(lesser)), Lifted)


@pytest.mark.parametrize(
    ("field", "answered", "taken"),
    [
        ("role", 5, None),
        ("role", None, None),
        ("group", ["g"], None),
        ("revision", 3.0, 3),
        ("revision", 3.5, None),
        ("revision", -1, None),
        ("access_count", 1e2, 100),
        ("access_count", "many", None),
        ("salience", 1, 1.0),
        ("salience", "1", None),
        ("score", True, None),
        ("embedding", [1, 2.5], [1.0, 2.5]),
        ("embedding", "AAAA", None),
        ("metadata", [1], UNSET),
        ("created_at", "2026-09-21T16:13:20.002999+02:00", "2026-09-21T14:13:20.002Z"),
        ("created_at", "2026-09-21T14:13:20Z", "2026-09-21T14:13:20.000Z"),
        ("created_at", "yesterday", UNDATED),
        ("created_at", None, UNDATED),
    ],
)
def test_a_field_of_a_server_s_own_record_that_is_none_counts_as_absent(field: str, answered: Any, taken: Any) -> None:
    assert getattr(lowered(plain(**{field: answered}), vector=True), field) == taken


# --- which conditions a server is sent

CONDITIONED: Final = """
[policy]
pass = "explicit"
[tiers.working]
kind = "working"
command = ["-"]
"""


@pytest.mark.anyio
@pytest.mark.parametrize("habit", [None, *HABITS])
async def test_a_condition_on_metadata_is_sent_to_a_server_that_keeps_it(habit: str | None, tmp_path: Path) -> None:
    """The answer keeps to the condition in either case. The evidence about the server outlives the router."""
    seen = Steered()
    server = Foreign(kind=CoreOnly if habit is None else HABITS[habit])
    keeps = habit not in ("KeepsOurMetadataAlone", "FlattensMetadata")

    async def told_for(fed: Trial, **question: Any) -> list[bytes]:
        """Return the recalls sent to the server. Assert that the answer keeps to the conditions."""
        seen.seen.clear()
        found = (await fed.call("recall", **question))["records"]
        assert sorted(record["id"] for record in found) == ["a", "b"]
        return [message for _, message in seen.seen if b"memory/recall" in message]

    for start in range(2):
        async with trial(settings_of(CONDITIONED), servers={"working": server}, weather=seen, folder=tmp_path) as fed:
            if start == 0:
                await fed.remember("a light", id="bare", role="user")
                assert not any(b'"topic"' in each for each in await found_none(fed, seen))
                for id in ("a", "b", "c"):
                    fields = {"role": "tool", "group": "g"} if id != "c" else {}
                    metadata = {"topic": "light" if id != "c" else "rope", "n": {"of": [1]}}
                    await fed.remember(f"a light {id}", id=id, metadata=metadata, **fields)
            told = await told_for(fed, query="light", where={"topic": "light"})
            assert any(b'"topic"' in message for message in told) is keeps
            told = await told_for(fed, query="light", where={"role": "tool"})
            assert not any(b'"role"' in message for message in told)
            told = await told_for(fed, query="light", where={"group": "g"})
            assert not any(b'"group"' in message for message in told)


async def found_none(fed: Trial, seen: Steered) -> list[bytes]:
    assert (await fed.call("recall", query="light", where={"topic": "light"}))["records"] == []
    return [message for _, message in seen.seen if b"memory/recall" in message]


@pytest.mark.anyio
async def test_one_record_that_a_server_did_not_keep_as_it_was_shown_is_enough() -> None:
    class Sometimes(FlattensMetadata):
        def filed(self, record: dict[str, Any]) -> dict[str, Any]:
            return super().filed(record) if record["id"] == "b" else record

    async with trial(settings_of(CONDITIONED), servers={"working": Foreign(kind=Sometimes)}) as fed:
        for id in ("a", "b", "c"):
            await fed.remember("a light", id=id, metadata={"n": 1})
        found = (await fed.call("recall", query="light", where={"n": 1}))["records"]
        assert sorted(record["id"] for record in found) == ["a", "b", "c"]


# --- two tiers with one server

SHARED = """
[tiers.working]
kind = "working"
command = ["-"]
capacity = 4
spill_to = "semantic"
[tiers.semantic]
kind = "semantic"
command = ["-"]
"""


class One(CoreOnly):
    """All servers of this class share their records."""

    everything: Any = None

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if One.everything is None:
            One.everything = self.__dict__
        self.__dict__ = One.everything


@pytest.mark.anyio
async def test_two_tiers_at_one_server_lose_nothing_and_are_told(caplog: pytest.LogCaptureFixture) -> None:
    One.everything = None
    both = {"working": Foreign(kind=One), "semantic": Foreign(kind=One)}
    async with trial(settings_of(SHARED), servers=both) as fed:
        ids = await fed.remember(*"abcdef")
        with pytest.raises(A2MError, match="seems to lead to the same server"):
            await fed.call("promote", ids=ids[:1], tier="semantic")
        await fed.settled()
        assert len(await fed.timeline()) == 6
        assert set(ids) <= set(fed.copies())
    assert any("seem to lead to one server" in message for message in caplog.messages)


@pytest.mark.parametrize(
    "one",
    [
        'url = "http://127.0.0.1:9000/"\nremote_tier = "a"',
        'command = ["some-server", "--file", "x"]',
    ],
)
def test_two_tiers_that_say_that_they_lead_to_one_server_are_refused(one: str, tmp_path: Path) -> None:
    other = one.replace("127.0.0.1:9000/", "127.0.0.1:9000").replace('"a"', '"b"')
    text = f'[tiers.one]\nkind = "episodic"\n{one}\n[tiers.two]\nkind = "semantic"\n{other}\n'
    with pytest.raises(CannotServe, match=r"^tiers\.two\.\w+: it is that of tiers\.one; each tier needs"):
        links_for(parse(text, base=tmp_path, environ={}), {})
    if "command" in one:
        links_for(parse(f"{text}env = {{ A = '1' }}", base=tmp_path, environ={}), {})


# --- pending writes

KEYED = """
[tiers.working]
kind = "working"
command = ["-"]
[tiers.semantic]
kind = "semantic"
command = ["-"]
"""
FOREIGN = {"working": Foreign()}


@pytest.mark.anyio
async def test_the_old_copy_goes_only_when_the_new_one_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    steer = Steered()
    async with trial(settings_of(KEYED), servers=FOREIGN, weather=steer) as fed:
        await fed.remember("old", key="k")
        synced = fed.federation.catalog.synced
        asked = len(steer.seen)

        async def full() -> None:
            if redone(fed):
                raise OSError(28, "disk full")
            await synced()

        monkeypatch.setattr(fed.federation.catalog, "synced", full)
        with pytest.raises(A2MError):
            await fed.remember("new", key="k")
        assert not [each for each in steer.seen[asked:] if b"memory/forget" in each[1]]
        monkeypatch.setattr(fed.federation.catalog, "synced", synced)
        await fed.settled()
        assert [record["content"] for record in await fed.timeline()] == ["new"]


@pytest.mark.anyio
async def test_another_server_than_last_time_is_told_nothing(tmp_path: Path) -> None:
    class Another(CoreOnly):
        def describe(self, params: Any) -> Any:
            return {**super().describe(params), "name": "another"}

    steer = Steered()
    async with trial(settings_of(KEYED), servers=FOREIGN, weather=steer, folder=tmp_path) as fed:
        await fed.remember("old", key="k")
        steer.refuse("working", "forget")
        await fed.remember("new", key="k")
        assert len(redone(fed)) == 1
    (tmp_path / "working.db").rename(tmp_path / "right")
    told = Steered()
    with pytest.raises((CannotServe, BaseExceptionGroup)):
        async with trial(
            settings_of(KEYED), servers={"working": Foreign(kind=Another)}, weather=told, folder=tmp_path
        ) as fed:
            pass
    assert {msgspec.json.decode(message)["method"] for _, message in told.seen} == {"memory/describe"}
    (tmp_path / "right").rename(tmp_path / "working.db")
    async with trial(settings_of(KEYED), servers=FOREIGN, folder=tmp_path) as fed:
        await fed.settled()
        assert [record["content"] for record in await fed.timeline()] == ["new"]
        assert [*fed.copies().values()] == [["working"]]


@pytest.mark.anyio
async def test_what_cannot_be_redone_keeps_nobody_else_waiting() -> None:
    steer = Steered()
    async with trial(settings_of(SHARED), servers=FOREIGN, weather=steer) as fed:
        await fed.remember("old", key="k", group="g")
        steer.refuse("working", "forget")
        await fed.call(
            "remember", records=[{"content": "new", "key": "k", "group": "g"}, {"id": "fresh", "content": "f"}]
        )
        await fed.call("remember", records=[{"id": "fresh", "content": "f"}, {"content": "late", "group": "g"}])
        await fed.remember(*"abcdef")
        await fed.federation.passes.idle()
        counts = {tier["name"]: tier["count"] for tier in (await fed.call("describe"))["tiers"]}
        assert counts == {"working": 4, "semantic": 5}
        steer.allow("working", "forget")
        await fed.settled()
        assert len(await fed.timeline()) == 9


# --- a server that declares other capabilities than before


@pytest.mark.anyio
async def test_a_server_that_begins_to_declare_vectors_finds_earlier_ones(tmp_path: Path) -> None:
    async with trial(settings_of(KEYED), servers=FOREIGN, folder=tmp_path) as fed:
        await fed.remember("first", embedding=[1.0, 0.0])
    better = {"working": Foreign(capabilities=("embeddings",))}
    async with trial(settings_of(KEYED), servers=better, folder=tmp_path) as fed:
        await fed.remember("second", embedding=[0.0, 1.0])
        found = (await fed.call("recall", embedding=[1.0, 0.1]))["records"]
        assert [record["content"] for record in found] == ["first", "second"]


@pytest.mark.anyio
async def test_a_store_whose_records_were_lifted_goes_on_lifting_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"owner": "alice", "session": "s", "key": "k", "uri": "x:y", "metadata": {"a": 1}}
    with monkeypatch.context() as lesser:
        lesser.setattr(Profile, "is_native", False)
        async with trial(settings_of(KEYED), folder=tmp_path) as fed:
            await fed.remember("lifted", **fields)
    async with trial(settings_of(KEYED), folder=tmp_path) as fed:
        [record] = await fed.timeline(owner="alice", where={"session": "s"})
        assert {name: record[name] for name in fields} == fields
        assert await fed.call("promote", ids=[record["id"]], tier="semantic", owner="alice") == {"promoted": 1}
        await fed.settled()
        [record] = await fed.timeline(owner="alice", key_prefix="k")
        assert {name: record[name] for name in fields} == fields


@pytest.mark.anyio
async def test_a_server_that_refuses_a_write_is_out_of_order_for_that_write() -> None:
    steer = Steered()
    async with trial(settings_of(KEYED), servers=FOREIGN, weather=steer) as fed:
        await fed.remember("mine", key="k")
        fed.servers["working"].read_only = True
        for _ in range(2):
            with pytest.raises(A2MError, match="takes no writes") as refused:
                await fed.remember("new")
            assert refused.value.code == Code.INTERNAL_ERROR
        await fed.remember("other", key="k")  # the replacement becomes a pending write
        assert [record["content"] for record in await fed.timeline()] == ["other"]
        fed.servers["working"].read_only = False
        await fed.remember("new")
        await fed.settled()
        assert [record["content"] for record in await fed.timeline()] == ["other", "new"]
        assert sorted(record.content for record in told_by(fed.servers["working"])) == ["new", "other"]


@pytest.mark.anyio
async def test_a_server_that_is_read_only_when_welcomed_gets_no_writes() -> None:
    steer = Steered()
    async with trial(settings_of(KEYED), servers=FOREIGN, weather=steer) as fed:
        [id] = await fed.remember("mine", key="k")
        await fed.remember("stays")
        fed.servers["working"].read_only = True
        await reconnected(fed, "working")
        asked = len(steer.seen)
        for key in (None, "k"):
            with pytest.raises(A2MError, match="takes no writes"):
                await fed.remember("new", key=key)
        assert [record["content"] for record in await fed.timeline()] == ["mine", "stays"]
        assert await fed.call("promote", ids=[id], tier="semantic") == {"promoted": 1}
        assert [record["tier"] for record in await fed.timeline()] == ["semantic", "working"]
        await fed.federation.reconciler.idle()
        told = [message for tier, message in steer.seen[asked:] if tier == "working"]
        assert [each for each in told if b"memory/remember" in each or b"memory/forget" in each] == []
        await reconnected(fed, "working")  # a pending deletion does not keep the tier from coming up
        fed.servers["working"].read_only = False
        await reconnected(fed, "working")
        await fed.federation.reconciler.idle()
        assert [record.content for record in told_by(fed.servers["working"])] == ["stays"]
        await fed.remember("new", key="new")
        assert [record["tier"] for record in await fed.timeline()] == ["semantic", "working", "working"]


@pytest.mark.anyio
async def test_a_record_too_large_once_lifted_is_rejected_before_it_is_written() -> None:
    text = '[limits]\nmax_message = "1MiB"\n[serve]\nmax_held = "1MiB"\n' + KEYED
    async with trial(settings_of(text), servers=FOREIGN) as fed:
        await fed.remember("small")
        quotes = {"quotes": '"' * 100_000}
        with pytest.raises(A2MError, match="bytes as it is sent to its server") as refused:
            await fed.remember("x", metadata=quotes)
        assert refused.value.code == Code.QUOTA_EXCEEDED
        assert [record["content"] for record in await fed.timeline()] == ["small"]
        [id] = await fed.remember("x", metadata=quotes, tier="semantic")
        with pytest.raises(A2MError, match="could be moved"):
            await fed.call("promote", ids=[id], tier="working")


# --- the index of vectors


@pytest.mark.anyio
async def test_a_disk_full_at_the_first_vector_is_no_trouble_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with trial(settings_of(KEYED), servers=FOREIGN) as fed:
        enter = Changes.fulfil

        def failing(self: Changes, *new: Any) -> None:
            enter(self, *new)
            raise OSError(28, "disk full")

        with monkeypatch.context() as full:
            full.setattr(Changes, "fulfil", failing)
            with pytest.raises(A2MError, match="disk"):
                await fed.remember("first", embedding=[1.0, 0.0])
        await fed.settled()
        await fed.remember("plain")
        await fed.remember("with a vector", embedding=[1.0, 0.0])
        found = (await fed.call("recall", embedding=[1.0, 0.0]))["records"]
        assert [record["content"] for record in found] == ["with a vector"]


@pytest.mark.anyio
async def test_a_record_that_moves_while_an_ordered_recall_goes_on_is_found() -> None:
    steer = Steered()
    servers = {"working": Foreign(), "semantic": Foreign()}
    async with trial(settings_of(KEYED), servers=servers, weather=steer) as fed:
        [wanted] = await fed.remember("wanted", metadata={"n": [1]})
        await fed.remember(*map(str, range(30)))
        hold = steer.hold("working", "recall", after=True)
        async with anyio.create_task_group() as tasks:
            found: list[Any] = []

            async def recall() -> None:
                found.extend((await fed.call("recall", where={"metadata": {"n": [1]}}, limit=1))["records"])

            tasks.start_soon(recall)
            await hold.reached.wait()
            assert await fed.call("promote", ids=[wanted], tier="semantic") == {"promoted": 1}
            hold.release()
        assert [record["content"] for record in found] == ["wanted"]


@pytest.mark.anyio
@pytest.mark.parametrize("servers", [{}, {"working": Foreign()}], ids=["native", "lifted"])
@pytest.mark.parametrize("records", [1, 2, 3, 99, 100, 101])
async def test_whether_a_tier_is_told_a_batch_in_one_call_is_known_before(records: int, servers: Mix) -> None:
    """A lifted draft carries its metadata twice, so a batch may need more calls than in a native tier."""
    steer = Steered()
    async with trial(settings_of(policy="explicit"), servers=servers, weather=steer) as fed:
        metadata = Raw(json.dumps({"m": "x" * 1_500_000 if records < 50 else "x"}).encode())
        moment = "2026-01-01T00:00:00.000Z"
        drafts = [
            Draft(id=f"r{n}", content="x", metadata=metadata, created_at=moment, revision=0) for n in range(records)
        ]
        copies = fed.federation.recovery._gateway
        steer.seen.clear()
        await copies.write("working", drafts)
        calls = sum(b"memory/remember" in message[:100] for _, message in steer.seen)
        assert copies.is_one_call("working", drafts) == (calls == 1)
