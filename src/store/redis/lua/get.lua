-- Reads a record.
-- Returns 0, bytes or nil
if op == 'g' then
  local bytes = redis.call('GET', key)
  return 0, bytes and lives(bytes) ~= false and bytes
end
