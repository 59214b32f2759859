"""The parameters of every method (§4), as msgspec Structs. Parameters that are not named here are ignored (§2)."""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from a2m_router.protocol.wire.records import ConditionalDraft, Draft

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]

# Ranking a query word by word blocks other calls, so its length is limited; the limit fits an agent's whole situation.
Query = Annotated[str, Meta(max_length=16_384)]


class Params(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The base of all parameter objects: parameters go by name, unknown names are ignored."""


class Describe(Params):
    """§4.1"""

    protocol: str | None = None
    owner: str | None = None


# A router's id for a federation, or for one of its starts.
_Mark = Annotated[str, Meta(min_length=1, max_length=64)]


class Enrol(Describe):
    """§4.1, with an extension for a2m-store on the pipes of its router: the federation that the store belongs to from
    now on, and the current start of the router. The store saves both before it answers."""

    federation: _Mark | None = None
    epoch: _Mark | None = None


class Remember(Params):
    """§4.2; `owner` and `session` are the defaults of records that lack them."""

    records: list[Draft]
    owner: str | None = None
    session: str | None = None


class ConditionalRemember(Params):
    """§4.2, for a server that supports `if_revision`; other servers ignore it."""

    records: list[ConditionalDraft]
    owner: str | None = None
    session: str | None = None


class Prompt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to render recalled records as text (§4.16)."""

    method: str = "template"
    style: str = "auto"
    model: str | None = None
    budget: Count | None = None
    cite: bool = False


class Read(Params):
    """The parameters that recall and timeline share."""

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
    """§4.4, with an extension of ours: `after` and `page` read all records in pages, in the order of writing."""

    after: str | None = None
    page: Count | None = None

    @property
    def walks(self) -> bool:
        """Whether the call requests a page, rather than a timeline."""
        return self.page is not None or self.after is not None


class PromptedRecall(Recall):
    """§4.3 with §4.16, for a server that renders text. True is a Prompt of defaults."""

    prompt: Prompt | bool | None = None


class PromptedPages(Pages):
    """§4.4 with §4.16"""

    prompt: Prompt | bool | None = None


class Selector(Params):
    """A selection of records: they must meet all given parameters."""

    ids: list[str] | None = None
    query: Query | None = None
    tier: str | None = None
    where: dict[str, Raw] | None = None
    owner: str | None = None
    key_prefix: str | None = None


class Forget(Selector):
    """§4.5"""


class Summarize(Selector):
    """§4.15; `into` is the tier of the summary, `key` its key."""

    limit: Count | None = None
    into: str | None = None
    key: str | None = None


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


class Events(Params):
    """§4.12"""

    cursor: str | None = None
    limit: Count | None = None
    kinds: list[str] | None = None
    owner: str | None = None


class Subscribe(Params):
    """§4.13"""

    kinds: list[str] | None = None
    owner: str | None = None


class Unsubscribe(Params):
    """§4.14"""


class Backup(Params):
    """`store/backup`, an extension of ours, which `describe` announces under `store`. `path` begins a backup there;
    `backup` queries its progress, or with `cancel` cancels it; without either the answer says what a backup contains.
    """

    path: str | None = None
    backup: str | None = None
    cancel: bool = False
