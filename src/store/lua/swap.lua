-- Replaces a record under a condition, else gives back what is there.
-- KEYS  1 record, 2 index of unresolved records in its shard, 3 epoch of the shard
-- ARGV  1 id, 2 bytes, 3 dueIn, 4 dropIn, 5 skew, 6 fence increment,
--       7 expected version, or '' and then 8 expected token, 9 bytes of the expected states; 10 grace,
--       11 what the proxy has seen, 12 identity, 13 number
-- Returns {1, now, version, fence, createdAt, number}, {0, now, bytes or nil, number}, or {2, now, since, left, number}: held
local number = tonumber(ARGV[#ARGV])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[5]

local head = redis.call('GETRANGE', KEYS[1], 0, 55)
if #head < 56 or head:sub(1, 3) ~= 'IP\1' then return {0, now, redis.call('GET', KEYS[1]), number} end
local version, fence = struct.unpack('>I6I6', head, 5)
local created = struct.unpack('>I6', head, 33)
if struct.unpack('>I6', head, 51) <= now then return {0, now, false, number} end

local holds
if ARGV[7] ~= '' then
  holds = version == tonumber(ARGV[7])
else
  holds = head:sub(17, 32) == ARGV[8] and ARGV[9]:find(head:sub(4, 4), 1, true)
end
if not holds then return {0, now, redis.call('GET', KEYS[1]), number} end
if ARGV[6] ~= '0' then
  -- The state that allows it may be an old one, to which a failover went back.
  local left, since = held_for(KEYS[3], ARGV[12], ARGV[11], ARGV[10], now, false)
  if type(left) == 'table' then return left end
  if left > 0 then return {2, now, since, left, number} end
end

local bytes, due = ARGV[2], now + ARGV[3]
version, fence = version + 1, math.max(fence + ARGV[6], (struct.unpack('>I6', bytes, 11)))
local value = struct.pack('>c4I6I6c16I6I6I6I6', bytes, version, fence, bytes:sub(17, 32), created, now, due, now + ARGV[4])
  .. bytes:sub(57)
redis.call('SET', KEYS[1], value, 'PX', math.max(1, ARGV[4]))

local state = bytes:byte(4)
if state == 1 or state == 4 then
  redis.call('ZADD', KEYS[2], due, ARGV[1])
elseif state == 2 and (bytes:byte(61) or 0) % 8 > 3 then
  -- Its response ends before it: behind all instants.
  redis.call('ZADD', KEYS[2], string.format('%.0f', 281474976710656 + due), ARGV[1])
else
  redis.call('ZREM', KEYS[2], ARGV[1])
end
-- Refused where the user has no right to channels, or an old server knows none: the write stands.
if state ~= 1 then redis.pcall('SPUBLISH', KEYS[2]:sub(1, -2) .. 'c:' .. ARGV[1], '') end
return {1, now, version, fence, created, number}
