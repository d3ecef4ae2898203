-- The grace after a failover (docs/adr/0091), for the scripts that grant claims. `key` holds `stored`: the server's process id, when it was
-- first seen, and until when claims are held, as "<run_id> <since> <till>". `identity` is '' if there is no grace. `seen` is the <since>
-- that the proxy knows, 0 on its first check. Returns how long claims are still held, the <since> now in force, and the new value of the
-- key; or the error that a write got.
local read, known, since_read, till_read
local function grace_left(key, stored, identity, seen, grace, now, is_reclaim, is_check)
  if identity == '' then return 0, 0, stored end
  -- Usually all shards of a server hold the same value.
  if stored ~= read then
    read = stored
    known, since_read, till_read = (stored or ''):match('^(%S+) (%d+) (%d+)$')
    since_read, till_read = tonumber(since_read), tonumber(till_read)
  end
  local since, till = since_read, till_read
  if known == nil and seen == 0 then
    -- A new store: this proxy has claimed nothing that could be lost. One that has takes the next branch.
    since, till = now, now
  elseif known ~= identity or since > now or (seen > since and till <= now) then
    -- Another process, a lost key, a clock set back, or a proxy that has used another server since: claims may be lost.
    since, till = now, now + grace
  elseif seen ~= 0 and seen ~= since and (till == since or (is_check and till <= now)) then
    -- Another proxy has recorded the server as new after it lost this proxy's claims, or this proxy reconnects late. A late claim does not
    -- start a grace: only the first of several shards is checked, so a proxy may never notice that another one lost its key.
    till = now + grace
  elseif is_reclaim and till > now then
    -- One claim is written again: others are likely to follow.
    till = math.max(till, math.min(now + 200, since + 2 * grace))
  else
    return till - now, since, stored
  end
  local value = string.format('%s %.0f %.0f', identity, since, till)
  local written = redis.pcall('SET', key, value)
  -- A full server has no room for claims either, but still answers from existing records.
  if type(written) == 'table' and written.err then
    if written.err:sub(1, 3) ~= 'OOM' then return written end
    value = stored
  end
  return till - now, since, value
end
