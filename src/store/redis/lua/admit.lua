-- Reports, per shard, how long claims are still held; starts the grace for shards last seen under another process id. KEYS the epochs of
-- the shards ARGV 1 grace, 2 skew, then for each key the <since> that the proxy knows; then identity, number Returns for each key:
-- remaining time, since; then number
local number = tonumber(ARGV[#ARGV])
-- Changes nothing, but a replica refuses it: a master that was just demoted may not know its successor yet.
local writes = redis.pcall('PERSIST', KEYS[1])
if type(writes) == 'table' and writes.err then
  -- A proxy that notices a failover has to record it at once.
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
