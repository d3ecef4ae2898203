-- Checks a member of the index: when a record expires, its member stays. Returns 4 if the record exists, else 5; removes a member without a
-- record
if op == 'u' then
  local stored = redis.call('GETRANGE', key, 0, 55)
  local is_live = lives(stored)
  if is_live then return 4 end
  if is_live == false or #stored == 0 then redis.call('ZREM', key:sub(1, own) .. 'u', key:sub(own + 3)) end
  return 5
end
