-- Takes a unit from a bucket, or gives one back: GCRA in whole numbers, as gcra.ts.
-- KEYS  1 bucket
-- ARGV  1 count, 2 per, 3 units (1 or -1), 4 skew, 5 number
-- Returns {wait, number}: how long until the next unit is free in milliseconds, 0 where it was taken or given back
local number = tonumber(ARGV[#ARGV])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[4]
local count, per, units = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local full, debt = count * per, 0

local stored = redis.call('GET', KEYS[1])
local at, owed, by = (stored or ''):match('^(%d+) (%d+) (%d+)$')
if at then
  local before = math.min(full, math.ceil((owed / by) * count))
  debt = math.max(0, before - math.abs(now - at) * count)
end

if debt + units * per > full then return {math.ceil((debt + per - full) / count), number} end
debt = debt + units * per
if debt > 0 then
  redis.call('SET', KEYS[1], string.format('%.0f %.0f %.0f', now, debt, count), 'PX', math.ceil(debt / count))
elseif stored then
  redis.call('DEL', KEYS[1])
end
return {0, number}
