-- The proxy's job in nginx with Lua and Redis, as one would write it in an afternoon: claim with SET NX GET, ask the
-- upstream, SET the answer, replay. Without a fence, a lease that is renewed, canonical JSON, or a proof that nothing was sent.
local redis = require "nginx.redis"
local cjson = require "cjson"

local KEEP, IDLE, POOL = "86400000", 60000, 128

local function fail(status, code)
  ngx.status = status
  ngx.header["Content-Type"] = "application/problem+json"
  ngx.say(cjson.encode({ status = status, code = code }))
end

local function framed(value)
  return #value .. ":" .. value
end

local headers = ngx.req.get_headers()
local key = headers["Idempotency-Key"]
if type(key) ~= "string" or key == "" or #key > 255 then return fail(400, "idempotency_key_invalid") end
ngx.req.read_body()
local body = ngx.req.get_body_data() or ""
local method, uri = ngx.req.get_method(), ngx.var.request_uri
local id = "bench:lua:" .. ngx.encode_base64(ngx.sha1_bin(
  framed(headers["Authorization"] or "") .. framed(method) .. framed(ngx.var.uri) .. framed(key)))
local print = ngx.encode_base64(ngx.sha1_bin(
  framed(method) .. framed(uri) .. framed(headers["Content-Type"] or "") .. body))

local store = redis:new()
store:set_timeout(5000)
if not store:connect("127.0.0.1", tonumber(ngx.var.redis_port)) then return fail(503, "idempotency_store_unavailable") end
local old, err = store:set(id, print, "NX", "GET", "PX", KEEP)
if err then return fail(503, "idempotency_store_unavailable") end

if old ~= ngx.null then
  store:set_keepalive(IDLE, POOL)
  if old:sub(1, #print) ~= print then return fail(422, "idempotency_key_reused") end
  if #old == #print then return fail(409, "idempotency_key_in_progress") end
  -- fingerprint, length of the head, head, body
  local length = tonumber(old:sub(#print + 1, #print + 8), 16)
  local kept = cjson.decode(old:sub(#print + 9, #print + 8 + length))
  ngx.status = kept.status
  for name, value in pairs(kept.headers) do ngx.header[name] = value end
  ngx.header["Idempotent-Replayed"] = "true"
  return ngx.print(old:sub(#print + 9 + length))
end

local answer = ngx.location.capture("/upstream" .. uri, { method = ngx["HTTP_" .. method], body = body })
local head = cjson.encode({ status = answer.status, headers = answer.header })
store:set(id, print .. string.format("%08x", #head) .. head .. answer.body, "PX", KEEP)
store:set_keepalive(IDLE, POOL)
ngx.status = answer.status
for name, value in pairs(answer.header) do ngx.header[name] = value end
ngx.print(answer.body)
