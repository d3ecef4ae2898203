-- Claims: writes the record if there is none, else returns the existing one. head entry (0 a claim, 1 one of a fresh key, 2 a record that
-- is written again), dueIn, dropIn, the <since> that the proxy knows Returns 1, version, fence, createdAt; 0, bytes; or 2, since, remaining
-- time: claims are held
if op == 'p' then
  local entry, due_in, drop_in, seen = unpacked('>Bi6i6I6', head, 2)
  local shard, due = key:sub(1, own), now + due_in
  local fence, created = unpacked('>I6', body, 11), unpacked('>I6', body, 33)
  if fence == 0 then fence = now end
  if created == 0 then created = now end

  local left, since = held(shard, seen, entry == 2)
  if left > 0 and entry == 0 then
    local stored = redis.call('GET', key)
    if stored and lives(stored) ~= false then return 0, stored end
    return 2, since, left
  end

  local value = pack('>c4I6I6c16I6I6I6I6', body, now, fence, body:sub(17, 32), created, now, due, now + drop_in)
    .. body:sub(57)
  local ttl = math.max(1, drop_in)
  local old = redis.pcall('SET', key, value, 'NX', 'GET', 'PX', ttl)
  if type(old) == 'table' then
    -- A full store refuses new claims, but still answers from existing records.
    local stored = old.err:sub(1, 3) == 'OOM' and redis.call('GET', key)
    if stored and lives(stored) ~= false then return 0, stored end
    error(old)
  end
  if old then
    if lives(old) ~= false then return 0, old end
    redis.call('SET', key, value, 'PX', ttl)
  end
  wrote(shard, key:sub(own + 3), body, due, old)
  return 1, now, fence, created
end
