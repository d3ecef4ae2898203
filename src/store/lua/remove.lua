-- Removes a record at exactly this version; of what is no record, its SHA-1 begins with it.
-- KEYS  1 record, 2 index of unresolved records in its shard, 3 history
-- ARGV  1 id, 2 version, 3 skew, 4 number
-- Returns {1, number} if it did, {0, number} if there is another version or none
local number = tonumber(ARGV[#ARGV])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[3]
local head = redis.call('GETRANGE', KEYS[1], 0, 55)
local version
if #head == 56 and head:sub(1, 2) == 'IP' then
  if head:sub(3, 3) == '\1' and struct.unpack('>I6', head, 51) <= now then return {0, number} end
  version = struct.unpack('>I6', head, 5)
else
  local bytes = redis.call('GET', KEYS[1])
  if not bytes then return {0, number} end
  version = tonumber(redis.sha1hex(bytes):sub(1, 12), 16)
end
if version ~= tonumber(ARGV[2]) then return {0, number} end
redis.call('DEL', KEYS[1], KEYS[3])
redis.call('ZREM', KEYS[2], ARGV[1])
-- Refused where the user has no right to channels, or an old server knows none: the write stands.
redis.pcall('SPUBLISH', KEYS[2]:sub(1, -2) .. 'c:' .. ARGV[1], '')
return {1, number}
