-- Where a length-prefixed text of a record (docs/record-format.md) ends.
CREATE OR REPLACE FUNCTION idempotency.text_end(_bytes bytea, _from integer) RETURNS integer LANGUAGE sql IMMUTABLE AS $$
  -- `<<` and `|` have the same precedence.
  SELECT _from + 4 + ((get_byte(_bytes, _from) << 24) | (get_byte(_bytes, _from + 1) << 16) | (get_byte(_bytes, _from + 2) << 8) | get_byte(_bytes, _from + 3));
$$;

CREATE OR REPLACE FUNCTION idempotency.framed(_text text) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
  SELECT int4send(octet_length(t.bytes)) || t.bytes FROM (SELECT convert_to(_text, 'LATIN1') AS bytes) t;
$$;

-- The reason phrase of a status.
CREATE OR REPLACE FUNCTION idempotency.reason(_status integer) RETURNS text LANGUAGE sql IMMUTABLE AS $$
  SELECT coalesce('{
    "200": "OK", "201": "Created", "202": "Accepted", "203": "Non-Authoritative Information", "204": "No Content", "205": "Reset Content",
    "206": "Partial Content", "207": "Multi-Status", "208": "Already Reported", "226": "IM Used", "300": "Multiple Choices",
    "301": "Moved Permanently", "302": "Found", "303": "See Other", "304": "Not Modified", "305": "Use Proxy", "307": "Temporary Redirect",
    "308": "Permanent Redirect", "400": "Bad Request", "401": "Unauthorized", "402": "Payment Required", "403": "Forbidden",
    "404": "Not Found", "405": "Method Not Allowed", "406": "Not Acceptable", "407": "Proxy Authentication Required",
    "408": "Request Timeout", "409": "Conflict", "410": "Gone", "411": "Length Required", "412": "Precondition Failed",
    "413": "Payload Too Large", "414": "URI Too Long", "415": "Unsupported Media Type", "416": "Range Not Satisfiable",
    "417": "Expectation Failed", "418": "I''m a Teapot", "421": "Misdirected Request", "422": "Unprocessable Entity", "423": "Locked",
    "424": "Failed Dependency", "425": "Too Early", "426": "Upgrade Required", "428": "Precondition Required", "429": "Too Many Requests",
    "431": "Request Header Fields Too Large", "451": "Unavailable For Legal Reasons", "500": "Internal Server Error",
    "501": "Not Implemented", "502": "Bad Gateway", "503": "Service Unavailable", "504": "Gateway Timeout",
    "505": "HTTP Version Not Supported", "506": "Variant Also Negotiates", "507": "Insufficient Storage", "508": "Loop Detected",
    "509": "Bandwidth Limit Exceeded", "510": "Not Extended", "511": "Network Authentication Required"
  }'::jsonb ->> _status::text, '');
$$;

-- Header lines as a record stores them. Raises if a header cannot be sent, by the rules of `resolve`.
CREATE OR REPLACE FUNCTION idempotency.header_lines(_headers jsonb) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
  lines text[] := '{}';
  line jsonb;
  _name text;
  _value text;
BEGIN
  IF jsonb_typeof(_headers) <> 'array' THEN
    RAISE EXCEPTION 'headers: found a JSON %; allowed: an array of pairs, as in [["Content-Type", "text/plain"]]', jsonb_typeof(_headers)
      USING ERRCODE = 'invalid_parameter_value';
  END IF;
  FOR line IN SELECT l.value FROM jsonb_array_elements(_headers) AS l LOOP
    IF jsonb_path_match(line, '$.type() == "array" && $.size() == 2 && $[0].type() == "string" && $[1].type() == "string"') IS NOT TRUE THEN
      RAISE EXCEPTION 'headers: found %; allowed: pairs of name and value, both strings', left(line::text, 100) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    _name := line ->> 0;
    _value := line ->> 1;
    IF _name COLLATE "C" !~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+$' THEN
      RAISE EXCEPTION 'headers: "%" is not a field name', left(_name, 100) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF _value COLLATE "C" !~ ('^[' || chr(9) || ' -~' || chr(128) || '-' || chr(255) || ']*$') OR _value <> btrim(_value, ' ' || chr(9)) THEN
      RAISE EXCEPTION 'headers: the value of % is not one of a header line; allowed: Latin-1 without control characters, no spaces around it', _name
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF lower(_name) IN (
      'connection', 'keep-alive', 'proxy-authenticate', 'proxy-authentication-info', 'proxy-authorization', 'proxy-connection', 'te',
      'transfer-encoding', 'upgrade', 'http2-settings', 'content-length', 'trailer',
      'idempotent-replayed', 'idempotency-status', 'idempotency-expires', 'idempotency-key-derived', 'idempotency-retry',
      'idempotency-problem', 'idempotency-outcome'
    ) THEN
      RAISE EXCEPTION 'headers: % belongs to one connection or to the proxy; leave it out', _name USING ERRCODE = 'invalid_parameter_value';
    END IF;
    lines := lines || ARRAY[_name, _value];
  END LOOP;
  RETURN lines;
