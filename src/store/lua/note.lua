-- Adds to the histories of records, as history.ts. Each expires with its record.
-- KEYS  for each record: the record, its history
-- ARGV  1 skew, then for each record: how many notes, and of each note: tag, count, how long ago the first and the last was, text; last number
-- Returns for each record 1, or 0 where there is no such record; then number
local number = tonumber(ARGV[#ARGV])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[1]
local at, done = 2, {}

local function note(record, history, first_arg, last_arg)
  -- A key of another type is no record of ours, and no reason to lose the notes of others.
  local head = redis.pcall('GETRANGE', record, 0, 55)
  if type(head) ~= 'string' or #head < 56 or head:sub(1, 3) ~= 'IP\1' or struct.unpack('>I6', head, 51) <= now then return 0 end
  for i = first_arg, last_arg, 5 do
    local count, first = tonumber(ARGV[i + 1]), now - ARGV[i + 2]
    local newest = redis.call('LINDEX', history, -1) or ''
    local tag, before, since = newest:match('^(%S+) (%d+) (%d+) ')
    if tag == ARGV[i] then
      count, first = count + before, tonumber(since)
      redis.call('RPOP', history)
    end
    redis.call('RPUSH', history,
      string.format('%s %.0f %.0f %.0f ', ARGV[i], count, first, now - ARGV[i + 3]) .. ARGV[i + 4])
    if redis.call('LLEN', history) > 50 then
      redis.call('LSET', history, 10, '')
      redis.call('LREM', history, 1, '')
    end
  end
  redis.call('PEXPIREAT', history, redis.call('PEXPIRETIME', record))
  return 1
end

for i = 1, #KEYS, 2 do
  local last = at + 5 * ARGV[at]
  done[#done + 1] = note(KEYS[i], KEYS[i + 1], at + 1, last)
  at = last + 1
end
done[#done + 1] = number
return done
