-- The operations of one turn of the event loop (docs/adr/0125). The files of the operations come before it, as `apply(op, key, head,
-- body)`. KEYS the record or bucket of each operation; then, in a cluster, the other keys that they use ARGV 1 grace, skew, the last
-- instant at which the batch may be applied; then, for each operation, its head (which begins with its letter) and its body; then identity,
-- number Returns {now, the results in order, number}, or {'late', now, number} if nothing was applied. The result 3, text: only that
-- operation failed
local reply = {now}
local at = 1
for n = 1, items do
  local head = ARGV[2 * n]
  local ok, kind, a, b, c = pcall(apply, head:sub(1, 1), KEYS[n], head, ARGV[2 * n + 1])
  if not ok then
    kind, a, b, c = 3, type(kind) == 'table' and kind.err or kind, nil, nil
    -- These refuse every write, so nothing has been applied.
    if a:find('^READONLY') or a:find('^NOREPLICAS') or a:find('^MISCONF') then return {err = a} end
  end
  reply[at + 1] = kind
  if type(a) == 'table' then
    reply[at + 2] = #a
    at = at + 2
    for _, line in ipairs(a) do
      at = at + 1
      reply[at] = line
    end
  else
    reply[at + 2], reply[at + 3], reply[at + 4] = a, b, c
    at = at + (c ~= nil and 4 or b ~= nil and 3 or a ~= nil and 2 or 1)
  end
end
-- Ignore refusals: the user may lack access to channels, or the server may be too old. Usually nobody listens, and one query costs less
-- than many messages.
local listening = #ended > 1 and redis.pcall('PUBSUB', 'SHARDNUMSUB', unpack(ended)) or {}
for n, channel in ipairs(ended) do
  if listening[2 * n] ~= 0 then redis.pcall('SPUBLISH', channel, '') end
end
reply[at + 1] = number
return reply
