"""The small federations that are explored: SLICE by the tests, WHOLE by the command.

One scenario with all faults and clients would have more states than fit into memory. WHOLE therefore has every pair of
a fault or client with the move, and those triples in which one repairs what another has broken.
"""

from typing import Final

from tests.verification.explorer.accounts import SOURCE, TARGET, A, B, C
from tests.verification.explorer.states import Scenario

_AGAIN: Final = ((SOURCE, TARGET), (SOURCE, TARGET))
_THERE_AND_BACK: Final = ((SOURCE, TARGET), (TARGET, SOURCE))

SLICE: Final = (
    Scenario(name="a move and a read", reads=2),
    Scenario(name="a move, a late member and a read", late=True, reads=1),
    Scenario(name="a move, a replacement and a read", replaces=1, reads=1),
    Scenario(name="a move, a forget and a read", forgets=B, reads=1),
    Scenario(name="a move there and back, a read", moves=_THERE_AND_BACK, reads=1),
    Scenario(name="a crash of a move and a late member", late=True, crashes=1, moves=_AGAIN),
    Scenario(name="a crash of a move and a replacement", replaces=1, crashes=1),
    Scenario(name="a crash of a move and a forget", forgets=B, crashes=1),
    Scenario(name="two crashes of a move there and back", moves=_THERE_AND_BACK, crashes=2),
    Scenario(name="an outage, a late member and a replacement", late=True, replaces=1, outages=1),
    Scenario(name="a call that lands late, a late member and a replacement", late=True, replaces=1, timeouts=1),
    Scenario(name="a call that lands late and a forget", forgets=B, timeouts=1, moves=_AGAIN),
    Scenario(name="a crash, an outage and a late member", late=True, crashes=1, outages=1),
    Scenario(name="a record that its new home loses", losses=1, reads=1, crashes=1),
    Scenario(name="a tier that does not keep what it is given", unkept=1, reads=1, moves=_AGAIN),
    Scenario(name="a tier that does not keep what replaces", moves=(), replaces=1, unkept=1, crashes=1),
    Scenario(name="two replacements and a forget", moves=(), replaces=2, forgets=A, timeouts=1),
    Scenario(name="a lesser tier, two replacements, a read", moves=(), replaces=2, reads=1, lesser=True),
    Scenario(name="a lesser tier, a replacement, a crash", moves=(), replaces=1, forgets=A, crashes=1, lesser=True),
    Scenario(name="a batch that cannot be kept half, a read", moves=(), replaces=1, batch=True, timeouts=1, reads=1),
    Scenario(name="a batch, a crash that may take its reservation", moves=(), replaces=1, batch=True, crashes=1),
    Scenario(name="a server goes on after a crash of a write", moves=(), late=True, crashes=1, outlives=True),
    Scenario(name="a server goes on after a crash, and is told anew", moves=(), replaces=2, crashes=1, outlives=True),
    Scenario(name="a replacement is not undone by a call that lands late", moves=(), replaces=1, forgets=A, timeouts=2),
)

WHOLE: Final = (
    *SLICE,
    Scenario(name="every client at once", late=True, replaces=1, forgets=A, reads=1),
    Scenario(name="every client but the forget, and two reads", late=True, replaces=1, reads=2),
    Scenario(name="a forget of the late member, a crash, an outage", late=True, forgets=C, crashes=1, outages=1),
    Scenario(name="a forget of what is replaced, a late one, a crash", late=True, replaces=1, forgets=A, crashes=1),
    Scenario(name="a forget of what is replaced, an outage", replaces=1, forgets=A, outages=1),
    Scenario(name="a forget of what is replaced, a call that lands late", replaces=1, forgets=A, timeouts=1),
    Scenario(name="a crash, a call that lands late", late=True, replaces=1, crashes=1, timeouts=1),
    Scenario(name="a crash, an outage, a call that lands late", late=True, crashes=1, outages=1, timeouts=1),
    Scenario(name="two crashes", late=True, replaces=1, crashes=2, moves=_AGAIN),
    Scenario(name="there and back, a forget, a call that lands late", forgets=A, timeouts=1, moves=_THERE_AND_BACK),
    Scenario(name="there and back, a crash, a late member", late=True, crashes=1, moves=_THERE_AND_BACK),
    Scenario(name="a server goes on after a crash of a move", forgets=B, moves=_AGAIN, crashes=1, outlives=True),
    Scenario(name="a server goes on after a crash of a replacement", replaces=1, crashes=1, outlives=True),
    Scenario(name="a read, an outage, a forget", reads=1, outages=1, forgets=B),
    Scenario(name="a read, a call that lands late, a replacement", reads=1, timeouts=1, replaces=1),
    Scenario(name="a record that its new home loses, and a forget", losses=1, reads=1, forgets=B, crashes=1),
    Scenario(name="two replacements and a move", replaces=2, timeouts=1),
    Scenario(name="two replacements, there and back, a crash", replaces=2, crashes=1, moves=_THERE_AND_BACK),
    Scenario(name="a replacement, a crash, an outage", replaces=1, crashes=1, outages=1),
    Scenario(name="a replacement and a move that are not kept", replaces=1, unkept=1, reads=1),
    Scenario(name="a batch and a move, an outage", replaces=1, batch=True, outages=1),
    Scenario(name="a batch and a move, a call that lands late, a read", replaces=1, batch=True, timeouts=1, reads=1),
    Scenario(name="a batch and a move, a forget", replaces=1, batch=True, forgets=A, reads=1),
    Scenario(name="a server goes on, two replacements, a forget", replaces=2, forgets=A, crashes=1, outlives=True),
    Scenario(
        name="a lesser tier, a crash, an outage, a read",
        moves=(),
        replaces=1,
        crashes=1,
        outages=1,
        reads=1,
        lesser=True,
    ),
    Scenario(
        name="a lesser tier, an outage, a call that lands late, a forget",
        moves=(),
        replaces=2,
        outages=1,
        timeouts=1,
        forgets=A,
        lesser=True,
    ),
    Scenario(
        name="a lesser server goes on, two replacements", moves=(), replaces=2, crashes=1, outlives=True, lesser=True
    ),
)
