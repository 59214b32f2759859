"""After a clean stop no file holds the content, metadata, words or vectors of a forgotten record."""

import random
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2m_router.protocol.wire.records import vector_bytes
from a2m_router.protocol.wire.vectors import indexed
from tests.support.examples import examples, run
from tests.support.federated import Foreign, settings_of, trial

# Two native tiers and a lifted one. The catalog keeps the lifted tier's vectors, and its replacements until they are
# done.
TIERS: Final = """
[policy]
pass = "explicit"
[tiers.working]
kind = "working"
command = ["-"]
capacity = 8
spill_to = "semantic"
[tiers.semantic]
kind = "semantic"
command = ["-"]
[tiers.lesser]
kind = "episodic"
command = ["-"]
"""
OURS: Final = ("router.db", "working.db", "semantic.db")


def word(chance: random.Random) -> str:
    # Long and unlike all others, because an index may store only the letters in which two words differ.
    return "".join(chance.choices("bcdfghjklmnpqrtvwxz", k=24))


def needles(fields: dict[str, Any]) -> list[bytes]:
    """Return byte strings that reveal a record in a file. Of a word it is the end, which every index stores."""
    words = [*fields["content"].split(), fields["metadata"]["secret"], fields["session"]]
    in_an_index = indexed(fields["embedding"], "cosine")
    assert in_an_index is not None
    return [*(each[6:].encode() for each in words[:-1]), vector_bytes(fields["embedding"]), in_an_index]


def found_in(folder: Path, fields: dict[str, Any]) -> list[str]:
    """Return the router's and native stores' files that hold a part of the record."""
    files = [path for path in folder.iterdir() if path.name.startswith(OURS)]
    return [path.name for path in files if any(needle in path.read_bytes() for needle in needles(fields))]


async def nothing_is_left(seed: int, tiers: list[str], folder: Path) -> None:
    chance = random.Random(seed)

    def drawn(tier: str, **fields: Any) -> dict[str, Any]:
        vector = [chance.uniform(-1, 1) for _ in range(8)]
        content = " ".join(word(chance) for _ in range(3))
        return {"content": content, "metadata": {"secret": word(chance)}, "embedding": vector, "tier": tier, **fields}

    written = [drawn(tier, id=f"{n}", key=f"k{n}", session="s") for n, tier in enumerate(tiers)]
    replaced = chance.sample(written, len(written) // 3)
    forgotten = chance.sample(written, len(written) // 2)
    async with trial(settings_of(TIERS), servers={"lesser": Foreign()}, folder=folder) as fed:
        await fed.call("remember", records=written)
        later = [drawn(each["tier"], key=each["key"], session="s") for each in replaced]
        await fed.call("remember", records=later)
        await fed.call("consolidate")
        await fed.call("recall", query=written[0]["content"], embedding=written[0]["embedding"])
        assert await fed.call("forget", ids=[each["id"] for each in forgotten]) == {"forgotten": len(forgotten)}
        await fed.settled()
    by_key = {each["key"]: each for each in written} | {each["key"]: each for each in later}
    gone = [each["key"] for each in forgotten]
    for each in [*replaced, *forgotten, *(each for each in later if each["key"] in gone)]:
        assert found_in(folder, each) == []
    for key, each in by_key.items():
        # The same search finds the records that still exist.
        assert key in gone or each["tier"] == "lesser" or found_in(folder, each) != []


@examples(6)
@given(
    seed=st.integers(0, 2**32),
    tiers=st.lists(st.sampled_from(["working", "semantic", "lesser"]), min_size=3, max_size=30),
)
def test_what_was_forgotten_or_replaced_is_in_no_file_after_a_clean_stop(seed: int, tiers: list[str]) -> None:
    with TemporaryDirectory() as folder:
        run("asyncio", partial(nothing_is_left, seed, tiers, Path(folder)))


@pytest.mark.parametrize("count", [1500])
def test_of_many_records_too(count: int, tmp_path: Path) -> None:
    """There are so many records that the indexes have several levels and merge them."""
    anyio.run(nothing_is_left, 1, ["working", "semantic", "lesser"] * (count // 30) + ["semantic"] * 400, tmp_path)
