"""Which copies count: of what a tier answers, the copy in the home that the record had when the read began."""

from collections.abc import Callable, Iterable, Mapping

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Entry
from a2m_router.catalog.readers import Reading
from a2m_router.protocol.wire.records import Record
from a2m_router.tiers.copies import Copies


def acceptable(catalog: Catalog, read: Reading, entries: Iterable[Entry]) -> Callable[[Entry, str], bool]:
    """Whether `read` may take the copy that is in a tier's list for the record, once the list has been overlaid
    (`FanOut`); to be asked before anything is awaited."""
    behind = catalog.behind(entry.id for entry in entries)
    accepts = catalog.readers.accepts
    return lambda entry, tier: tier == entry.home if entry.id in behind else accepts(read, entry, tier)


def check_riders(copies: Copies, tier: str, records: Iterable[Record], entries: Mapping[str, Entry]) -> None:
    """Raises Untrusted where a tier's server has returned one of its records without its rider."""
    for record in records:
        entry = entries.get(record.id)
        if entry is not None:
            copies.check_rider(tier, record, created_at=entry.created_at, owner=entry.owner, key=entry.key)


def still(then: Iterable[Entry], now: Iterable[Entry]) -> list[Entry]:
    """Those of the records that are there still, as they are now; not others, written under their ids since."""
    numbers = {entry.id: entry.seq for entry in then}
    return [entry for entry in now if entry.seq == numbers[entry.id]]
