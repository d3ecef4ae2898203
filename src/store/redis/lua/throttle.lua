-- Takes a unit from a bucket, or returns one, as `drawFromBucket` in side-ports.ts does. head count, per, units (1 or -1) Returns 6 and the
-- milliseconds until a unit is free; 0: it was taken or returned
if op == 't' then
  local count, per, units = unpacked('>I6I6i1', head, 2)
  local full, debt = count * per, 0

  local stored = redis.call('GET', key)
  local at, owed, by = (stored or ''):match('^(%d+) (%d+) (%d+)$')
  if at then
    local before = math.min(full, math.ceil((owed / by) * count))
    debt = math.max(0, before - math.abs(now - at) * count)
  end

  if debt + units * per > full then return 6, math.ceil((debt + per - full) / count) end
  debt = debt + units * per
  if debt > 0 then
    redis.call('SET', key, string.format('%.0f %.0f %.0f', now, debt, count), 'PX', math.ceil(debt / count))
  elseif stored then
    redis.call('DEL', key)
  end
  return 6, 0
end
