-- Confirms a member of the index: a record may have expired, which tells the index nothing.
-- Returns 4 if the record is there, else 5 and a member without a record is removed
if op == 'u' then
  local stored = redis.call('GETRANGE', key, 0, 55)
  local is_live = lives(stored)
  if is_live then return 4 end
  if is_live == false or #stored == 0 then redis.call('ZREM', key:sub(1, own) .. 'u', key:sub(own + 3)) end
  return 5
end
