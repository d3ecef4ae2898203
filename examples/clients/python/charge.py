"""Creates one charge, however often it has to ask: python3 charge.py AMOUNT KEY

What it reads from the environment and what its exit codes mean is in docs/clients.md. Nothing but the standard library.
"""

import http.client
import json
import os
import random
import sys
import time
import urllib.error
import urllib.request

URL = os.environ.get("URL", "http://127.0.0.1:8080/v1/charges")
TRIES = int(os.environ.get("TRIES", "6"))
PAUSE = float(os.environ.get("PAUSE", "1"))


def verdict(status, headers, body):
    """(final, seconds): whether it is the last word, and else how long to wait; None: choose."""
    after = headers.get("Retry-After", "")
    again = (False, int(after) if after.isdigit() else None)
    # The proxy's own answers say what is safe: the same request under the same key, or not.
    if headers.get("Content-Type") == "application/problem+json":
        return again if json.loads(body).get("retry") == "same-key" else (True, None)
    # A stored answer comes back the same however often it is asked for.
    if "Idempotent-Replayed" in headers:
        return (True, None)
    return again if status in (408, 409, 425, 429) or status >= 500 else (True, None)


def ask(amount, key):
    """One try: status, headers, body. Raises where there is no whole answer."""
    request = urllib.request.Request(
        URL,
        data=f"amount={amount}&currency=eur&source=tok_visa".encode(),
        headers={
            "Authorization": "Bearer sk_test_example",
            "Content-Type": "application/x-www-form-urlencoded",
            "Idempotency-Key": key,
        },
    )
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        response = error
    with response:
        body = response.read()
        # http.client takes a head that breaks off for a whole one, and what has no length for empty.
        if "Content-Length" not in response.headers and "Transfer-Encoding" not in response.headers:
            raise http.client.HTTPException("the head broke off")
        return response.status, response.headers, body.decode()


def charge(amount, key):
    """(final, status, body) of the last answer. Keep the key with the order: whoever calls this again needs the same one."""
    last = (False, 0, "no answer")
    for n in range(TRIES):
        wait = None
        try:
            status, headers, body = ask(amount, key)
            final, wait = verdict(status, headers, body)
            last = (final, status, body)
            if final:
                return last
        except (OSError, http.client.HTTPException) as error:
            print(f"try {n + 1}: {error!r}", file=sys.stderr)
        if n + 1 < TRIES:
            # Twice as long each time, and never all clients at once.
            time.sleep(PAUSE * 2**n * random.uniform(0.5, 1) if wait is None else wait)
    return last


final, status, body = charge(sys.argv[1], sys.argv[2])
charged = final and status < 300
print(body, file=sys.stdout if charged else sys.stderr)
sys.exit(0 if charged else 1 if final else 2)
