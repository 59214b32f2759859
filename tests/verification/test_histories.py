"""The model that judges histories: which answers to a recall it accepts, and which it rejects."""

from contextlib import nullcontext, suppress
from typing import Final

import pytest

from a2m_router.protocol.wire.records import Record
from a2m_router.protocol.wire.timestamps import render
from tests.support.federated import START
from tests.support.model import Model, Object, Selector, Version

_EVERYTHING: Final = Selector()


class Story:
    """A model that knows the records `a` to `e`.

    `a` has a key, the others have ids that their clients chose. `b` has an owner, and lives in a shared tier.
    """

    def __init__(self) -> None:
        self.model = Model(lambda: START, ["procedural"])
        self.there: dict[str, Version] = {}
        for name in "abcde":
            self.write(name)

    def write(self, name: str) -> None:
        object: Object = ("key", None, name) if name == "a" else ("id", name)
        fields = {"key": name} if name == "a" else {"owner": "b"} if name == "b" else {}
        version = self.model.new_version(object, fields, None, None)
        self.model.end_write(self.model.begin_write([version]), {version.number: name})
        self.there[name] = version

    def forget(self, name: str) -> None:
        selector = Selector(ids=(name,))
        self.model.end_forget(self.model.begin_forget(selector), selector, 1)

    def recall(self, begin: int, shown: str, limit: int, selector: Selector = _EVERYTHING) -> None:
        """Let the model judge an answer in which all records have one score. Raises AssertionError if it cannot be
        true."""
        records = [
            Record(
                id=name,
                content=self.there[name].fields["content"],
                created_at=render(START),
                key=self.there[name].fields.get("key"),
                revision=0 if name == "a" else None,
                owner=self.there[name].owner,
                tier="procedural",
                score=0.5,
            )
            for name in shown
        ]
        self.model.end_recall(begin, selector, records, limit=limit)


def is_taken_for_true(story: Story, begin: int, shown: str, limit: int, selector: Selector = _EVERYTHING) -> bool:
    with suppress(AssertionError):
        story.recall(begin, shown, limit, selector)
        return True
    return False


@pytest.mark.parametrize(("shown", "is_true"), [("cde", True), ("bcd", True), ("bc", True), ("c", False), ("", False)])
def test_a_recall_may_be_short_by_what_was_forgotten_while_it_went_on(shown: str, is_true: bool) -> None:
    story = Story()
    begin = story.model.tick()
    story.forget("a")
    assert is_taken_for_true(story, begin, shown, 3) is is_true


def test_a_recall_may_be_short_by_what_is_being_forgotten() -> None:
    story = Story()
    begin = story.model.tick()
    story.model.begin_forget(Selector(ids=("c",)))
    assert is_taken_for_true(story, begin, "ab", 3)
    assert not is_taken_for_true(story, begin, "a", 3)
    assert not is_taken_for_true(story, begin, "ac", 3)  # c is shown, so the forget does not explain what is missing


def test_a_recall_is_not_short_by_what_was_forgotten_before_it_began() -> None:
    story = Story()
    story.forget("a")
    begin = story.model.tick()
    assert is_taken_for_true(story, begin, "bcd", 3)
    assert not is_taken_for_true(story, begin, "bc", 3)


def test_a_recall_that_shows_all_that_was_not_forgotten_is_whole() -> None:
    story = Story()
    begin = story.model.tick()
    story.forget("a")
    assert is_taken_for_true(story, begin, "bcde", 8)
    assert not is_taken_for_true(story, begin, "bcd", 8)


def test_a_recall_may_lack_what_is_replaced_but_not_what_is_written() -> None:
    story = Story()
    begin = story.model.tick()
    story.write("c")  # its id is known, so the write changes nothing
    story.model.begin_write([story.model.new_version(("id", "f"), {}, None, None)])
    assert not is_taken_for_true(story, begin, "de", 3)
    story.model.begin_write([story.model.new_version(("key", None, "a"), {"key": "a"}, None, None)])
    assert is_taken_for_true(story, begin, "de", 3)
    assert not is_taken_for_true(story, begin, "d", 3)


def test_a_recall_may_lack_what_a_promotion_takes_out_of_sight() -> None:
    story = Story()
    begin = story.model.tick()
    mine = Selector(owner="a")
    assert not is_taken_for_true(story, begin, "cd", 3, mine)
    promotion = story.model.begin_promote(["b", "e"], adds=False)
    assert is_taken_for_true(story, begin, "cd", 3, mine)  # for `b`; `e` has no owner and is seen in every tier
    assert not is_taken_for_true(story, begin, "c", 3, mine)
    assert not is_taken_for_true(story, begin, "cd", 3)
    story.model.end_promote(promotion)
    assert is_taken_for_true(story, begin, "cd", 3, mine)
    assert not is_taken_for_true(story, story.model.tick(), "cd", 3, mine)


@pytest.mark.parametrize("overlap", [True, False])
def test_records_of_one_moment_come_in_the_order_of_their_writes(overlap: bool) -> None:
    """Two writes that overlap have no order, even if another call was in progress when the first one began."""
    story = Story()
    model = story.model
    selector = Selector(ids=("f",))
    forgetting = model.begin_forget(selector)
    first, second = (model.new_version(("new", name), {}, None, None) for name in "fg")
    earlier = model.begin_write([first])
    model.end_forget(forgetting, selector, 0)
    if not overlap:
        model.end_write(earlier, {first.number: "f"})
    later = model.begin_write([second])
    if overlap:
        model.end_write(earlier, {first.number: "f"})
    model.end_write(later, {second.number: "g"})
    begin = model.tick()
    shown = [
        Record(id=id, content=version.fields["content"], created_at=render(START), tier="procedural")
        for id, version in (("g", second), ("f", first))
    ]
    with nullcontext() if overlap else pytest.raises(AssertionError, match="in the order of writing"):
        model.end_timeline(begin, selector=Selector(ids=("f", "g")), records=shown)
