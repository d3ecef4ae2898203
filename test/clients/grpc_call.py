"""Calls a method of raw bytes with Debian's python3-grpcio: grpc_call.py ADDRESS KEY MESSAGE [gzip]. Prints code, message and metadata as JSON."""
import json
import sys

import grpc

address, key, message, *compression = sys.argv[1:]
options = {"compression": grpc.Compression.Gzip} if compression else {}


def same(value):
    return value


def text(pairs):
    return {name: value if isinstance(value, str) else value.hex() for name, value in pairs or ()}


with grpc.insecure_channel(address, **options) as channel:
    call = channel.unary_unary("/shop.Payments/Create", request_serializer=same, response_deserializer=same)
    metadata = (("idempotency-key", key),) if key else ()
    try:
        answer, ended = call.with_call(message.encode(), metadata=metadata, timeout=20)
        told = {"code": ended.code().name, "message": answer.decode(), "details": ended.details()}
    except grpc.RpcError as error:
        ended = error
        told = {"code": error.code().name, "message": None, "details": error.details()}
    told["metadata"] = text(ended.initial_metadata())
    told["trailers"] = text(ended.trailing_metadata())
    print(json.dumps(told))
