"""A store on a disk that is soon full. As a program, it gets a folder on such a disk and prints the outcome."""

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.method_params import Pages, Remember
from a2m_router.protocol.wire.records import Draft
from a2m_store.batch import Call, carry_out
from a2m_store.store import Store
from tests.support.federated import LOCAL, Clock

LONG = "long " * 4000


def remember(store: Store, id: str) -> Any:
    params = Remember(records=[Draft(id=id, content=f"{LONG} {id}")])
    [outcome] = carry_out(store, [Call(lambda: store.remember(params, LOCAL), writes=True)], durable=True)
    return outcome


def held(store: Store) -> list[str]:
    with store.transaction():
        return [record.id for record in store.timeline(Pages(), LOCAL)["records"]]


def fill_a_small_disk(folder: Path) -> None:
    """Write to a store until its disk is full, make room once, and go on; nothing acknowledged may be lost."""
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(600_000))
    kept: list[str] = []
    store = Store(folder / "a.db", clock=Clock())
    refusals = 0
    for n in range(400):
        outcome = remember(store, f"r{n}")
        if isinstance(outcome, A2MError):
            refusals += 1
            assert outcome.data == {"reason": "disk full"}, outcome
            if refusals == 3:
                ballast.unlink()
            if refusals == 6:
                break
        else:
            kept.append(f"r{n}")
        assert held(store) == kept
    store.close()
    with closing(Store(folder / "a.db", clock=Clock())) as again:
        assert held(again) == kept
    print(json.dumps({"kept": len(kept), "refusals": refusals}))


if __name__ == "__main__":
    fill_a_small_disk(Path(sys.argv[1]))
