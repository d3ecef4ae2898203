-- The grace after a failover (docs/adr/0091), for the scripts that hand out executions. `key` tells as which process the server was first
-- seen, when that was, and until when claims are held: "<run_id> <since> <till>"; `stored` is what it holds. `identity` is '' where there is
-- no grace. `seen` is the <since> that the proxy knows, 0 if this is its first look.
-- Returns how long claims are held yet, since when the server is who it is, and what the key holds now; or the error that keeps it from
-- being written.
local read, known, since_read, till_read
local function grace_left(key, stored, identity, seen, grace, now, is_reclaim, is_check)
  if identity == '' then return 0, 0, stored end
  -- The shards of a server mostly hold the same.
  if stored ~= read then
    read = stored
    known, since_read, till_read = (stored or ''):match('^(%S+) (%d+) (%d+)$')
    since_read, till_read = tonumber(since_read), tonumber(till_read)
  end
  local since, till = since_read, till_read
  if known == nil and seen == 0 then
    -- A new store: as far as this proxy knows, nothing can be lost. One that knows better says so below.
    since, till = now, now
  elseif known ~= identity or since > now or (seen > since and till <= now) then
    -- Another process, a key that is gone or a clock that went back; or the proxy has been at another server since: what was claimed may
    -- be lost.
    since, till = now, now + grace
  elseif seen ~= 0 and seen ~= since and (till == since or (is_check and till <= now)) then
    -- The server was taken for a new one after it had lost what this proxy claimed on it, or this proxy comes late. A late claim proves nothing:
    -- of several shards only the first is checked, so a proxy may never learn that one alone has lost its key.
    till = now + grace
  elseif is_reclaim and till > now then
    -- Where one claim is written again, others are likely to follow.
    till = math.max(till, math.min(now + 200, since + 2 * grace))
  else
    return till - now, since, stored
  end
  local value = string.format('%s %.0f %.0f', identity, since, till)
  local written = redis.pcall('SET', key, value)
  -- Without room for it there is none for a claim; what is there answers all the same.
  if type(written) == 'table' and written.err then
    if written.err:sub(1, 3) ~= 'OOM' then return written end
    value = stored
  end
  return till - now, since, value
end
