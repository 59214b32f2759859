"""service.py HOST:PORT: the handbook as a JSON endpoint, in the place of your own search service."""

import json
import sys
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import handbook


class Service(BaseHTTPRequestHandler):
    def do_POST(self):  # /search
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(handbook.search(asked["q"], asked["k"]))

    def do_GET(self):  # /search?q=tea&k=3, and /all
        address = urlsplit(self.path)
        asked = parse_qs(address.query)
        search = address.path == "/search"
        self.answer(handbook.search(asked["q"][0], int(asked["k"][0])) if search else handbook.everything())

    def answer(self, pages):
        items = [
            {"ref": page["id"], "text": page["content"], "when": page.get("created_at"), **page["metadata"]}
            for page in pages
        ]
        body = json.dumps({"data": {"items": items}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


host, _, port = sys.argv[1].partition(":")
server = HTTPServer((host, int(port)), Service)
print(f"listens on http://{sys.argv[1]}/", flush=True)
with suppress(KeyboardInterrupt):
    server.serve_forever()
