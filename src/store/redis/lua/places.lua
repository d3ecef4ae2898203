-- Reads the index of a shard, which is the key: ids, each with the instant at which it is due; those of responses come after all instants.
-- Returns 7, how many texts, and them: id and instant in turn
if op == 'i' or op == 'l' then
  -- Due by now: of responses or not, at most that many. Listed: from that instant on, without so many, at most that many; no responses.
  local bodies, limit = unpacked('>BI6', head, 2)
  local from, to, offset = bodies * 281474976710656, bodies * 281474976710656 + now, 0
  if op == 'l' then
    from, offset, limit = unpacked('>I6I6I6', head, 2)
    to = 281474976710655
  end
  return 7, redis.call('ZRANGEBYSCORE', key, from, to, 'WITHSCORES', 'LIMIT', offset, limit)
end
