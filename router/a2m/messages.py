"""The parameters of every method (§4), as msgspec Structs. Parameters that are not named here are ignored (§2)."""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from router.a2m.records import Draft

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]

# A query is ranked word by word while others wait: it may be as long as a situation that an agent hands over.
Query = Annotated[str, Meta(max_length=16_384)]


class Params(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What all parameter objects are: by name, unknown names ignored."""


class Describe(Params):
    """§4.1"""

    protocol: str | None = None
    owner: str | None = None


class Remember(Params):
    """§4.2; `owner` and `session` are for records that carry none."""

    records: list[Draft]
    owner: str | None = None
    session: str | None = None


class Read(Params):
    """What recall and timeline share."""

    tier: str | None = None
    limit: Count | None = None
    where: dict[str, Raw] | None = None
    owner: str | None = None
    key_prefix: str | None = None
    embeddings: bool = False


class Recall(Read):
    """§4.3"""

    query: Query | None = None
    min_score: float | None = None
    embedding: list[float] | None = None


class Timeline(Read):
    """§4.4"""


class Pages(Timeline):
    """§4.4, with an extension of a2m-store: `after` and `page` walk all it holds, page by page."""

    after: str | None = None
    page: Count | None = None


class Forget(Params):
    """§4.5"""

    ids: list[str] | None = None
    query: Query | None = None
    tier: str | None = None
    where: dict[str, Raw] | None = None
    owner: str | None = None
    key_prefix: str | None = None


class Promote(Params):
    """§4.6"""

    ids: list[str]
    tier: str
    salience: float | None = None
    owner: str | None = None


class Consolidate(Params):
    """§4.7"""

    owner: str | None = None


class Reinforce(Params):
    """§4.8"""

    ids: list[str]
    amount: float = 1.0
    owner: str | None = None


class Fetch(Params):
    """§4.9"""

    key: str
    owner: str | None = None
    embeddings: bool = False


class SessionList(Params):
    """§4.10"""

    owner: str | None = None


class SessionClose(Params):
    """§4.11"""

    session: str
    owner: str | None = None
