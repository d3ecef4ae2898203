-- Reads the history of a record. Returns 7, the number of lines, the lines
if op == 'h' then
  if not lives(redis.call('GETRANGE', key, 0, 55)) then return 7, {} end
  return 7, redis.call('LRANGE', key:sub(1, own) .. 'h:' .. key:sub(own + 3), 0, -1)
end
