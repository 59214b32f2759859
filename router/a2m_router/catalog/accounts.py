"""The accounts of single records, and what is counted along with them: the catalog's ground floor.

Every change of a record's home goes through `_enter` and `_leave`, which keep the counts of tiers, buckets, groups and
sessions; every query of the catalog's goes through one connection.
"""

import contextlib
import errno
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import anyio
import apsw
import msgspec

from a2m_router.catalog.claims import Claims
from a2m_router.catalog.entries import COLUMNS, Entry, Stray, absent_or, present, row_entry
from a2m_router.catalog.readers import Readers
from a2m_router.catalog.rebuild.exchanging import HOLDER, REBUILDING, exchange
from a2m_router.catalog.schema import APPLICATION, SCHEMA
from a2m_router.catalog.selection import Scope
from a2m_router.catalog.syncing import Syncing
from a2m_router.config.settings import Tier
from a2m_router.process.budget import left
from a2m_router.protocol.wire.sealing import KEY_BYTES, Seal, fresh_key
from a2m_router.protocol.wire.vectors import MAX_WIDTH, indexed
from a2m_router.storage import nearest
from a2m_router.storage.database import Damaged, Database, DatabaseError, damaged, real
from a2m_router.storage.snapshots import Snapshot

# The vectors of records on their way in, by id, as far as they have any.
Vectors = Mapping[str, Sequence[float]]
NO_VECTORS: Final[Vectors] = {}

# Seconds that a change waits for another program that holds the file, and between two looks whether it does.
_PATIENCE: Final = 10.0
_LOOK: Final = 0.05

Strength = Callable[[float, int, int, float | None], float]


class NotedStray(msgspec.Struct, frozen=True):
    """A copy that may exist in `tier`."""

    id: str
    tier: str
    kind: Stray
    owner: str | None
    key: str | None


class Replacement(msgspec.Struct, frozen=True):
    """What is to take a known record's place: `entry`, for the record as it was at version `replaces`.

    `salience` is None where the writer gave none: what the record has earned stays.
    """

    entry: Entry
    replaces: int
    salience: float | None = None


