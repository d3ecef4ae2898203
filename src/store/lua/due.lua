-- Confirms a member of the index: a record may have expired, which tells the index nothing.
-- KEYS  1 record, 2 index of unresolved records in its shard
-- ARGV  1 id, 2 skew, 3 number
-- Returns {1, number} if the record is there, else {0, number} and a member without a record is removed
local number = tonumber(ARGV[#ARGV])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[2]
local head = redis.call('GETRANGE', KEYS[1], 0, 55)
if #head > 0 then
  -- Not of this schema: a later release knows what to do with it.
  if #head < 56 or head:sub(1, 3) ~= 'IP\1' then return {0, number} end
  if struct.unpack('>I6', head, 51) > now then return {1, number} end
end
redis.call('ZREM', KEYS[2], ARGV[1])
return {0, number}
