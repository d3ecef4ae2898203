#!lua flags=allow-oom
-- Prolongs the lease of a record that is in progress under this token, or unknown under it for nothing but its silence, and its
-- life where that would end sooner. Grows nothing, hence allow-oom: a full store must not make healthy owners look dead.
-- KEYS  1 record, 2 index of unresolved records in its shard
-- ARGV  1 id, 2 token, 3 dueIn, 4 dropIn, 5 skew, 6 number
-- Returns {1, number} if it did, {0, number} if the record is not this owner's any more
local number = tonumber(ARGV[#ARGV])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[5]
local head = redis.call('GETRANGE', KEYS[1], 0, 60)
if #head < 56 or head:sub(1, 3) ~= 'IP\1' or head:sub(17, 32) ~= ARGV[2] then return {0, number} end
local state, flags = head:byte(4), head:byte(61) or 0
if state ~= 1 and not (state == 4 and flags % 2 == 1) then return {0, number} end
local drop = struct.unpack('>I6', head, 51)
if drop <= now then return {0, number} end
local due = now + ARGV[3]
if state == 4 then
  redis.call('SETRANGE', KEYS[1], 3, '\1')
  redis.call('SETRANGE', KEYS[1], 60, '\0')
end
redis.call('SETRANGE', KEYS[1], 4, struct.pack('>I6', struct.unpack('>I6', head, 5) + 1))
redis.call('SETRANGE', KEYS[1], 44, struct.pack('>I6', due))
if now + ARGV[4] > drop then
  redis.call('SETRANGE', KEYS[1], 50, struct.pack('>I6', now + ARGV[4]))
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
redis.call('ZADD', KEYS[2], due, ARGV[1])
return {1, number}
