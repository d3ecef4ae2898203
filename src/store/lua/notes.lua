-- Reads the history of a record.
-- KEYS  1 record, 2 history
-- ARGV  1 skew, 2 number
-- Returns its lines, none where there is no record; then number
local number = tonumber(ARGV[#ARGV])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[1]
local head = redis.call('GETRANGE', KEYS[1], 0, 55)
if #head < 56 or head:sub(1, 3) ~= 'IP\1' or struct.unpack('>I6', head, 51) <= now then return {number} end
local reply = redis.call('LRANGE', KEYS[2], 0, -1)
reply[#reply + 1] = number
return reply
