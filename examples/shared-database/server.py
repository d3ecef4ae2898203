"""The same API as server.ts, in Python with psycopg2 (Debian: python3-psycopg2)."""

import json
import os
import secrets
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import psycopg2

URL = os.environ.get("DATABASE_URL", "postgres://charges_api@127.0.0.1:5432/charges")
STALE = "IP002"  # the attempt was overtaken, or ended by somebody else
HEADERS = [["Content-Type", "application/json"]]


class Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        amount = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["amount"]
        record = self.headers["Idempotency-Record"]
        fence = self.headers["Idempotency-Fence"]

        self.at("received")
        made = {"id": "ch_" + secrets.token_urlsafe(9), "amount": amount}
        body = json.dumps(made).encode()
        connection = psycopg2.connect(URL)
        is_committing = False
        try:
            # Its first statement begins the transaction.
            cursor = connection.cursor()
            cursor.execute("INSERT INTO charges (id, amount, record) VALUES (%s, %s, %s)", (made["id"], amount, record))
            self.at("charged")
            cursor.execute(
                "SELECT idempotency.complete(%s, %s, %s, %s, %s)",
                (record, fence, 201, json.dumps(HEADERS), psycopg2.Binary(body)),
            )
            (ended,) = cursor.fetchone()
            self.at("ended")
            is_committing = True
            # Not ended now: this very answer was committed before, and must not be charged for once more.
            connection.commit() if ended else connection.rollback()
        except psycopg2.Error as error:
            print(f"attempt {fence} of {record}: {error}", flush=True)
            # Nobody knows whether that was committed. The proxy will find out.
            if is_committing:
                self.close_connection = True
                return
            self.answer(409 if error.pgcode == STALE else 503, {"error": "not charged"}, "not-applied")
            return
        finally:
            # What is not committed is rolled back.
            connection.close()
        # Only now: what is recorded is the answer, whatever becomes of this one.
        self.at("committed")
        self.answer(201, made)

    def do_GET(self):
        """What became of a record, for the proxy."""
        record = parse_qs(urlsplit(self.path).query).get("record", [""])[0]
        connection = psycopg2.connect(URL)
        try:
            cursor = connection.cursor()
            cursor.execute("SELECT id, amount FROM charges WHERE record = %s", (record,))
            found = cursor.fetchone()
        finally:
            connection.close()
        if found:
            self.answer(200, {"id": found[0], "amount": found[1], "record": record})
        else:
            self.answer(404, {"error": "no charge"})

    def answer(self, status, body, outcome=None):
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in HEADERS:
            self.send_header(name, value)
        if outcome:
            self.send_header("Idempotency-Outcome", outcome)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def at(self, step):
        """`X-Demo: SIGKILL at charged`: what happens to this process, and where."""
        wanted, _, where = self.headers.get("X-Demo", "  ").split(" ")
        if where == step:
            signal.pthread_kill(threading.get_ident(), signal.Signals[wanted])

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "3000"))), Api)
print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