END $$;

-- For the upstream, within its own transaction (docs/postgres.md): ends its attempt with this answer. Raises if the attempt may not end the
-- record, which rolls back that transaction. False: the same answer was committed before. Writes only the record, so that no renewal waits
-- for that transaction or makes it fail, under any isolation level. Runs with the privileges of the schema's owner and the settings of any
-- caller: no dynamic SQL, no backslash in a literal.
CREATE OR REPLACE FUNCTION idempotency.complete(
  record_id text, fence bigint, status integer, headers jsonb DEFAULT '[]', body bytea DEFAULT ''
) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
  r idempotency.records;
  _body bytea := coalesce(complete.body, ''::bytea);
  lines text[] := idempotency.header_lines(coalesce(complete.headers, '[]'::jsonb));
  at bigint;
  dropped_at bigint;
  error_at integer;
  extensions_at integer;
  extensions integer := 0;
  result_at integer;
  name_end integer;
  value_end integer;
  -- The record's extension `completion`: only routes that pass the record's id to the upstream set it.
  terms bigint[];
  ttl bigint;
  -- How long the record outlives its response (`ttl.body`).
  after_body bigint := 0;
  is_kept boolean;
  place text;
  _head bytea;
  _payload bytea := '';
BEGIN
  IF complete.record_id IS NULL OR complete.fence IS NULL OR complete.status IS NULL THEN
    RAISE EXCEPTION 'record_id, fence and status are needed; found % and %, the headers Idempotency-Record and Idempotency-Fence, and %',
      coalesce(complete.record_id, 'NULL'), coalesce(complete.fence::text, 'NULL'), coalesce(complete.status::text, 'NULL')
      USING ERRCODE = 'null_value_not_allowed';
  END IF;
  IF complete.status NOT BETWEEN 200 AND 599 THEN
    RAISE EXCEPTION 'status: found %; allowed: 200 to 599', complete.status USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF complete.status IN (204, 205, 304) AND _body <> '' THEN
    RAISE EXCEPTION 'body: an answer with status % has none', complete.status USING ERRCODE = 'invalid_parameter_value';
  END IF;
  SELECT x.* INTO r FROM idempotency.records x WHERE x.id = complete.record_id FOR NO KEY UPDATE;
  IF FOUND AND r.schema <> 1 THEN
    RAISE EXCEPTION 'a later release of idempotency-proxy has written the record' USING ERRCODE = 'object_not_in_prerequisite_state';
  END IF;
  at := idempotency.now(0);
  SELECT s.drop_at INTO dropped_at FROM idempotency.stored s WHERE s.id = r.id AND s.service = r.service;
  IF (dropped_at > at AND r.fence = complete.fence AND r.state IN (1, 2, 3, 4)) IS NOT TRUE THEN
    RAISE EXCEPTION 'the attempt % may no longer end the record: roll back', complete.fence USING ERRCODE = 'IP002',
      DETAIL = CASE WHEN (dropped_at > at) IS NOT TRUE THEN 'There is no such record, or not any more.'
        ELSE format('The record is %s; its latest attempt is %s.',
          (ARRAY['in_progress', 'completed', 'failed_retryable', 'unknown', 'expired'])[r.state], r.fence) END;
  END IF;

  -- An unsealed head is never shorter (docs/record-format.md).
  IF octet_length(r.head) < 4 + 91 THEN
    RAISE EXCEPTION 'the record is sealed (store.encryption): its upstream cannot end it' USING ERRCODE = 'object_not_in_prerequisite_state';
  END IF;

  -- After the fixed fields, keep recipe, route, method, path and the extensions; drop the error and the status; append the result.
  error_at := 71;
  FOR n IN 1 .. 4 LOOP
    error_at := idempotency.text_end(r.head, error_at);
  END LOOP;
  extensions_at := idempotency.text_end(r.head, error_at) + 2;
  result_at := extensions_at + 1;
  FOR n IN 1 .. get_byte(r.head, extensions_at) LOOP
    name_end := idempotency.text_end(r.head, result_at);
    value_end := idempotency.text_end(r.head, name_end);
    -- The result of an earlier call, always last.
    EXIT WHEN substr(r.head, result_at + 5, name_end - result_at - 4) = convert_to('after-body', 'UTF8');
    IF substr(r.head, result_at + 5, name_end - result_at - 4) = convert_to('completion', 'UTF8') THEN
      terms := string_to_array(convert_from(substr(r.head, name_end + 5, value_end - name_end - 4), 'UTF8'), ' ')::bigint[];
    END IF;
    result_at := value_end;
    extensions := n;
  END LOOP;
  IF terms IS NULL AND r.state <> 2 THEN
    RAISE EXCEPTION 'the route of the record does not let its upstream end it: key.forwardFence is off, or an earlier release has claimed it'
      USING ERRCODE = 'object_not_in_prerequisite_state';
  END IF;

  -- A repeated call gets the Date of the first.
  IF r.state = 2 THEN
    at := r.updated_at;
  END IF;
  IF NOT EXISTS (SELECT FROM unnest(lines) WITH ORDINALITY AS l (text, n) WHERE l.n % 2 = 1 AND lower(l.text) = 'date') THEN
    lines := lines || ARRAY['Date', to_char(timestamp 'epoch' + (at / 1000) * interval '1 second', 'Dy, DD Mon YYYY HH24:MI:SS "GMT"')];
  END IF;
  ttl := CASE WHEN complete.status BETWEEN 200 AND 299 THEN terms[1] ELSE terms[2] END;
  is_kept := octet_length(_body) <= terms[4] AND terms[4] > 0;
  IF is_kept AND terms[5] < ttl THEN
    after_body := ttl - terms[5];
  END IF;
  _head := decode(CASE WHEN after_body > 0 THEN '04' ELSE '00' END, 'hex') || substr(r.head, 6, error_at - 5) || int4send(0) || int2send(0::smallint)
    || set_byte(decode('00', 'hex'), 0, extensions + CASE WHEN after_body > 0 THEN 1 ELSE 0 END)
    || substr(r.head, extensions_at + 2, result_at - extensions_at - 1)
    || CASE WHEN after_body > 0 THEN idempotency.framed('after-body') || idempotency.framed(after_body::text) ELSE ''::bytea END;
  IF is_kept THEN
    _head := _head || decode('010000', 'hex') || int2send(complete.status::smallint) || idempotency.framed(idempotency.reason(complete.status));
    _payload := int4send(cardinality(lines)) || (SELECT string_agg(idempotency.framed(l.text), ''::bytea ORDER BY l.n) FROM unnest(lines) WITH ORDINALITY AS l (text, n))
      || int4send(0) || int4send(octet_length(_body)) || _body;
  ELSE
    SELECT v.text INTO place FROM unnest(lines) WITH ORDINALITY AS l (text, n) JOIN unnest(lines) WITH ORDINALITY AS v (text, n) ON v.n = l.n + 1
    WHERE l.n % 2 = 1 AND lower(l.text) = 'location' ORDER BY l.n LIMIT 1;
    -- Too large, or the route keeps only the outcome.
    _head := _head || decode(CASE terms[4] WHEN 0 THEN '0203' ELSE '0201' END, 'hex') || int2send(complete.status::smallint)
      || decode(CASE WHEN place IS NULL THEN '00' ELSE '01' END, 'hex') || idempotency.framed(coalesce(place, ''));
  END IF;

  _head := int4send(octet_length(_head)) || _head;

  IF r.state = 2 THEN
    IF terms IS NOT NULL AND _head = r.head AND _payload = r.payload THEN
      RETURN false;
    END IF;
    RAISE EXCEPTION 'the attempt % has another answer already: roll back', complete.fence USING ERRCODE = 'IP002',
      DETAIL = 'The record is completed, by another call of this function or by somebody else.';
  END IF;
  UPDATE idempotency.records x
  SET state = 2, version = r.version + 1, updated_at = at, due = at + ttl - after_body, drop_at = at + ttl + terms[3], head = _head, payload = _payload
  WHERE x.id = r.id AND x.service = r.service AND x.version = r.version;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'the record that was read is not the one that is there' USING ERRCODE = 'serialization_failure';
  END IF;
  RETURN true;
END $$;

-- A fixed search_path, whatever the caller has: objects in other schemas cannot replace what these functions use.
DO $$
DECLARE
  f regprocedure;
BEGIN
  FOR f IN SELECT p.oid FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'idempotency' LOOP
    EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, pg_temp', f);
    EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', f);
  END LOOP;
END $$;

INSERT INTO idempotency.layout (version, revision) VALUES (1, 9)
ON CONFLICT (only_row) DO UPDATE SET version = 1, revision = 9;

COMMIT;
