"""The commands that consist of one call: parameters from the command line, the result shown."""

from msgspec import UNSET

from a2m_router.command import showing
from a2m_router.command.reaching import Unusable
from a2m_router.command.running import DONE, FAILED, NOTHING, Running, say
from a2m_router.command.streams import Streams
from a2m_router.protocol.client.results import Recalled


async def describe(run: Running) -> int:
    described = await run.memory.describe()
    await run.show(lambda: showing.description(described))
    return DONE


async def remember(run: Running) -> int:
    options = run.options
    if options.if_revision is not UNSET and options.key is None:
        raise Unusable("remember: --if-revision needs --key, the key whose revision is checked")
    text: str = options.text
    if text == "-":
        text = await _whole(run.streams)
    ids = await run.memory.remember(
        text,
        session=options.session,
        tier=options.tier,
        key=options.key,
        role=options.role,
        group=options.group,
        id=options.id,
        uri=options.uri,
        media_type=options.media_type,
        metadata=options.metadata,
        if_revision=options.if_revision,
    )
    await run.show(lambda: showing.plain("\n".join(ids)).encode() + b"\n")
    return DONE


async def recall(run: Running) -> int:
    options = run.options
    found = await run.memory.recall(
        options.query,
        limit=options.limit,
        tier=options.tier,
        where=options.where,
        key_prefix=options.key_prefix,
        prompt=options.prompt or None,
    )
    return await _show_found(run, found)


async def timeline(run: Running) -> int:
    options = run.options
    found = await run.memory.timeline(
        session=options.session,
        limit=options.limit,
        tier=options.tier,
        where=options.where,
        key_prefix=options.key_prefix,
    )
    return await _show_found(run, found)


async def _show_found(run: Running, found: Recalled) -> int:
    for down in found.degraded:
        say(f"records of the tier {down.tier!r} may be missing: {down.reason}")
    prompt = found.prompt
    await run.show(lambda: showing.records(found.records) if prompt is None else showing.plain(prompt).encode() + b"\n")
    if getattr(run.options, "prompt", False) and prompt is None:
        say("the server does not support --prompt; the records are shown instead")
    return DONE if found.records else _nothing("no record was found")


async def fetch(run: Running) -> int:
    key: str = run.options.key
    record = await run.memory.fetch(key)
    await run.show(lambda: b"" if record is None else showing.record(record))
    if record is not None:
        return DONE
    nothing = f"there is no record at the key {key!r}"
    mount, slash, _ = key.partition("/")
    described = await run.memory.describe() if slash else None
    if described is not None and any(tier.name == mount and tier.mount for tier in described.tiers or ()):
        nothing += f"; it looks like the id of a record of the mount {mount!r}, and fetch takes a key"
    return _nothing(nothing)


async def forget(run: Running) -> int:
    options = run.options
    named = ("query", "tier", "key_prefix", "where")
    chosen = {name.replace("_", " "): value for name in named if (value := getattr(options, name)) is not None}
    if not chosen and not options.ids:
        raise Unusable("forget: expected ids, --query, --tier, --key-prefix or --where")
    if chosen and not options.yes:
        which = " and ".join(f"{name} {value!r}" for name, value in chosen.items())
        if not run.streams.asks:
            raise Unusable(
                f"forget: this deletes every record with {which}; add --yes, because there is no terminal to ask on"
            )
        answer = await run.streams.answer(f"Forget every record with {showing.plain(which)}? [y/N]")
        if answer.lower() not in ("y", "yes"):
            say("no record was forgotten")
            return FAILED
    forgotten = await run.memory.forget(
        options.ids or None,
        query=options.query,
        tier=options.tier,
        where=options.where,
        key_prefix=options.key_prefix,
    )
    await run.show(lambda: f"{forgotten:,} forgotten\n".encode())
    return DONE


async def promote(run: Running) -> int:
    options = run.options
    promoted = await run.memory.promote(options.ids, options.tier, salience=options.salience)
    await run.show(lambda: f"{promoted:,} promoted\n".encode())
    return DONE


async def reinforce(run: Running) -> int:
    reinforced = await run.memory.reinforce(run.options.ids, amount=run.options.amount)
    await run.show(lambda: f"{reinforced:,} reinforced\n".encode())
    return DONE


async def sessions(run: Running) -> int:
    found = await run.memory.sessions()
    await run.show(lambda: showing.sessions(found) or b"there are no conversations\n")
    return DONE


async def close(run: Running) -> int:
    closed = await run.memory.close_session(run.options.session)
    await run.show(lambda: showing.consolidated(closed))
    return DONE


async def consolidate(run: Running) -> int:
    did = await run.memory.consolidate()
    await run.show(lambda: showing.consolidated(did))
    return DONE


async def summarize(run: Running) -> int:
    options = run.options
    if not options.ids and (options.query, options.tier, options.where, options.key_prefix) == (None,) * 4:
        raise Unusable("summarize: expected ids, --query, --tier, --key-prefix or --where")
    summary = await run.memory.summarize(
        options.ids or None,
        query=options.query,
        tier=options.tier,
        where=options.where,
        key_prefix=options.key_prefix,
        limit=options.limit,
        into=options.into,
        key=options.key,
    )
    counted = f"{summary.read:,} read, {summary.written:,} written\n".encode()
    await run.show(lambda: showing.records(summary.records) + counted)
    return DONE


async def _whole(streams: Streams) -> str:
    """Return the whole of stdin, without the line break at its end."""
    data = b"".join([chunk async for chunk in streams.chunks()])
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as problem:
        raise Unusable(f"stdin: not valid UTF-8 at byte {problem.start}") from None


def _nothing(sentence: str) -> int:
    say(sentence)
    return NOTHING
