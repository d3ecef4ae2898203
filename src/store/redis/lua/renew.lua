-- Renews the lease of a record that is in progress under this token, or unknown only because that lease expired; extends its retention if
-- that would end sooner. head dueIn, dropIn, token Returns 4 if renewed, 5 if the record is no longer this owner's
if op == 'r' then
  local due_in, drop_in, token = unpacked('>i6i6c16', head, 2)
  local stored = redis.call('GETRANGE', key, 0, 60)
  if not lives(stored) or stored:sub(17, 32) ~= token then return 5 end
  local state, flags = stored:byte(4), stored:byte(61) or 0
  if state ~= 1 and not (state == 4 and flags % 2 == 1) then return 5 end
  local due = now + due_in
  if state == 4 then
    redis.call('SETRANGE', key, 3, '\1')
    redis.call('SETRANGE', key, 60, '\0')
  end
  redis.call('SETRANGE', key, 4, pack('>I6', unpacked('>I6', stored, 5) + 1))
  redis.call('SETRANGE', key, 44, pack('>I6', due))
  if now + drop_in > unpacked('>I6', stored, 51) then
    redis.call('SETRANGE', key, 50, pack('>I6', now + drop_in))
    redis.call('PEXPIRE', key, drop_in)
  end
  redis.call('ZADD', key:sub(1, own) .. 'u', due, key:sub(own + 3))
  return 4
end
