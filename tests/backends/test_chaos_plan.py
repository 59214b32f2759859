"""The plan of a2m-chaos and its schedule: what a plan may contain, and which fault applies to which call."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2m_chaos.faults import KINDS, WRITES, Behind, Front, Kind
from a2m_chaos.plan import Fault, Plan, PlanError, defaults_of, parse_plan, read_plan
from a2m_chaos.schedule import Applied, Count, Schedule

REMEMBER = "memory/remember"


def fault(text: str, **where: Front | Behind) -> Fault:
    """Return the one fault of a plan whose other keys are valid."""
    [only] = parse_plan(f'memory = ["notes.db*"]\n[[fault]]\n{text}', **where).faults  # type: ignore[arg-type]
    return only


def mistakes(text: str, front: Front = "stdio", behind: Behind = "command") -> str:
    with pytest.raises(PlanError) as refused:
        parse_plan(text, front=front, behind=behind)
    return str(refused.value)


# --- the file


def test_a_plan_says_all_that_a_fault_needs(tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_text(
        """
        seed = 7
        memory = ["notes.db*"]
        counts = "faults.counts"
        [[fault]]
        do = "answer-late"
        method = "memory/recall"
        having = "Birnen für Anna"
        after = 3
        every = 2
        times = 4
        chance = 0.5
        from = "10s"
        until = "1m"
        while = "trouble"
        wait = "250ms"
        in_order = true
        """
    )
    plan = read_plan(tmp_path / "faults.toml", front="stdio", behind="command")
    assert (plan.seed, plan.memory, plan.counts) == (7, ("notes.db*",), tmp_path / "faults.counts")
    assert plan.faults == (
        Fault(
            do="answer-late",
            methods=("memory/recall",),
            having="Birnen für Anna".encode(),
            after=3,
            every=2,
            times=4,
            chance=0.5,
            begins=10.0,
            ends=60.0,
            switch=tmp_path / "trouble",
            wait=0.25,
            in_order=True,
        ),
    )


def test_a_fault_without_a_method_is_done_to_every_method_that_it_fits() -> None:
    assert fault('do = "hang"').methods == ()
    assert fault('do = "disk-full"').methods == WRITES
    assert fault('do = "lose-write"').methods == (REMEMBER,)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_is_told_to_hold_without_a_word_does(kind: Kind) -> None:
    front: Front = "http" if kind.kills else kind.over[0]
    told = [line.removesuffix(" on stdio") for line in defaults_of(kind) if not line.endswith(" = none")]
    said_nothing = f'do = "{kind.name}"\n'
    assert fault(said_nothing + "\n".join(told), front=front) == fault(said_nothing, front=front)
    assert [line.partition(" = ")[0] for line in defaults_of(kind)] == list(kind.settings)


@pytest.mark.parametrize("do", ["delay", "apply-late"])
def test_a_late_answer_on_a_pipe_delays_all_behind_it_unless_told_not_to(do: str) -> None:
    assert fault(f'do = "{do}"', front="stdio").in_order
    assert not fault(f'do = "{do}"', front="http").in_order
    assert not fault(f'do = "{do}"\nin_order = false', front="stdio").in_order


@pytest.mark.parametrize("name", KINDS)
def test_every_fault_can_be_planned_only_where_it_can_happen(name: str) -> None:
    kind = KINDS[name]
    text = f'memory = ["*.db"]\n[[fault]]\ndo = "{name}"'
    fronts: tuple[Front, ...] = ("stdio", "http")
    for front in fronts:
        if front in kind.over:
            assert [each.do for each in parse_plan(text, front=front).faults] == [name]
        else:
            assert f'fault[0].do: "{name}" is a fault of' in mistakes(text, front)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sead = 7", 'sead: unknown key; did you mean "seed"?'),
        ("seed = -1", "seed: must be at least 0, got -1"),
        ('memory = ["/var/notes.db"]', 'memory[0]: "/var/notes.db" is absolute; expected a path relative to this file'),
        ('memory = ["a*", ""]', "memory[1]: must not be empty"),
        ('memory = ["."]', 'memory[0]: "." is this file\'s folder; expected files in it'),
        ('memory = ["././"]', 'memory[0]: "././" is this file\'s folder'),
        ('memory = ["../../*"]', 'memory[0]: "../../*" leads out of this file\'s folder'),
        ('memory = ["notes/../../*"]', 'memory[0]: "notes/../../*" leads out of this file\'s folder'),
        ('memory = ["notes/**.db"]', 'memory[0]: "notes/**.db": "**" matches folders'),
        ("[fault]", "fault: expected a list of tables, written [[fault]], got a table"),
        ("[[fault]]", "fault[0]: do is required, the name of the fault; the faults are delay, hang"),
        (
            '[[fault]]\ndo = "exit-after"',
            'fault[0].do: there is no fault "exit-after"; did you mean "exit-after-work"?',
        ),
        ('[[fault]]\ndo = "hang"\nmetod = "x"', 'fault[0].metod: unknown key; did you mean "method"?'),
        (
            '[[fault]]\ndo = "hang"\nmethod = "memory/remembre"',
            'fault[0].method: A2M has no method "memory/remembre"; did you mean "memory/remember"?',
        ),
        (
            '[[fault]]\ndo = "disk-full"\nmethod = "memory/recall"',
            'fault[0].method: "disk-full" can only apply to memory/remember, memory/forget',
        ),
        ('[[fault]]\ndo = "hang"\nchance = 1.5', "fault[0].chance: must be a probability from 0 to 1, got 1.5"),
        ('[[fault]]\ndo = "hang"\nevery = 0', "fault[0].every: must be at least 1, got 0"),
        ('[[fault]]\ndo = "hang"\nfrom = "2s"\nuntil = "1s"', "fault[0].until: must be later than from"),
        ('[[fault]]\ndo = "delay"\nwait = 2', 'fault[0].wait: 2 has no unit; write for example "2s"'),
        (
            '[[fault]]\ndo = "delay"\nsize = 2',
            'fault[0].size: has no meaning for "delay"; its settings are wait, in_order',
        ),
        ('[[fault]]\ndo = "drop-answer"\nwait = "2s"', "fault[0].wait: has no meaning for"),
        (
            '[[fault]]\ndo = "exit-after-work"\nwait = "2s"',
            "fault[0].wait: has no meaning on stdio: the client that started this server",
        ),
        ('[[fault]]\ndo = "alter-record"\nfield = "owner"', 'fault[0].field: "owner" is not known; expected "content"'),
        (
            '[[fault]]\ndo = "restart-empty"',
            'fault[0].do: "restart-empty" needs the server\'s files; name them: memory',
        ),
        (
            '[[fault]]\ndo = "http-500"',
            'fault[0].do: "http-500" is a fault of HTTP (--http), but a2m-chaos serves',
        ),
    ],
)
def test_a_mistake_is_named_by_its_place(text: str, sentence: str) -> None:
    assert sentence in mistakes(text)


def test_a_fault_of_stdio_is_refused_over_http() -> None:
    assert '"tear-line" is a fault of stdio, but a2m-chaos serves HTTP' in mistakes(
        '[[fault]]\ndo = "tear-line"', "http"
    )


@pytest.mark.parametrize("name", [kind.name for kind in KINDS.values() if kind.kills or kind.memory])
def test_a_server_at_a_url_cannot_be_ended(name: str) -> None:
    assert f'fault[0].do: "{name}"' in mistakes(f'memory = ["x"]\n[[fault]]\ndo = "{name}"', behind="url")


def test_one_reading_finds_all_mistakes_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text('sead = 1\n[[fault]]\ndo = "hang"\n[[fault]]\ndo = "nap"\n')
    with pytest.raises(PlanError) as refused:
        read_plan(path, front="stdio", behind="command")
    lines = str(refused.value).splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{path}: ") for line in lines)
    assert any("fault[1].do" in line for line in lines)


def test_a_file_that_is_not_there_or_no_toml_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        read_plan(tmp_path / "none.toml", front="stdio", behind="command")
    assert "not valid TOML" in mistakes("[[fault")


# --- the schedule


def done_to(plan: Plan, calls: int, method: str = REMEMBER, message: bytes = b"{}", now: float = 0.0) -> list[int]:
    """Return which of so many calls, counted from 1, a fault is carried out on."""
    schedule = Schedule(plan)
    return [number for number in range(1, calls + 1) if schedule.next(method, message, now) is not None]


def one(**fields: object) -> Plan:
    return Plan(faults=(Fault(do="hang", **fields),))  # type: ignore[arg-type]


def test_the_first_calls_are_left_alone_and_then_it_is_each_so_many() -> None:
    assert done_to(one(after=3), 6) == [4, 5, 6]
    assert done_to(one(after=1, every=2), 6) == [3, 5]
    assert done_to(one(after=1, every=2, times=1), 9) == [3]


def test_only_calls_that_it_can_be_done_to_are_counted() -> None:
    schedule = Schedule(one(methods=(REMEMBER,), having=b"pears", after=1))
    calls = [(REMEMBER, b"pears"), ("memory/recall", b"pears"), (REMEMBER, b"figs"), (REMEMBER, b"pears, again")]
    assert [schedule.next(method, message, 0.0) is not None for method, message in calls] == [False] * 3 + [True]
    assert schedule.counts == [Count(calls=2, done=1)]


def test_it_begins_and_ends_with_time() -> None:
    plan = one(begins=10.0, ends=60.0)
    assert [bool(done_to(plan, 1, now=now)) for now in (0.0, 9.9, 10.0, 59.9, 60.0)] == [
        False,
        False,
        True,
        True,
        False,
    ]


def test_it_is_done_as_long_as_its_file_is_there() -> None:
    there: set[Path] = set()
    schedule = Schedule(one(switch=Path("trouble")), exists=there.__contains__)
    assert schedule.next(REMEMBER, b"", 0.0) is None
    there.add(Path("trouble"))
    assert schedule.next(REMEMBER, b"", 0.0) is not None
    there.clear()
    assert schedule.next(REMEMBER, b"", 0.0) is None
    assert schedule.counts == [Count(calls=1, done=1)]


def test_of_several_that_apply_the_first_is_done_and_all_count() -> None:
    first, second = Fault(do="hang", after=1, times=1), Fault(do="delay")
    schedule = Schedule(Plan(faults=(first, second)))
    came = [schedule.next(REMEMBER, b"", 0.0) for _ in range(3)]
    assert came == [Applied(second, 1), Applied(first, 2), Applied(second, 3)]
    assert schedule.counts == [Count(3, 1), Count(3, 2)]


plans = st.builds(
    lambda faults, seed: Plan(faults=tuple(faults), seed=seed),
    st.lists(
        st.builds(
            Fault,
            do=st.sampled_from(sorted(KINDS)),
            methods=st.sampled_from([(), (REMEMBER,), ("memory/recall", "memory/forget")]),
            having=st.sampled_from([b"", b"a", b"b"]),
            after=st.integers(0, 3),
            every=st.integers(1, 3),
            times=st.none() | st.integers(1, 3),
            chance=st.sampled_from([0.0, 0.3, 1.0]),
        ),
        max_size=4,
    ),
    st.integers(0, 3),
)
calls = st.lists(
    st.tuples(st.sampled_from([REMEMBER, "memory/recall", "memory/forget"]), st.sampled_from([b"a", b"b", b"ab"])),
    max_size=30,
)


def carried_out(plan: Plan, made: Sequence[tuple[str, bytes]], counts: Sequence[Count] = ()) -> tuple[object, ...]:
    schedule = Schedule(plan, counts)
    return [schedule.next(method, message, 0.0) for method, message in made], schedule.counts


@given(plan=plans, made=calls, cut=st.integers(0, 30))
def test_an_interrupted_run_goes_on_from_its_counts(plan: Plan, made: list[tuple[str, bytes]], cut: int) -> None:
    whole, counts = carried_out(plan, made)
    before, kept = carried_out(plan, made[:cut])
    # encoded and decoded, as in the counts file
    read = msgspec.json.decode(msgspec.json.encode(kept), type=list[Count])
    after, at_the_end = carried_out(plan, made[cut:], read)
    assert [*before, *after] == whole  # type: ignore[misc]
    assert at_the_end == counts


@given(plan=plans, made=calls)
def test_a_fault_is_done_only_to_its_calls_and_not_too_often(plan: Plan, made: list[tuple[str, bytes]]) -> None:
    """Checked for any plan."""
    schedule = Schedule(plan)
    done: dict[int, list[int]] = {}
    for method, message in made:
        applied = schedule.next(method, message, 0.0)
        if applied is not None:
            fault = applied.fault
            assert not fault.methods or method in fault.methods
            assert fault.having in message
            assert applied.number > fault.after
            position = next(n for n, each in enumerate(plan.faults) if each is fault)
            done.setdefault(position, []).append(applied.number)
    for position, numbers in done.items():
        assert len(numbers) <= (plan.faults[position].times or len(made))
        assert numbers == sorted(set(numbers))


def test_chance_is_the_seeds_and_as_likely_as_it_says() -> None:
    runs = {seed: done_to(msgspec.structs.replace(one(chance=0.25), seed=seed), 400) for seed in range(5)}
    assert all(60 < len(numbers) < 140 for numbers in runs.values())
    assert len({tuple(numbers) for numbers in runs.values()}) == 5
    assert runs == {seed: done_to(msgspec.structs.replace(one(chance=0.25), seed=seed), 400) for seed in range(5)}


def test_two_faults_of_a_plan_do_not_throw_the_same_dice() -> None:
    plan = Plan(faults=(Fault(do="hang", methods=("a",), chance=0.5), Fault(do="hang", methods=("b",), chance=0.5)))
    assert done_to(plan, 50, "a") != done_to(plan, 50, "b")
