import anyio

from a2m_router import open_federation


async def main():
    async with open_federation("federation.toml", on_notification=print) as memory:
        await memory.subscribe(kinds=["written"])
        await memory.in_session("chat-1").remember("The spade is in the shed.", role="user")
        # {'kind': 'written', 'at': '2026-11-30T01:15:33.483Z', 'id': '01a2…', 'tier': 'working', 'session': 'chat-1'}
        for record in (await memory.timeline(session="chat-1")).records:
            print(record.created_at, record.content)


anyio.run(main)
