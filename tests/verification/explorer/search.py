"""Visits every reachable state, the nearest first, and returns the shortest path to a broken rule."""

import time
from array import array
from collections.abc import Callable

import msgspec

from tests.verification.explorer.machine import Machine
from tests.verification.explorer.rules import is_quiescent, told, wrong_at_rest, wrong_in
from tests.verification.explorer.states import Label, Scenario, State
from tests.verification.explorer.steps import BUILT, REORDERED, Design


class Counterexample(msgspec.Struct, frozen=True):
    """The path to a broken rule: each step, and the state after it."""

    scenario: str
    wrong: str
    start: State
    steps: list[tuple[Label, State]]

    def __str__(self) -> str:
        lines = [f"{self.scenario}: {self.wrong}, after {len(self.steps)} steps:", f"      {told(self.start)}"]
        for number, (label, state) in enumerate(self.steps, 1):
            lines += [f"  {number:2}. {label}", f"      {told(state)}"]
        return "\n".join(lines)


class Found(msgspec.Struct, frozen=True):
    """The result of an exploration: its size, and the counterexample if there is one."""

    scenario: str
    states: int
    transitions: int
    depth: int
    quiescent: int
    seconds: float
    wrong: Counterexample | None

    def __str__(self) -> str:
        outcome = "nothing is wrong" if self.wrong is None else f"WRONG: {self.wrong.wrong}"
        return (
            f"{self.scenario}: {self.states:,} states, {self.transitions:,} transitions, depth {self.depth}, "
            f"{self.quiescent:,} quiescent, {self.seconds:.1f} s: {outcome}"
        )


def explore(
    scenario: Scenario, design: Design = BUILT, *, on_progress: Callable[[int, int], None] = lambda states, left: None
) -> Found:
    """Visit every reachable state of a scenario, breadth first, so that the first finding is the nearest.

    After that, check that a quiescent state can be reached from each state without a further fault.
    """
    began = time.perf_counter()
    machine = Machine(scenario, design)
    start = machine.initial()
    known = {start: 0}
    states = [start]
    parents = array("l", [-1])
    depths = array("l", [0])
    fair_from, fair_to = array("l"), array("l")
    quiescent = array("l")
    transitions = 0

    def done(wrong: str | None, at: int, last: tuple[Label, State] | None = None) -> Found:
        story = None
        if wrong is not None:
            steps = _path(machine, states, parents, at)
            story = Counterexample(scenario.name, wrong, start, [*steps, last] if last else steps)
        seconds = time.perf_counter() - began
        return Found(scenario.name, len(states), transitions, max(depths), len(quiescent), seconds, story)

    at = 0
    while at < len(states):
        state = states[at]
        wrong = wrong_in(state, scenario, design)
        if wrong is None and is_quiescent(state):
            quiescent.append(at)
            wrong = wrong_at_rest(state)
        if wrong is not None:
            return done(wrong, at)
        for label, after, wrong in machine.successors(state):
            transitions += 1
            if wrong is not None:
                return done(wrong, at, (label, after))
            to = known.get(after)
            if to is None:
                to = known[after] = len(states)
                states.append(after)
                parents.append(at)
                depths.append(depths[at] + 1)
            if not label.fault:
                fair_from.append(at)
                fair_to.append(to)
        at += 1
        if at % 5000 == 0:
            on_progress(at, len(states) - at)
    stuck = _cannot_come_to_rest(len(states), fair_from, fair_to, quiescent)
    if stuck is not None:
        return done("nothing that happens without a further fault leads to rest from here", stuck)
    return done(None, 0)


def explore_in_every_order(scenario: Scenario) -> Found:
    """Explore a scenario; if it has moves and crashes, do it with every permitted order of the steps of a move.

    The order decides what is durable at a crash. Returns the sum of all explorations, or the first finding.
    """
    found = explore(scenario)
    for design in REORDERED if scenario.moves and scenario.crashes else ():
        if found.wrong is None:
            other = explore(scenario, design)
            found = msgspec.structs.replace(
                other,
                states=found.states + other.states,
                transitions=found.transitions + other.transitions,
                depth=max(found.depth, other.depth),
                quiescent=found.quiescent + other.quiescent,
                seconds=found.seconds + other.seconds,
            )
    return found


def _path(machine: Machine, states: list[State], parents: "array[int]", at: int) -> list[tuple[Label, State]]:
    steps: list[tuple[Label, State]] = []
    while parents[at] >= 0:
        before = parents[at]
        label = next(label for label, after, _ in machine.successors(states[before]) if after == states[at])
        steps.append((label, states[at]))
        at = before
    return steps[::-1]


def _cannot_come_to_rest(
    count: int, fair_from: "array[int]", fair_to: "array[int]", quiescent: "array[int]"
) -> int | None:
    """Return the nearest state from which no quiescent one can be reached; the search follows the edges backwards."""
    # first the number of edges to each state, then the place where its part of the sorted edges begins
    begins = array("l", bytes(array("l").itemsize * (count + 1)))
    for to in fair_to:
        begins[to + 1] += 1
    for number in range(count):
        begins[number + 1] += begins[number]
    place = array("l", begins)
    sources = array("l", bytes(array("l").itemsize * len(fair_from)))
    for source, to in zip(fair_from, fair_to, strict=True):
        sources[place[to]] = source
        place[to] += 1
    reached = bytearray(count)
    waiting = list(quiescent)
    for at in waiting:
        reached[at] = 1
    while waiting:
        at = waiting.pop()
        for source in sources[begins[at] : begins[at + 1]]:
            if not reached[source]:
                reached[source] = 1
                waiting.append(source)
    stuck = reached.find(0)
    return None if stuck < 0 else stuck
