"""A peer that does no work and says so quickly; the model's path tells it how to misbehave."""

import json
import sys
import time

manner = ""
print("a library's greeting", file=sys.stderr)
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "quit":
        break
    if request["op"] == "load":
        manner = request["model"].rpartition("-")[2]
        answer = {"ok": True, "name": f"fake 1.0 {request['dtype']}"}
        if manner == "unloadable":
            answer = {"ok": False, "error": "no such model"}
    else:
        count = len(request["prompts"]) * request["num_tokens"]
        assert len({len(prompt) for prompt in request["prompts"]}) == 1
        answer = {"ok": True, "first_token": 0.5, "total": 1.5, "num_tokens": count}
        if manner == "crash":
            print("a dreadful thing happened", file=sys.stderr)
            sys.exit(3)
        if manner == "silent":
            time.sleep(60)
        if manner == "lazy":
            answer["num_tokens"] -= 1
        if manner == "babble":
            print("hello", flush=True)
    print(json.dumps(answer), flush=True)
