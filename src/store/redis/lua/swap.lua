-- Replaces a record if the condition holds, else returns the existing one. head fence increment, dueIn, dropIn, the <since> that the proxy
-- knows; then the expected version, or the expected token and the bytes of the
--       expected states
-- Returns 1, version, fence, createdAt; 0, bytes or nil; or 2, since, remaining time: claims are held
if op == 's' then
  local stored = redis.call('GETRANGE', key, 0, 55)
  local is_live = lives(stored)
  if is_live == nil then return 0, redis.call('GET', key) end
  if not is_live then return 0, false end
  local version, fence = unpacked('>I6I6', stored, 5)

  local holds
  if #head == 26 then
    holds = version == unpacked('>I6', head, 21)
  else
    holds = stored:sub(17, 32) == head:sub(21, 36) and head:find(stored:sub(4, 4), 37, true)
  end
  if not holds then return 0, redis.call('GET', key) end
  local raise, due_in, drop_in, seen = unpacked('>Bi6i6I6', head, 2)
  local shard = key:sub(1, own)
  if raise > 0 then
    -- A failover may have gone back to this state.
    local left, since = held(shard, seen, false)
    if left > 0 then return 2, since, left end
  end

  local due, created = now + due_in, unpacked('>I6', stored, 33)
  version, fence = version + 1, math.max(fence + raise, (unpacked('>I6', body, 11)))
  local value = pack('>c4I6I6c16I6I6I6I6', body, version, fence, body:sub(17, 32), created, now, due, now + drop_in)
    .. body:sub(57)
  redis.call('SET', key, value, 'PX', math.max(1, drop_in))
  wrote(shard, key:sub(own + 3), body, due, true)
  return 1, version, fence, created
end
