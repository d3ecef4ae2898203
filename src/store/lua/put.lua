-- Claims: writes a record where nothing is, else gives back what is there.
-- KEYS  1 record, 2 index of unresolved records in its shard, 3 epoch of the shard
-- ARGV  1 id, 2 bytes, 3 dueIn, 4 dropIn, 5 skew, 6 '0' a claim, '1' one of a fresh key, '2' a record that is written again,
--       7 grace, 8 what the proxy has seen, 9 identity, 10 number
-- Returns {1, now, version, fence, createdAt, number}, {0, now, bytes, number}, or {2, now, since, left, number}: held
local number = tonumber(ARGV[#ARGV])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[5]
local bytes, ttl, due = ARGV[2], math.max(1, ARGV[4]), now + ARGV[3]

local fence = struct.unpack('>I6', bytes, 11)
local created = struct.unpack('>I6', bytes, 33)
if fence == 0 then fence = now end
if created == 0 then created = now end
local value = struct.pack('>c4I6I6c16I6I6I6I6', bytes, now, fence, bytes:sub(17, 32), created, now, due, now + ARGV[4])
  .. bytes:sub(57)

local function live(stored)
  return #stored < 56 or stored:sub(1, 3) ~= 'IP\1' or struct.unpack('>I6', stored, 51) > now
end

local left, since = held_for(KEYS[3], ARGV[9], ARGV[8], ARGV[7], now, ARGV[6] == '2')
if type(left) == 'table' then return left end
if left > 0 and ARGV[6] == '0' then
  local stored = redis.call('GET', KEYS[1])
  if stored and live(stored) then return {0, now, stored, number} end
  return {2, now, since, left, number}
end

local old = redis.pcall('SET', KEYS[1], value, 'NX', 'GET', 'PX', ttl)
if type(old) == 'table' then
  -- A full store refuses new claims, and still answers from what it has.
  local stored = old.err:sub(1, 3) == 'OOM' and redis.call('GET', KEYS[1])
  if stored and live(stored) then return {0, now, stored, number} end
  return old
end
if old then
  if live(old) then return {0, now, old, number} end
  redis.call('SET', KEYS[1], value, 'PX', ttl)
end

local state = bytes:byte(4)
if state == 1 or state == 4 then
  redis.call('ZADD', KEYS[2], due, ARGV[1])
elseif state == 2 and (bytes:byte(61) or 0) % 8 > 3 then
  -- Its response ends before it: behind all instants.
  redis.call('ZADD', KEYS[2], string.format('%.0f', 281474976710656 + due), ARGV[1])
elseif old then
  redis.call('ZREM', KEYS[2], ARGV[1])
end
-- Refused where the user has no right to channels, or an old server knows none: the write stands.
if state ~= 1 then redis.pcall('SPUBLISH', KEYS[2]:sub(1, -2) .. 'c:' .. ARGV[1], '') end
return {1, now, now, fence, created, number}
