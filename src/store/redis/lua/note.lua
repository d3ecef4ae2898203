-- Adds to the history of a record, as `noted` in side-ports.ts does. It expires with its record. body a line for each note: tag, count,
-- ages of the first and the last event, text Returns 4, or 5 if there is no such record
if op == 'n' then
  if not lives(redis.call('GETRANGE', key, 0, 55)) then return 5 end
  local history = key:sub(1, own) .. 'h:' .. key:sub(own + 3)
  for tag, count, first_ago, last_ago, line in body:gmatch('(%S+) (%d+) (%-?%d+) (%-?%d+) ([^\n]*)\n') do
    local first = now - first_ago
    local newest = redis.call('LINDEX', history, -1) or ''
    local tag_before, before, since = newest:match('^(%S+) (%d+) (%d+) ')
    if tag_before == tag then
      count, first = count + before, tonumber(since)
      redis.call('RPOP', history)
    end
    redis.call('RPUSH', history, string.format('%s %.0f %.0f %.0f ', tag, count, first, now - last_ago) .. line)
    if redis.call('LLEN', history) > 50 then
      redis.call('LSET', history, 10, '')
      redis.call('LREM', history, 1, '')
    end
  end
  redis.call('PEXPIREAT', history, redis.call('PEXPIRETIME', key))
  return 4
end
