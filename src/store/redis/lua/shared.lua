-- Shared by the operations of a batch (batch.lua).
local pack, unpacked = struct.pack, struct.unpack
local number, identity = tonumber(ARGV[#ARGV]), ARGV[#ARGV - 1]
local grace, skew, not_after = unpacked('>I6i6I6', ARGV[1])
local items = (#ARGV - 3) / 2
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000) + skew
if now >= not_after then return {'late', now, number} end

-- Keys are "<shard prefix>:r:<id>"; the prefix has the same length in all of them.
local own = KEYS[1]:find('}', 1, true) + 1

-- Whether a record has not expired; nil: it has another schema and is left to a later release.
local function lives(bytes)
  if #bytes < 56 or bytes:sub(1, 3) ~= 'IP\1' then return nil end
  return unpacked('>I6', bytes, 51) > now
end

local epochs

-- How long claims of the shard are still held, and when its server was first seen.
local function held(shard, seen, is_reclaim)
  if identity == '' then return 0, 0 end
  local key = shard .. 'e'
  if items == 1 then
    epochs = {[key] = redis.call('GET', key)}
  elseif epochs == nil then
    local names, stored = {}, {}
    epochs = stored
    for n = 1, items do
      local head, name = ARGV[2 * n], KEYS[n]:sub(1, own) .. 'e'
      local op = head:byte()
      if (op == 112 or (op == 115 and head:byte(2) > 0)) and stored[name] == nil then
        stored[name] = false
        names[#names + 1] = name
      end
    end
    for n, value in ipairs(redis.call('MGET', unpack(names))) do stored[names[n]] = value end
  end
  local left, since, value = grace_left(key, epochs[key], identity, seen, grace, now, is_reclaim)
  if type(left) == 'table' then error(left) end
  epochs[key] = value
  return left, since
end

-- Channels of attempts that have ended.
local ended = {}

-- Updates the index, and collects the message, after a write of a record.
local function wrote(shard, id, bytes, due, was_there)
  local state = bytes:byte(4)
  if state == 1 or state == 4 then
    redis.call('ZADD', shard .. 'u', due, id)
  elseif state == 2 and (bytes:byte(61) or 0) % 8 > 3 then
    -- Its response ends before it: sorts after all unresolved records.
    redis.call('ZADD', shard .. 'u', string.format('%.0f', 281474976710656 + due), id)
  elseif was_there then
    redis.call('ZREM', shard .. 'u', id)
  end
  if state ~= 1 then ended[#ended + 1] = shard .. 'c:' .. id end
end