class Accounts:
    """One file's accounts, row by row. See Catalog for what its arguments mean."""

    def __init__(self, path: Path | None, tiers: Sequence[Tier], strength: Strength, *, threads: bool = True) -> None:
        if path is not None:
            path = real(path)
            exchange(path)
        try:
            self._open(path, tiers, strength, threads=threads)
        except Damaged as problem:
            raise problem.with_remedy(REBUILDING) from problem

    def _open(self, path: Path | None, tiers: Sequence[Tier], strength: Strength, *, threads: bool) -> None:
        self._database = Database(path, SCHEMA, application=APPLICATION, holder=HOLDER, prepare=nearest.load)
        # Of a catalog that is made from one older than the tiers: what they hold is later than what is noted as
        # forgotten.
        self._spares_found = False
        self.rewrites = 0  # how often a unit has given way to its summary
        self._execute = self._database.connection.execute
        self._syncing = Syncing(self._database.sync, threads=threads)
        self._strength = strength
        self.claims = Claims()
        self.readers = Readers(lambda: self._newest)
        self._tiers = {tier.name: tier for tier in tiers}
        self._no: dict[str, int] = {}
        self._name: dict[int, str] = {}
        self._hiding: set[str] = set()  # lifted tiers whose servers were seen not to show metadata as it is
        try:
            self._begin(tiers)
        except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError) as problem:
            self._database.close()
            raise damaged(path, str(problem)) from problem
        except BaseException:
            self._database.close()
            raise
        self._shared = [self._no[tier.name] for tier in tiers if tier.shared]

    def _begin(self, tiers: Sequence[Tier]) -> None:
        was_closed = not self._fact("opened", 0) or bool(self._fact("clean", 0))
        # whether nothing is left of a crash: the last one who had the file closed it, and all tiers were taken into the
        # account since the last one who did not. Else more is looked at than otherwise, and waited for
        self.ended_well = was_closed and bool(self._fact("recovered", 1))
        if not was_closed and (wrong := self.damage()):
            raise damaged(self._database.path, wrong)
        # tiers that may hold what a power cut took every note of, until what they hold is compared with the account
        self.uncounted = set[str]() if self.ended_well else {tier.name for tier in tiers}
        with self._database.transaction():
            self._set_fact("clean", 0)
            self._set_fact("recovered", int(self.ended_well))
            self._versions: int = self._fact("opened", 0) << 32
            self._set_fact("opened", self._fact("opened", 0) + 1)
            self._clock: int = self._fact("clock", 0)
            # for cursors into this account, which outlive the process as the account does; a rebuilt one numbers anew
            self._cursor_key: bytes = self._fact("cursor_key", None) or fresh_key()
            self._set_fact("cursor_key", self._cursor_key)
            self._newest: int = self._execute(
                "SELECT max(coalesce((SELECT max(seq) FROM records), 0), coalesce((SELECT max(seq) FROM earned), 0))"
            ).get
            self._know_epochs()
            # whether no record was ever written or taken in; not so of one that was made anew
            self.began_blank: bool = (
                self._newest == 0 and self._fact("clock", None) is None and not self._fact("federation_found", 0)
            )
            self._know(tiers)
            if self.is_all_scanned():
                self._set_fact("was_whole", 1)
            self._indexed: set[str] = {
                name for (name,) in self._execute("SELECT name FROM tiers WHERE indexed") if name in self._tiers
            }

    def _know_epochs(self) -> None:
        """Draw an epoch of this start; the federation's id was drawn by the first."""
        self.federation: str = self._fact("federation", None) or secrets.token_hex(8)
        self._set_fact("federation", self.federation)
        self.epoch = secrets.token_hex(8)
        self._execute("INSERT INTO epochs (epoch, newest) VALUES (?, ?)", (self.epoch, self._newest))
        self._epochs: dict[str, int] = {
            epoch: number for number, epoch in self._execute("SELECT number, epoch FROM epochs")
        }
        self._adopted = {id for (id,) in self._execute("SELECT federation FROM adopted")}

    def is_ours(self, federation: str | None, epoch: str | None) -> bool:
        """Whether what bears this federation's id, or none, belongs to this one. Of another one that is what was
        adopted, and not what that one has written since."""
        if federation is None or federation == self.federation:
            return True
        return federation in self._adopted and self.knows_epoch(epoch)

    def knows_epoch(self, epoch: str | None) -> bool:
        """Whether what bears this epoch, or none, was written by a router that this catalog knows of. One that it does
        not know is later than the catalog: a copy of it was put back."""
        return epoch is None or epoch in self._epochs

    def cursor(self, place: int) -> str:
        """A place in the order of writing, as callers are given it: how many records there are is not everybody's to
        know."""
        return self._seal(self.epoch).close(place)

    def place(self, cursor: str) -> int | None:
        """The place of a cursor that was given out since a start that this account knows of; else None: what was given
        out behind the back of a copy that was put back counts what the copy has never known.

        What stood last may have been forgotten, or be unknown to a copy, when the numbers went on with a later start.
        So nothing that was written since that is passed over.
        """
        for epoch in (self.epoch, *self._epochs):
            place = self._seal(epoch).open(cursor)
            if place is not None:
                later = self._execute("SELECT min(newest) FROM epochs WHERE number > ?", (self._epochs[epoch],)).get
                return place if later is None else min(place, later)
        return None

    def _seal(self, epoch: str) -> Seal:
        return Seal(blake2b(epoch.encode(), key=self._cursor_key, digest_size=KEY_BYTES).digest())

    def is_set_back(self, tier: str, epoch: str | None) -> bool:
        """Whether the store of `tier`, which holds this epoch, has held a later one: a copy of it was put back."""
        noted = self._execute("SELECT epoch FROM tiers WHERE no = ?", (self._no[tier],)).get
        return noted is not None and (epoch is None or self._epochs.get(epoch, noted) < noted)

    def note_set_back(self, tier: str, epoch: str | None) -> None:
        """The store of `tier` is older than this account. If it is from a start since which this account was kept
        without a break, what it holds and the account does not know has left it since: see `adopt`."""
        kept_since = self._fact("origins_taken", 0)
        knows_all = epoch is not None and self._epochs.get(epoch, 0) > kept_since
        with self._database.transaction():
            self._execute("UPDATE tiers SET scanned = 0, set_back = ? WHERE no = ?", (knows_all, self._no[tier]))

    def knows_what_left(self, tier: str) -> bool:
        """Whether what the store of `tier` holds, and this account does not know, was forgotten or given up since."""
        return bool(self._execute("SELECT set_back FROM tiers WHERE no = ?", (self._no[tier],)).get)

    def note_epoch(self, tier: str) -> None:
        """The store of `tier` holds the epoch of this start. To be noted when it says so, and not before."""
        with self._database.transaction():
            self._execute("UPDATE tiers SET epoch = ? WHERE no = ?", (self._epochs[self.epoch], self._no[tier]))

    def has_enrolled(self) -> bool:
        """Whether the store of any tier was seen to hold an epoch of this account's."""
        return self._execute("SELECT 1 FROM tiers WHERE epoch IS NOT NULL LIMIT 1").get is not None

    def take_origins(self, epochs: Iterable[str], federations: Iterable[str] = ()) -> None:
        """What bears these epochs is known from now on, and what bears the ids of these federations is ours."""
        with self._database.transaction():
            for epoch in epochs:
                self._execute("INSERT OR IGNORE INTO epochs (epoch) VALUES (?)", (epoch,))
                self._epochs[epoch] = self._execute("SELECT number FROM epochs WHERE epoch = ?", (epoch,)).get
            # of what came and went in those starts this account knows a part
            self._set_fact("origins_taken", max(self._epochs.values()))
            for federation in federations:
                self._execute("INSERT OR IGNORE INTO adopted VALUES (?)", (federation,))
                self._adopted.add(federation)

    def set_federation(self, federation: str) -> None:
        """Whose records these are; for a catalog that is made anew."""
        with self._database.transaction():
            self._set_fact("federation", federation)
            self._set_fact("federation_found", 1)
        self.federation = federation

    @property
    def version(self) -> int:
        """That of the latest change of a record's home or content; while a router runs, every later one is greater."""
        return self._versions

    @property
    def _width(self) -> int | None:
        """The width of the vectors in the index; None as long as there is none."""
        width: int | None = self._fact("nearest", None)
        return width

    async def synced(self) -> None:
        """Return when everything committed so far outlives a power cut. Raises OSError when the disk fails."""
        await self._syncing.wait()

    @property
    def path(self) -> Path | None:
        """The file; None where it is kept in memory."""
        return self._database.path

    def snapshot(self) -> Snapshot:
        """The account as it is now. Raises OSError; ValueError where it is kept in memory."""
        return self._database.snapshot()

    async def writable(self) -> None:
        """Return when no other program holds a lock on the file that keeps it from being changed: at once, unless one
        does. Raises OSError where it does for longer than anybody waits, and where the file is gone."""
        deadline = anyio.current_time() + min(_PATIENCE, left())
        while True:
            try:
                self._database.check_writable()
            except OSError as problem:
                if problem.errno != errno.EBUSY or anyio.current_time() >= deadline:
                    raise
            else:
                return
            await anyio.sleep(_LOOK)

    def damage(self) -> str | None:
        """What is wrong with the file's pages, if anything is. Reads all of it; the start does so after an unclean
        end."""
        found: str = self._execute("PRAGMA quick_check(1)").get
        return None if found == "ok" else found

    def close(self) -> None:
        """Sync and close the file."""
        try:
            # a disk that does not take it: the next start looks more closely, which is right then
            with contextlib.suppress(OSError, apsw.Error):
                self._set_fact("clean", 1)
        finally:
            self._database.close()

    def end_recovery(self) -> None:
        """All tiers were taken into the account, and what an earlier router had under way there has landed."""
        if not self._fact("recovered", 1):
            with self._database.transaction():
                self._set_fact("recovered", 1)

    def identity(self, tier: str) -> str | None:
        """Who was behind `tier` when it was last greeted; None before the first time."""
        known: str | None = self._execute("SELECT identity FROM tiers WHERE no = ?", (self._no[tier],)).get
        return known

    def set_identity(self, tier: str, identity: str) -> None:
        """Another identity means other contents: they have to be scanned."""
        with self._database.transaction():
            self._execute(
                "UPDATE tiers SET scanned = scanned AND identity IS ?1, identity = ?1,"
                " shows_metadata = CASE WHEN identity IS ?1 THEN shows_metadata END,"
                " epoch = CASE WHEN identity IS ?1 THEN epoch END, set_back = set_back AND identity IS ?1,"
                " strange = CASE WHEN identity IS ?1 THEN strange ELSE 0 END"
                " WHERE no = ?2",
                (identity, self._no[tier]),
            )

    def is_scanned(self, tier: str) -> bool:
        """Whether all that `tier` holds is accounted for."""
        return bool(self._execute("SELECT scanned FROM tiers WHERE no = ?", (self._no[tier],)).get)

    def is_all_scanned(self) -> bool:
        """Whether all that any tier holds is accounted for."""
        return not self.unscanned()

    def unscanned(self) -> list[str]:
        """The tiers that hold, or may hold, what is not accounted for."""
        return [tier for tier in self._tiers if not self.is_scanned(tier)]

    def set_scanned(self, tier: str, scanned: bool) -> None:
        with self._database.transaction():
            self._execute("UPDATE tiers SET scanned = ? WHERE no = ?", (scanned, self._no[tier]))

    def dimensions(self) -> int | None:
        """The width of the federation's vectors; None until the first has fixed it (§3.7)."""
        width: int | None = self._fact("dimensions", None)
        return width

    def metric(self) -> str:
        """How vectors are compared in this federation (§3.7)."""
        metric: str = self._fact("metric", "cosine")
        return metric

    def set_metric(self, metric: str) -> None:
        """Vectors compared in another way than so far have to be indexed anew, by a scan."""
        with self._database.transaction():
            if metric != self.metric() and self._width is not None:
                self._execute("DROP TABLE nearest")
                self._set_fact("nearest", None)
                self._execute("UPDATE tiers SET scanned = 0 WHERE indexed")
            self._set_fact("metric", metric)

    def set_lifting(self, tier: str, *, lifted: bool, indexed: bool) -> None:
        """Whether records are written to `tier` lifted from now on, and whether their vectors are indexed here. Those
        of the records that are there already are indexed by a scan."""
        if (lifted, indexed) == (self._is_lifted(tier), tier in self._indexed):
            return
        with self._database.transaction():
            self._execute(
                "UPDATE tiers SET lifted = ?1, indexed = ?2, scanned = scanned AND (indexed OR NOT ?2) WHERE no = ?3",
                (lifted, indexed, self._no[tier]),
            )
        (self._indexed.add if indexed else self._indexed.discard)(tier)

    def _is_lifted(self, tier: str) -> bool:
        return bool(self._execute("SELECT lifted FROM tiers WHERE no = ?", (self._no[tier],)).get)

    def note_metadata(self, tier: str, shown: bool) -> None:
        """The server behind a lifted tier has, or has not, kept the metadata of a record as it was shown it. One that
        was not kept is enough: a condition that the server applies could miss that record.

        A read may be what has seen it: so a disk that does not take it is no failure, and it is known until the end.
        """
        noted = self._shows_metadata(tier)
        if noted is None or (noted and not shown):
            if not shown:
                self._hiding.add(tier)
            with contextlib.suppress(OSError), self._database.transaction():
                self._execute("UPDATE tiers SET shows_metadata = ? WHERE no = ?", (shown, self._no[tier]))

    def shows_metadata(self, tier: str) -> bool:
        """Whether the server behind a lifted tier was seen to keep the metadata of all records as it was shown it."""
        return tier not in self._hiding and bool(self._shows_metadata(tier))

    def _shows_metadata(self, tier: str) -> int | None:
        noted: int | None = self._execute("SELECT shows_metadata FROM tiers WHERE no = ?", (self._no[tier],)).get
        return noted

    def fix_dimensions(self, width: int) -> None:
        with self._database.transaction():
            self._set_fact("dimensions", width)

    def set_strange(self, tier: str, records: int) -> None:
        """How many records of other federations `tier` holds beside ours."""
        if records != self.strange(tier):
            with self._database.transaction():
                self._execute("UPDATE tiers SET strange = ? WHERE no = ?", (records, self._no[tier]))

    def strange(self, tier: str) -> int:
        """How many records of other federations `tier` was last seen to hold beside ours."""
        return self._execute("SELECT strange FROM tiers WHERE no = ?", (self._no[tier],)).get or 0

    def records_in(self, tier: str) -> int:
        """How many records live in `tier`."""
        return self._execute("SELECT records FROM tiers WHERE no = ?", (self._no[tier],)).get or 0

    def look_at_clock(self, now: int) -> int:
        """Note what the clock shows now; returns by how many milliseconds it was set back since the last look, which
        may have been another router's."""
        back, self._clock = self._clock - now, now
        return max(back, 0)

    def newest_of(self, owner: str | None, session: str) -> int | None:
        """When the newest record of an owner's conversation was created; None where there is none."""
        newest: int | None = self._execute(
            "SELECT created_at FROM records WHERE session = ? AND owner = ? AND home IS NOT NULL"
            " ORDER BY created_at DESC LIMIT 1",
            (present(session), present(owner)),
        ).get
        return newest

    def find(self, ids: Iterable[str]) -> dict[str, Entry]:
        """The entries of those `ids` that live somewhere."""
        found = {}
        for id in ids:
            entry = self._find(id)
            if entry is not None:
                found[id] = entry
        return found

    def by_key(self, owner: str | None, key: str) -> Entry | None:
        """The record at an owner's key."""
        return self._one("key = ? AND owner = ? AND key != ''", (present(key), present(owner)))

    def group(self, home: str, owner: str | None, group: str) -> list[Entry]:
        """The members of an owner's group in one tier."""
        place = (present(group), present(owner), self._no[home])
        return self._all("grp = ? AND owner = ? AND home = ? AND grp != ''", place, order="seq")

    def unit(self, entry: Entry) -> list[Entry]:
        """The records that move together with `entry`, itself among them."""
        return [entry] if entry.group is None else self.group(entry.home, entry.owner, entry.group)

    def unchanged(self, unit: Sequence[Entry]) -> list[Entry] | None:
        """A unit's entries as they are now, if it has the members it had, each with its home and content; else None."""
        current = self._find(unit[0].id)
        now = [] if current is None else self.unit(current)
        same = {(e.id, e.version, e.home) for e in now} == {(e.id, e.version, e.home) for e in unit}
        return now if same else None

    def units(self, entries: Iterable[Entry]) -> list[list[Entry]]:
        """What moves together with each of `entries`; each unit once, in the order of their first."""
        units = []
        seen: set[str] = set()
        for entry in entries:
            if entry.id not in seen:
                units.append(self.unit(entry))
                seen.update(member.id for member in units[-1])
        return units

    def sees(self, scope: Scope, entry: Entry) -> bool:
        """Whether `scope` may read the record (§6)."""
        return scope.holds(entry.owner) or self._tiers[entry.home].shared

    def is_reserved(self, id: str) -> bool:
        """Whether a write of `id` is under way."""
        return self._execute("SELECT 1 FROM records WHERE id = ? AND home IS NULL", (id,)).get is not None

    def is_forgotten(self, id: str) -> bool:
        """Whether a note says that `id` was forgotten."""
        return self._execute("SELECT 1 FROM forgotten WHERE id = ? LIMIT 1", (id,)).get is not None

    def _know(self, tiers: Sequence[Tier]) -> None:
        self._name = dict(self._execute("SELECT no, name FROM tiers"))
        self._no = {name: no for no, name in self._name.items()}
        for name, records in self._execute("SELECT name, records FROM tiers WHERE records > 0"):
            if name not in self._tiers:
                raise DatabaseError(
                    f"{self._database.path}: {records} records live in the tier {name!r}, which is not among the"
                    " managed tiers any more; bring it back, and have its records forgotten or moved before it goes"
                )
        for tier in tiers:
            if tier.name not in self._no:
                self._execute("INSERT INTO tiers (name) VALUES (?)", (tier.name,))
                self._no[tier.name] = self._database.connection.last_insert_rowid()
                self._name[self._no[tier.name]] = tier.name
            before = next(
                self._execute(
                    "SELECT half_life, per_session, promote_after FROM tiers WHERE no = ?", (self._no[tier.name],)
                )
            )
            settings = (tier.half_life, int(tier.per_session), tier.promote_after)
            if before != settings:
                self._compute_anew(tier, settings)

    def _compute_anew(self, tier: Tier, settings: tuple[Any, ...]) -> None:
        """A tier's settings have changed: its buckets, its strengths and what is due follow from them. Looks at all its
        records."""
        no = self._no[tier.name]
        entries = self._all("home = ?", (no,), order="seq")
        for entry in entries:
            self._leave(entry)
        self._execute(
            "UPDATE tiers SET half_life = ?, per_session = ?, promote_after = ? WHERE no = ?", (*settings, no)
        )
        for entry in entries:
            self._enter(entry)
            if tier.promote_to and tier.promote_after and entry.access_count >= tier.promote_after:
                self._execute("INSERT OR REPLACE INTO due VALUES (?, ?)", (entry.id, self._no[entry.home]))
            else:
                self._execute("DELETE FROM due WHERE id = ?", (entry.id,))

    def _account(self, entry: Entry) -> tuple[Any, ...]:
        return (
            entry.id,
            present(entry.owner),
            present(entry.session),
            present(entry.group),
            present(entry.role),
            present(entry.key),
            entry.revision,
            entry.created_at,
            entry.digest,
            self._next_version(),
            entry.salience,
            entry.access_count,
            entry.accessed_at,
        )

    def _insert(self, entry: Entry, vector: Sequence[float] | None) -> None:
        """A record that no write reserved; it stands at the place that its account names, if that is free."""
        taken = entry.seq == 0 or self._execute("SELECT 1 FROM records WHERE seq = ?", (entry.seq,)).get is not None
        seq = self._next_number() if taken else entry.seq
        self._execute(
            "INSERT INTO records (seq, id, owner, session, grp, role, key, revision, created_at, digest, version,"
            " salience, access_count, accessed_at, strength) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
            (seq, *self._account(entry)),
        )
        self._enter(msgspec.structs.replace(entry, seq=seq))
        self._know_width(None if vector is None else len(vector))
        self._index(seq, entry.home, vector)

    def _know_width(self, width: int | None) -> None:
        """A vector that this catalog did not see being written has fixed the width of all, if none had before."""
        if width is not None and self.dimensions() is None:
            self.fix_dimensions(width)

    def _index(self, seq: int, home: str, vector: Sequence[float] | None) -> None:
        """The vector of a record that has come to live in `home`, or none, in place of what was there."""
        if not self._indexed:
            return
        width = self._width
        if width is not None:
            self._execute("DELETE FROM nearest WHERE rowid = ?", (seq,))
        if home not in self._indexed or vector is None or not 1 <= len(vector) <= MAX_WIDTH:
            return
        if width != len(vector) and self.dimensions() in (None, len(vector)):
            # the first there is; what was indexed by another width was of a copy that came to nothing
            nearest.create(self._database.connection, len(vector), self.metric())
            self._set_fact("nearest", len(vector))
            width = len(vector)
        packed = indexed(vector, self.metric())
        if packed is not None and len(vector) == width:
            self._execute("INSERT INTO nearest (rowid, vector) VALUES (?, ?)", (seq, packed))

    def _delete(self, entry: Entry) -> None:
        """The record's row goes, and all that stands beside it."""
        self._execute("DELETE FROM records WHERE seq = ?", (entry.seq,))
        self._execute("DELETE FROM due WHERE id = ?", (entry.id,))
        self._execute("DELETE FROM redo WHERE id = ?", (entry.id,))
        self._index(entry.seq, entry.home, None)

    def _settle_home(self, entry: Entry) -> int:
        """A reserved record becomes one; on purpose, so the notes that its id was forgotten end: as soon as there is no
        tier left where what was forgotten may be found. Returns its number."""
        seq = self._execute("SELECT seq FROM records WHERE id = ? AND home IS NULL", (entry.id,)).get
        assert seq is not None, "a record is reserved before it is written"
        self._execute("UPDATE records SET destination = NULL WHERE seq = ?", (seq,))
        self._strike(entry.home, entry.id)
        if self.is_forgotten(entry.id) and self.is_all_scanned():
            self._execute("DELETE FROM forgotten WHERE id = ?", (entry.id,))
        self._execute("DELETE FROM earned WHERE id = ?", (entry.id,))  # by another, which was lost
        self._enter(msgspec.structs.replace(entry, seq=seq))
        return int(seq)

    def _replace(self, current: Entry, replacement: Replacement, vector: Sequence[float] | None) -> None:
        """New content for a record, and perhaps a new home; what it has earned stays."""
        entry = replacement.entry
        self._leave(current)
        kept = msgspec.structs.replace(
            entry,
            seq=current.seq,
            access_count=current.access_count,
            accessed_at=current.accessed_at,
            salience=current.salience if replacement.salience is None else replacement.salience,
        )
        self._execute(
            "UPDATE records SET (id, owner, session, grp, role, key, revision, created_at, digest, version,"
            " salience, access_count, accessed_at) = (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) WHERE seq = ?",
            (*self._account(kept), current.seq),
        )
        if current.home != entry.home:
            self._strike(entry.home, entry.id)
            self._note(current, current.home, Stray.UNWANTED)
            self._execute("DELETE FROM due WHERE id = ?", (entry.id,))
            self.readers.moved(entry.id, current.home)
        # a copy that equalled what was replaced equals nothing any more
        self._execute("UPDATE strays SET kind = ? WHERE id = ? AND kind = ?", (Stray.UNWANTED, entry.id, Stray.EQUAL))
        # what was to be caught up with is not true any more; whoever replaces says whether this is to be
        self._execute("DELETE FROM redo WHERE id = ?", (entry.id,))
        self._enter(kept)
        self._know_width(None if vector is None else len(vector))
        self._index(current.seq, entry.home, vector)

    def _enter(self, entry: Entry) -> None:
        """The record comes to live in its home. Its row exists; everything that counts it is brought up to date."""
        no, owner, session, group = self._places(entry)
        tier = self._tiers[entry.home]
        touched = entry.created_at if entry.accessed_at is None else entry.accessed_at
        strength = self._strength(entry.salience, entry.access_count, touched, tier.half_life)
        place = (no, owner, session) if tier.per_session else (no, "", "")
        bucket = self._execute(
            "INSERT INTO buckets (tier, owner, session, records) VALUES (?, ?, ?, 1)"
            " ON CONFLICT DO UPDATE SET records = records + 1 RETURNING no",
            place,
        ).get
        self._execute("UPDATE tiers SET records = records + 1 WHERE no = ?", (no,))
        self._execute(
            "INSERT INTO sessions VALUES (?, ?, ?, 1) ON CONFLICT DO UPDATE SET records = records + 1",
            (owner, session, no),
        )
        self._execute(
            "UPDATE records SET home = ?, bucket = ?, strength = ?, salience = ?, version = ? WHERE seq = ?",
            (no, bucket, strength, entry.salience, self._next_version(), entry.seq),
        )
        if group:
            self._execute(
                "INSERT INTO groups VALUES (?, ?, ?, ?, 1, ?, ?) ON CONFLICT DO UPDATE SET records = records + 1",
                (no, owner, group, bucket, strength, entry.seq),
            )
            self._weigh_group(no, owner, group)

    def _leave(self, entry: Entry) -> None:
        """The record stops living in its home; the inverse of `_enter`."""
        no, owner, session, group = self._places(entry)
        bucket = self._execute("SELECT bucket FROM records WHERE seq = ?", (entry.seq,)).get
        self._execute("UPDATE records SET home = NULL, bucket = NULL WHERE seq = ?", (entry.seq,))
        self._execute("UPDATE tiers SET records = records - 1 WHERE no = ?", (no,))
        self._execute("UPDATE buckets SET records = records - 1 WHERE no = ?", (bucket,))
        self._execute("DELETE FROM buckets WHERE no = ? AND records = 0", (bucket,))
        self._execute(
            "UPDATE sessions SET records = records - 1 WHERE owner = ? AND session = ? AND tier = ?",
            (owner, session, no),
        )
        self._execute(
            "DELETE FROM sessions WHERE owner = ? AND session = ? AND tier = ? AND records = 0", (owner, session, no)
        )
        if group:
            share = (no, owner, group, bucket)
            at = "WHERE home = ? AND owner = ? AND grp = ? AND bucket = ?"
            self._execute(f"UPDATE groups SET records = records - 1 {at}", share)
            self._execute(f"DELETE FROM groups {at} AND records = 0", share)
            self._weigh_group(no, owner, group)

    def _earn(self, entry: Entry) -> None:
        """What the record has earned has changed, and with it its strength."""
        no, owner, _, group = self._places(entry)
        touched = entry.created_at if entry.accessed_at is None else entry.accessed_at
        strength = self._strength(entry.salience, entry.access_count, touched, self._tiers[entry.home].half_life)
        self._execute(
            "UPDATE records SET salience = ?, access_count = ?, accessed_at = ?, strength = ? WHERE seq = ?",
            (entry.salience, entry.access_count, entry.accessed_at, strength, entry.seq),
        )
        if group:
            self._weigh_group(no, owner, group)

    def _weigh_group(self, no: int, owner: str, group: str) -> None:
        # a group stands where its strongest member would; the index holds the members in that order
        strongest = self._execute(
            "SELECT strength, seq FROM records WHERE grp = ? AND owner = ? AND home = ? AND grp != ''"
            " ORDER BY strength DESC, seq DESC LIMIT 1",
            (group, owner, no),
        ).get
        if strongest is not None:
            self._execute(
                "UPDATE groups SET (strength, seq) = (?, ?) WHERE home = ? AND owner = ? AND grp = ?",
                (*strongest, no, owner, group),
            )

    def _places(self, entry: Entry) -> tuple[int, str, str, str]:
        return self._no[entry.home], present(entry.owner), present(entry.session), present(entry.group)

    def _note(self, entry: Entry, tier: str, kind: Stray) -> None:
        self._execute(
            "INSERT OR REPLACE INTO strays VALUES (?, ?, ?, ?, ?)",
            (self._no[tier], entry.id, kind, present(entry.owner), present(entry.key)),
        )

    def _strike(self, tier: str, id: str) -> None:
        self._execute("DELETE FROM strays WHERE tier = ? AND id = ?", (self._no[tier], id))

    def _strays(self, condition: str, parameters: tuple[Any, ...], index: str | None = None) -> list[NotedStray]:
        tier, *others = parameters
        strays = "strays" if index is None else f"strays INDEXED BY {index}"
        rows = self._execute(f"SELECT id, kind, owner, key FROM {strays} WHERE {condition}", (self._no[tier], *others))
        return [NotedStray(id, tier, Stray(kind), absent_or(o), absent_or(key)) for id, kind, o, key in rows]

    def _find(self, id: str) -> Entry | None:
        return self._one("id = ?", (id,))

    def _one(self, condition: str, parameters: tuple[Any, ...]) -> Entry | None:
        row = next(
            self._execute(f"SELECT {COLUMNS} FROM records WHERE {condition} AND home IS NOT NULL", parameters), None
        )
        return None if row is None else row_entry(row, self._name[row[2]])

    def _all(self, condition: str, parameters: tuple[Any, ...], order: str) -> list[Entry]:
        rows = self._execute(
            f"SELECT {COLUMNS} FROM records WHERE {condition} AND home IS NOT NULL ORDER BY {order}", parameters
        )
        return [row_entry(row, self._name[row[2]]) for row in rows]

    def _next_number(self) -> int:
        self._newest += 1
        return self._newest

    def _next_version(self) -> int:
        self._versions += 1
        return self._versions

    def _fact(self, name: str, otherwise: Any) -> Any:
        row = next(self._execute("SELECT value FROM facts WHERE name = ?", (name,)), None)
        return otherwise if row is None else row[0]

    def _set_fact(self, name: str, value: Any) -> None:
        self._execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))
