from a2m_router import A2MError, blocking

with blocking.connect("http://127.0.0.1:8778/") as memory:
    while True:
        page = memory.fetch("garden/pears")
        text, revision = ("", None) if page is None else (page.content, page.revision)
        try:
            memory.remember(f"{text}\nAda: one bears fruit.", key="garden/pears", if_revision=revision)
            break
        except A2MError as error:
            if (error.data or {}).get("reason") != "revision":
                raise
            # another client changed the page in between: read it again, and repeat the edit
