"""The state machine: every step that is possible in a state of a small federation.

A state is a value. The walks are the router's steps, the faults disturb them, and recoveries follow a fault.

The model is coarser than the router. Nothing that it looks for is lost by that:

- a claim is taken in one step (`Claims` has tests of its own);
- a reconciler begins whenever its tier has strays or a pending write, without being woken and without a delay; it
  handles one of the two at a time;
- a read that has failed may be sent once more whenever its tier is up;
- a record that comes back altered from its second write is written again; no tier alters records here;
- a tier that comes back is scanned in one step; in two steps if it lacks a record.
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
        """Return the first state."""
        return self.scenario.begins()

    def successors(self, state: State) -> Iterator[Step]:
        """Yield every step that is possible now, with the state that it leads to."""
        yield from self._walks.steps(state)
        yield from self._faults.steps(state)
