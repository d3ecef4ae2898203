"""The same as orchestrator.ts, in Python with its standard library alone."""

import json
import os
import signal
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STEPS = ["reserve", "charge", "confirm", "notify"]


class Unsettled(Exception):
    """A step neither done nor refused as far as anybody knows: nothing may follow it, and the same request may be sent again."""


class Booking:
    """One attempt at the whole; `demo` tells a part where to die."""

    def __init__(self, record, demo):
        self.record = record
        self.demo = demo

    def run(self, order):
        done = {}
        for step in STEPS:
            answer = self.call(step, step, order)
            if answer is None:
                for earlier, made in reversed(done.items()):
                    self.undo(earlier, made["id"])
                return 424, {"state": "cancelled", "refused": step}
            done[step] = answer
        return 201, {"state": "booked", **done}

    def undo(self, step, made):
        if self.call(step, f"undo-{step}", {"id": made}) is None:
            raise Unsettled(f"undo-{step} was refused: a person has to look at {step} {made}")

    def call(self, step, action, body):
        """What was done; None: it was refused."""
        status, headers, text = self.post(step, action, body)
        # A refusal counts once it is stored: then every repetition meets it, and takes the same way. The second answer tells.
        if 400 <= status < 500:
            status, headers, text = self.post(step, action, body)
        if self.demo == f"SIGKILL orchestrator after {action}":
            os.kill(os.getpid(), signal.SIGKILL)
        if 200 <= status < 300:
            return json.loads(text)
        if status < 500 and headers.get("Idempotent-Replayed") == "true":
            return None
        raise Unsettled(f"{action}: {status} {text}")

    def post(self, step, action, body):
        headers = {
            "Idempotency-Key": f"{self.record}.{action}",
            "Content-Type": "application/json",
            "X-Demo": self.demo,
        }
        url = f"{os.environ[step.upper() + '_URL']}/{action}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=15) as response:
                return response.status, response.headers, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read().decode()
        except Exception as error:
            raise Unsettled(f"{action}: {error}") from error


class Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        record = self.headers["Idempotency-Record"]
        if record is None:
            return self.answer(400, {"error": "this API is called through its proxy"})
        try:
            order = json.loads(body)
        except ValueError as error:
            return self.answer(400, {"error": str(error)})
        try:
            self.answer(*Booking(record, self.headers["X-Demo"] or "").run(order))
        except Unsettled as error:
            # With `Retry-After`, 503 says to the proxy that the same request may be executed again.
            self.answer(503, {"error": str(error)}, {"Retry-After": "1"})

    def answer(self, status, body, headers={}):
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "3000"))), Api)
print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
