-- Adds to the history of a record, as noting.ts. It expires with the record.
-- KEYS  1 record, 2 history
-- ARGV  1 skew, then for each note: tag, count, how long ago the first and the last was, text
-- Returns 1, or 0 where there is no record
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[1]
local head = redis.call('GETRANGE', KEYS[1], 0, 55)
if #head < 56 or head:sub(1, 3) ~= 'IP\1' or struct.unpack('>I6', head, 51) <= now then return 0 end

for i = 2, #ARGV, 5 do
  local count, first = tonumber(ARGV[i + 1]), now - ARGV[i + 2]
  local newest = redis.call('LINDEX', KEYS[2], -1) or ''
  local tag, before, since = newest:match('^(%S+) (%d+) (%d+) ')
  if tag == ARGV[i] then
    count, first = count + before, tonumber(since)
    redis.call('RPOP', KEYS[2])
  end
  redis.call('RPUSH', KEYS[2],
    string.format('%s %.0f %.0f %.0f ', ARGV[i], count, first, now - ARGV[i + 3]) .. ARGV[i + 4])
  if redis.call('LLEN', KEYS[2]) > 50 then
    redis.call('LSET', KEYS[2], 10, '')
    redis.call('LREM', KEYS[2], 1, '')
  end
end
redis.call('PEXPIREAT', KEYS[2], redis.call('PEXPIRETIME', KEYS[1]))
return 1
