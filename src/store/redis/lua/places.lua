-- Reads the index of a shard (the key): ids, each with its due instant. Those of responses that end before their records sort last. Returns
-- 7, the number of strings, the strings: id and instant alternate
if op == 'i' or op == 'l' then
  -- `i`: due by now, of responses or of records, up to a limit. `l`: records from an instant on, with an offset and a limit.
  local bodies, limit = unpacked('>BI6', head, 2)
  local from, to, offset = bodies * 281474976710656, bodies * 281474976710656 + now, 0
  if op == 'l' then
    from, offset, limit = unpacked('>I6I6I6', head, 2)
    to = 281474976710655
  end
  return 7, redis.call('ZRANGEBYSCORE', key, from, to, 'WITHSCORES', 'LIMIT', offset, limit)
end
