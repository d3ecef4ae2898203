-- Tells of shards for how long claims are held yet, and begins the grace of those that knew another process.
-- KEYS  the epochs of the shards
-- ARGV  1 grace, 2 skew, then for each key what the proxy has seen, identity, number
-- Returns for each key: how long, since when; then number
local number = tonumber(ARGV[#ARGV])
-- Writes nothing, but is refused as a write is: a master that has become a replica may know of no other process for long.
local writes = redis.pcall('PERSIST', KEYS[1])
if type(writes) == 'table' and writes.err then
  -- Whoever learns of a failover has to write at once.
  for _, refusal in ipairs({ 'READONLY', 'NOREPLICAS', 'MISCONF' }) do
    if writes.err:sub(1, #refusal) == refusal then return writes end
  end
end
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[2]
local reply = {}
local identity, grace = ARGV[#ARGV - 1], tonumber(ARGV[1])
for n, key in ipairs(KEYS) do
  local seen = tonumber(ARGV[2 + n])
  local left, since = grace_left(key, redis.call('GET', key), identity, seen, grace, now, false, true)
  if type(left) == 'table' then return left end
  reply[#reply + 1] = math.max(0, left)
  reply[#reply + 1] = since
end
reply[#reply + 1] = number
return reply
