"""The Redis sink of docs/write-your-own-sink.md: the newest row of each key, in one hash."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias

import pyarrow as pa

from onceflow import connectors

Reply: TypeAlias = "bytes | int | list[Reply] | None"

CLAIM = """
-- KEYS: owner     ARGV: log id, attempt
local held = redis.call('HMGET', KEYS[1], 'log', 'attempt')
if held[1] and held[1] ~= ARGV[1] then return 0 end
if tonumber(held[2] or '0') >= tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], 'log', ARGV[1], 'attempt', ARGV[2])
return 1
"""
APPLY = """
-- KEYS: proofs, floor, table     ARGV: transaction, checkpoint, then key and row of each row
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return 0 end
if tonumber(ARGV[2]) < tonumber(redis.call('GET', KEYS[2]) or '0') then return 0 end
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""
FORGET = """
-- KEYS: proofs, floor     ARGV: before
local floor = math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[1]))
redis.call('SET', KEYS[2], floor)
local proofs = redis.call('HGETALL', KEYS[1])
for i = 1, #proofs, 2 do
    if tonumber(proofs[i + 1]) < floor then redis.call('HDEL', KEYS[1], proofs[i]) end
end
"""


@dataclass(frozen=True)
class RedisSink(connectors.StagedSink):
    """Keeps the newest row of each `key` in the hash `table`."""

    host: str
    port: int
    table: str
    key: str
    apply_script: str = APPLY

    def routing_key(self) -> tuple[str, ...]:
        return (self.key,)

    def open(self, context: connectors.CommitterContext, schema: pa.Schema) -> None:
        owner = f"{context.sink_id}:owner"
        if not self.ask("EVAL", CLAIM, 1, owner, context.log_id, context.attempt):
            raise connectors.Fenced(f"{context.sink_id} is another job's, or a newer attempt's")

    def apply(self, transaction: connectors.TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
        sent: list[str | int] = []
        for row in (row for batch in rows for row in batch.to_pylist()):
            sent += [row[self.key], json.dumps(row)]
        sink_id = transaction.sink_id
        keys = [f"{sink_id}:proofs", f"{sink_id}:floor", self.table]
        sent = [str(transaction), transaction.checkpoint, *sent]
        return self.ask("EVAL", self.apply_script, len(keys), *keys, *sent) == 1

    def is_applied(self, transaction: connectors.TransactionId) -> bool:
        return self.ask("HEXISTS", f"{transaction.sink_id}:proofs", str(transaction)) == 1

    def forget(self, sink_id: str, before: connectors.CheckpointId) -> None:
        self.ask("EVAL", FORGET, 2, f"{sink_id}:proofs", f"{sink_id}:floor", before)

    def ask(self, *command: str | int) -> Reply:
        """Return what Redis answers to one command, on a connection of its own.

        Raises:
            SinkError: It refused, or did not answer.
        """
        words = [str(word).encode() for word in command]
        sent = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
        try:
            with (
                closing(socket.create_connection((self.host, self.port), timeout=30)) as connection,
                connection.makefile("rb") as replies,
            ):
                connection.sendall(b"*%d\r\n%s" % (len(words), sent))
                return _reply(replies)
        except OSError as error:
            raise connectors.SinkError(f"Redis at {self.host}:{self.port}: {error}") from error


def _reply(replies: BinaryIO) -> Reply:
    line = replies.readline()
    kind, text = line[:1], line[1:-2]
    match kind:
        case b"+":
            return text
        case b":":
            return int(text)
        case b"$":
            return None if text == b"-1" else replies.read(int(text) + 2)[:-2]
        case b"*":
            return [_reply(replies) for _ in range(int(text))]
        case _:
            raise connectors.SinkError(f"Redis answered {line!r}")
