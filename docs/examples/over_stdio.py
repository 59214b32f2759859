import json
import subprocess

with subprocess.Popen(
    ["a2m-router", "--log-level", "warning"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
) as router:

    def call(method, **params):
        line = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        router.stdin.write(line.encode() + b"\n")
        router.stdin.flush()
        return json.loads(router.stdout.readline())["result"]  # the answer, before the next call

    walnuts = {"content": "Walnuts make me sneeze.", "role": "user"}
    call("memory/remember", session="chat-2", owner="alice", records=[walnuts])
    print(call("memory/recall", query="walnuts", owner="alice")["records"][0]["content"])  # Walnuts make me sneeze.
    print(call("memory/recall", query="walnuts", owner="bob"))  # {'records': []}
    router.stdin.close()
