-- Reads a record.
-- KEYS  1 record
-- ARGV  1 skew, 2 number
-- Returns {now, bytes or nil, number}
local number = tonumber(ARGV[#ARGV])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[1]
local bytes = redis.call('GET', KEYS[1])
if bytes and #bytes >= 56 and bytes:sub(1, 3) == 'IP\1' and struct.unpack('>I6', bytes, 51) <= now then
  bytes = false
end
return {now, bytes, number}
