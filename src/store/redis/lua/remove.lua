-- Removes a record at exactly this version, with its history. The version of anything else is the beginning of its SHA-1. head version
-- Returns 4 if removed, 5 if there is another version or none
if op == 'd' then
  local stored = redis.call('GETRANGE', key, 0, 55)
  local version
  if lives(stored) == false then return 5 end
  if #stored == 56 and stored:sub(1, 2) == 'IP' then
    version = unpacked('>I6', stored, 5)
  else
    local bytes = redis.call('GET', key)
    if not bytes then return 5 end
    version = tonumber(redis.sha1hex(bytes):sub(1, 12), 16)
  end
  if version ~= unpacked('>I6', head, 2) then return 5 end
  local shard, id = key:sub(1, own), key:sub(own + 3)
  redis.call('DEL', key, shard .. 'h:' .. id)
  redis.call('ZREM', shard .. 'u', id)
  ended[#ended + 1] = shard .. 'c:' .. id
  return 4
end
