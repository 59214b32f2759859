"""A retrieval service: a function that finds pages, and one that lists all of them."""

PAGES = [
    {
        "id": "pay",
        "content": "Expenses are paid on the 15th.",
        "created_at": "2024-05-01",
        "metadata": {"team": "finance"},
    },
    {
        "id": "doors",
        "content": "The office opens at eight.",
        "created_at": "2023-11-20",
        "metadata": {"team": "people"},
    },
    {"id": "tea", "content": "Tea is in the kitchen.", "metadata": {"team": "people"}},
]


def search(query, limit):
    words = set(query.lower().split())
    shared = {page["id"]: len(words & set(page["content"].lower().split())) for page in PAGES}
    found = [page for page in PAGES if shared[page["id"]]]
    return sorted(found, key=lambda page: -shared[page["id"]])[:limit]


def everything():
    return PAGES
