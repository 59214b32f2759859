"""Records that refer to external content (§3.8)."""

import socket
import time

from a2m_router.conformance.checking import Target, check, expect, ids_of


@check("3.8-1", "3.8.1-1", needs="external")
def a_uri_comes_back_unchanged(target: Target) -> None:
    for uri, media_type in (
        ("https://files.example/a%20b/%7Ec?q=1&r=%C3%A9#part", "application/pdf; charset=UTF-8"),
        ("HTTP://Example.COM:80/../x/./y", "Image/PNG"),
        ("urn:isbn:0451450523", None),
        ("file:///no/such/path", "text/plain"),
    ):
        fields = {"uri": uri} if media_type is None else {"uri": uri, "media_type": media_type}
        (id,) = target.remember(target.note(**fields))
        record = target.read(id)
        came = record.get("uri"), record.get("media_type")
        expect(
            came == (uri, media_type), f"uri and media_type were written as {(uri, media_type)} and came back as {came}"
        )


@check("3.8-a", needs="external")
def a_uri_may_be_without_words(target: Target) -> None:
    uri = f"https://files.example/{target.word()}.png"
    (id,) = target.remember({"uri": uri, "metadata": target.mine})
    record = target.read(id)
    expect(
        record.get("uri") == uri, f"a record with a uri and no content: expected uri {uri!r}, got {record.get('uri')!r}"
    )
    expect(
        record.get("content", "") == "", f"a record without content: expected it empty, got {record.get('content')!r}"
    )
    found = ids_of(target.records("recall", where=target.mine, limit=3))
    expect(found == [id], f"memory/recall by the metadata of a record without content: expected {[id]}, got {found}")


@check("3.8-a", needs=("external", "keys"))
def a_uri_may_be_found_by_its_key(target: Target) -> None:
    key, uri = target.word(), f"https://files.example/{target.word()}"
    target.remember({"uri": uri, "key": key, "metadata": target.mine})
    record = target.ask("fetch", key=key).get("record") or {}
    expect(record.get("uri") == uri, f"memory/fetch of {key!r}: expected uri {uri!r}, got {record.get('uri')!r}")


@check("3.8.1-2", needs="external")
def a_uri_is_never_fetched(target: Target) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        note = target.note(uri=f"http://127.0.0.1:{port}/{target.word()}", media_type="text/html")
        target.remember(note)
        target.recall(note["content"])
        target.timeline()
        if "tiers" in target.capabilities:
            target.ask("consolidate")
        time.sleep(0.2)
        listening.settimeout(0.05)
        try:
            listening.accept()[0].close()
        except TimeoutError:
            return
        expect(False, f"{note['uri']} was written: expected no fetch of it, got a connection")
