"""The state machine: what may happen next in a small federation, whatever that is.

A state is a value. The walks go their steps, faults befall them, and what a fault has left is put right.

Rougher than the router, and why that loses nothing that is looked for here:
- a claim is taken in one step (`Claims` has tests of its own);
- a reconciler begins whenever its tier is owed something, without being woken and without a wait, with the strays or
  with what is to be replaced; one of the two at a time;
- a read that has failed may be asked once more whenever its tier is up;
- what comes back altered when it was written a second time is done anew; no tier alters anything here;
- a tier that comes back is scanned in one step; in two where something is not there.
"""

from collections.abc import Iterator

from tests.verification.explorer.faults import Faults
from tests.verification.explorer.states import Scenario, State, Step
from tests.verification.explorer.steps import BUILT, Design
from tests.verification.explorer.walks import Walks


class Machine:
    """One scenario under one design."""

    def __init__(self, scenario: Scenario, design: Design = BUILT) -> None:
        self.scenario = scenario
        self.design = design
        self._walks = Walks(scenario, design)
        self._faults = Faults(self._walks)

    def initial(self) -> State:
        """Where it begins."""
        return self.scenario.begins()

    def successors(self, state: State) -> Iterator[Step]:
        """Every step that is possible now, and what it leads to."""
        yield from self._walks.steps(state)
        yield from self._faults.steps(state)
