-- Every operation is one call, so one round trip and one transaction. They read first and write second: an INSERT would wait for whoever
-- has changed the record and not committed.

-- The store's time.
CREATE OR REPLACE FUNCTION idempotency.now(_skew bigint) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
  RETURN trunc(extract(epoch FROM clock_timestamp()) * 1000::numeric)::bigint + _skew;
END $$;

-- Begins every operation. Refuses on a standby: a record missing there may exist on the primary. Settings of this transaction: how long it
-- waits for another one (then nothing was applied), how bytes are written, and that the proxy is warned of a commit that no standby has.
CREATE OR REPLACE FUNCTION idempotency.start(_wait integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF pg_is_in_recovery() THEN
    RAISE EXCEPTION 'the server is a standby' USING ERRCODE = 'IP001';
  END IF;
  PERFORM set_config('lock_timeout', _wait::text, true), set_config('bytea_output', 'hex', true), set_config('client_min_messages', 'warning', true);
END $$;

-- Those who wait for the record, to be notified after the commit.
CREATE OR REPLACE FUNCTION idempotency.waiting(_service text, _id text) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT coalesce(string_agg(w.channel, ' '), '') FROM idempotency.waits w WHERE w.id = _id AND w.service = _service;
$$;

-- Behind all instants: where responses that end before their records are filed.
CREATE OR REPLACE FUNCTION idempotency.bodies_from() RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
  SELECT 281474976710656::bigint;
$$;

-- Files a record that is in progress or unknown, and the response that ends before its record; takes others out.
CREATE OR REPLACE FUNCTION idempotency.file(
  _service text, _id text, _state smallint, _token bytea, _due bigint, _drop_at bigint, _head bytea
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  place bigint := CASE WHEN _state IN (1, 4) THEN _due
    WHEN _state = 2 AND length(_head) > 4 AND get_byte(_head, 4) & 4 > 0 THEN idempotency.bodies_from() + _due END;
BEGIN
  IF place IS NULL THEN
    DELETE FROM idempotency.unresolved u WHERE u.id = _id AND u.service = _service;
    RETURN;
  END IF;
  INSERT INTO idempotency.unresolved AS u (id, service, state, token, due, drop_at, renewals)
  VALUES (_id, _service, _state, _token, place, _drop_at, 0)
  ON CONFLICT (id, service) DO UPDATE SET state = _state, token = _token, due = place, drop_at = _drop_at, renewals = 0;
END $$;

-- Locks the record, then its lease (the same order everywhere), and reads both. is_there: there was a record to lock, and it has not expired.
-- own_version: without renewals. Taking the row lock writes WAL, so this commit also waits for the standby: what it returns is there, too.
CREATE OR REPLACE FUNCTION idempotency.take(
  _service text, _id text, _skew bigint, OUT is_there boolean, OUT at bigint, OUT own_version bigint, OUT stored idempotency.stored
) LANGUAGE plpgsql AS $$
BEGIN
  SELECT r.version INTO own_version FROM idempotency.records r WHERE r.id = _id AND r.service = _service FOR NO KEY UPDATE;
  IF NOT FOUND THEN
    at := idempotency.now(_skew);
    is_there := false;
    RETURN;
  END IF;
  PERFORM 1 FROM idempotency.unresolved u WHERE u.id = _id AND u.service = _service FOR UPDATE;
  at := idempotency.now(_skew);
  SELECT s.* INTO stored FROM idempotency.stored s WHERE s.id = _id AND s.service = _service;
  is_there := stored.id IS NOT NULL AND stored.drop_at > at;
END $$;

-- Takes out the lease of a record that idempotency.complete has finished, which is locked. The version keeps its renewals.
CREATE OR REPLACE FUNCTION idempotency.fold(_service text, _id text) RETURNS void LANGUAGE sql AS $$
  WITH gone AS (
    DELETE FROM idempotency.unresolved u WHERE u.id = _id AND u.service = _service AND u.due < idempotency.bodies_from() RETURNING u.token, u.renewals
  )
  UPDATE idempotency.records r SET version = r.version + gone.renewals FROM gone
  WHERE r.id = _id AND r.service = _service AND r.token = gone.token AND gone.renewals > 0;
  SELECT idempotency.file(r.service, r.id, r.state, r.token, r.due, r.drop_at, r.head) FROM idempotency.records r
  WHERE r.id = _id AND r.service = _service;
$$;

-- Removes a record whose time has come. False: it has not, or the record is gone, or somebody has its lease and this does not wait.
CREATE OR REPLACE FUNCTION idempotency.discard(_service text, _id text, _at bigint, _waits boolean) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  PERFORM 1 FROM idempotency.records r WHERE r.id = _id AND r.service = _service FOR UPDATE;
  IF NOT FOUND THEN RETURN false; END IF;
  IF _waits THEN
    PERFORM 1 FROM idempotency.unresolved u WHERE u.id = _id AND u.service = _service FOR UPDATE;
  ELSIF EXISTS (SELECT FROM idempotency.unresolved u WHERE u.id = _id AND u.service = _service) THEN
    PERFORM 1 FROM idempotency.unresolved u WHERE u.id = _id AND u.service = _service FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN RETURN false; END IF;
  END IF;
  PERFORM 1 FROM idempotency.stored s WHERE s.id = _id AND s.service = _service AND s.drop_at <= _at;
  IF NOT FOUND THEN RETURN false; END IF;
  PERFORM idempotency.erase(_service, _id);
  RETURN true;
END $$;

CREATE OR REPLACE FUNCTION idempotency.erase(_service text, _id text) RETURNS void LANGUAGE sql AS $$
  DELETE FROM idempotency.records r WHERE r.id = _id AND r.service = _service;
  DELETE FROM idempotency.unresolved u WHERE u.id = _id AND u.service = _service;
  DELETE FROM idempotency.notes n WHERE n.id = _id AND n.service = _service;
$$;

-- The grace after a failover (docs/adr/0091): for how long claims are still held, and since when the server is what it is. What that is, the start
-- of its process and the file of its records say: a promotion, a restart on an older copy, TRUNCATE and a restored dump change one of them. A
-- crash that the process survives changes neither, but leaves no grace. _entry: 0 a claim, 1 one of a fresh key, 2 a record that is written
-- again, 3 a check. _seen: since when the server is what it is, as far as the proxy knows; 0: this is its first look.
CREATE OR REPLACE FUNCTION idempotency.held(
  _service text, _skew bigint, _entry integer, _grace bigint, _seen bigint, OUT remaining bigint, OUT since bigint
) LANGUAGE plpgsql AS $$
DECLARE
  at bigint;
  is_there boolean;
  is_same boolean;
  _till bigint;
  is_locked boolean := false;
BEGIN
  remaining := 0;
  IF _grace = 0 THEN RETURN; END IF;
  LOOP
    SELECT e.started IS NOT NULL, e.started = pg_postmaster_start_time() AND e.file = pg_relation_filenode('idempotency.records'), g.since, g.till
    INTO is_there, is_same, since, _till
    FROM idempotency.epochs e LEFT JOIN idempotency.graces g ON g.service = e.service WHERE e.service = _service;
    at := idempotency.now(_skew);
    IF is_same AND since <= at AND (_seen IN (0, since) OR _till > CASE _entry WHEN 3 THEN at ELSE since END) THEN
      -- Where one claim is written again, others are likely to follow.
      IF _entry = 2 AND _till > at AND least(at + 200, since + 2 * _grace) > _till THEN
        _till := least(at + 200, since + 2 * _grace);
        UPDATE idempotency.graces g SET till = _till
        WHERE g.ctid = (SELECT x.ctid FROM idempotency.graces x WHERE x.service = _service FOR UPDATE SKIP LOCKED);
      END IF;
      remaining := greatest(0, _till - at);
      RETURN;
    END IF;
    EXIT WHEN is_locked;
    -- One of those who notice writes it down.
    INSERT INTO idempotency.epochs (service) VALUES (_service) ON CONFLICT DO NOTHING;
    PERFORM 1 FROM idempotency.epochs e WHERE e.service = _service FOR UPDATE;
    is_locked := true;
  END LOOP;
  IF NOT is_there AND _seen = 0 THEN
    -- A new store: as far as this proxy knows, nothing can be lost. One that knows better comes to the next line.
    since := at;
    _till := at;
  ELSIF is_same AND since <= at THEN
    -- This proxy comes late, or the server was taken for a new one after it had lost what this proxy claimed on it.
    _till := at + _grace;
  ELSE
    -- Another server, one that has crashed, or a clock that went back: what was claimed may be lost.
    since := at;
    _till := at + _grace;
  END IF;
  UPDATE idempotency.epochs e SET started = pg_postmaster_start_time(), file = pg_relation_filenode('idempotency.records') WHERE e.service = _service;
  INSERT INTO idempotency.graces AS g (service, since, till) VALUES (_service, held.since, _till)
  ON CONFLICT (service) DO UPDATE SET since = held.since, till = _till;
  remaining := _till - at;
END $$;

-- A proxy looks who the server is.
CREATE OR REPLACE FUNCTION idempotency.admit(
  _service text, _skew bigint, _wait integer, _grace bigint, _seen bigint,
  OUT remaining bigint, OUT since bigint
) LANGUAGE plpgsql AS $$
BEGIN
  PERFORM idempotency.start(_wait), set_config('synchronous_commit', 'off', true);
  SELECT h.remaining, h.since INTO remaining, since FROM idempotency.held(_service, _skew, 3, _grace, _seen) h;
END $$;

CREATE OR REPLACE FUNCTION idempotency.get(
  _service text, _id text, _skew bigint, _wait integer, OUT at bigint, OUT stored idempotency.stored
) LANGUAGE plpgsql AS $$
BEGIN
  PERFORM idempotency.start(_wait);
  at := idempotency.now(_skew);
  SELECT s.* INTO stored FROM idempotency.stored s WHERE s.id = _id AND s.service = _service AND s.drop_at > at;
END $$;

CREATE OR REPLACE FUNCTION idempotency.put(
  _service text, _id text, _skew bigint, _wait integer,
  _schema smallint, _state smallint, _fence bigint, _token bytea, _created_at bigint, _head bytea, _payload bytea, _due_in bigint, _drop_in bigint,
  _entry integer, _grace bigint, _seen bigint,
  OUT at bigint, OUT done boolean, OUT version bigint, OUT fence bigint, OUT created_at bigint, OUT waiting text,
  OUT remaining bigint, OUT since bigint, OUT stored idempotency.stored
) LANGUAGE plpgsql AS $$
DECLARE
  tries integer := 0;
BEGIN
  PERFORM idempotency.start(_wait);
  LOOP
    at := idempotency.now(_skew);
    SELECT s.* INTO stored FROM idempotency.stored s WHERE s.id = _id AND s.service = _service;
    IF stored.id IS NULL THEN
      -- After the look at records: nobody empties them any more before this ends.
      SELECT h.remaining, h.since INTO remaining, since FROM idempotency.held(_service, _skew, _entry, _grace, _seen) h;
      IF remaining > 0 AND _entry = 0 THEN
        PERFORM set_config('synchronous_commit', 'off', true);
        at := idempotency.now(_skew);
        done := false;
        RETURN;
      END IF;
      fence := CASE _fence WHEN 0 THEN at ELSE _fence END;
      created_at := CASE _created_at WHEN 0 THEN at ELSE _created_at END;
      INSERT INTO idempotency.records AS r (id, service, schema, state, version, fence, token, created_at, updated_at, due, drop_at, head, payload)
      VALUES (_id, _service, _schema, _state, at, fence, _token, created_at, at, at + _due_in, at + _drop_in, _head, _payload)
      ON CONFLICT ON CONSTRAINT records_pkey DO NOTHING;
      IF FOUND THEN
        -- It has waited for another that was withdrawn, or came and went: what is stamped must not be older than what that one had.
        IF idempotency.now(_skew) > at + 5 THEN
          at := idempotency.now(_skew);
          fence := CASE _fence WHEN 0 THEN at ELSE _fence END;
          created_at := CASE _created_at WHEN 0 THEN at ELSE _created_at END;
          UPDATE idempotency.records r SET version = at, fence = put.fence, created_at = put.created_at, updated_at = at,
            due = at + _due_in, drop_at = at + _drop_in
          WHERE r.id = _id AND r.service = _service;
        END IF;
        PERFORM idempotency.file(_service, _id, _state, _token, at + _due_in, at + _drop_in, _head);
        done := true;
        version := at;
        waiting := CASE _state WHEN 1 THEN '' ELSE idempotency.waiting(_service, _id) END;
        RETURN;
      END IF;
    ELSIF stored.drop_at > at THEN
      done := false;
      IF stored.token <> _token THEN RETURN; END IF;
      -- Its own, whose reply was lost: the standby may not have it. Taking the row lock writes WAL, so this commit waits for the standby.
      PERFORM 1 FROM idempotency.records r WHERE r.id = _id AND r.service = _service FOR KEY SHARE;
      IF FOUND THEN RETURN; END IF;
    ELSE
      -- Behind whoever does the same.
      PERFORM idempotency.discard(_service, _id, at, true);
    END IF;
    tries := tries + 1;
    IF tries > 10 THEN
      RAISE EXCEPTION 'others keep moving the record on' USING ERRCODE = 'serialization_failure';
    END IF;
  END LOOP;
END $$;

CREATE OR REPLACE FUNCTION idempotency.swap(
  _service text, _id text, _skew bigint, _wait integer,
  _if_version bigint, _if_token bytea, _if_states smallint[],
  _schema smallint, _state smallint, _fence bigint, _token bytea, _head bytea, _payload bytea, _due_in bigint, _drop_in bigint, _more integer,
  _grace bigint, _seen bigint,
  OUT at bigint, OUT done boolean, OUT version bigint, OUT fence bigint, OUT created_at bigint, OUT waiting text,
  OUT remaining bigint, OUT since bigint, OUT stored idempotency.stored
) LANGUAGE plpgsql AS $$
DECLARE
  taken record;
BEGIN
  PERFORM idempotency.start(_wait);
  SELECT * INTO taken FROM idempotency.take(_service, _id, _skew);
  at := taken.at;
  done := false;
  IF NOT taken.is_there THEN RETURN; END IF;
  stored := taken.stored;
  -- NULL counts as false.
  IF (stored.schema = 1 AND CASE WHEN _if_version IS NULL THEN stored.token = _if_token AND stored.state = ANY (_if_states)
    ELSE stored.version = _if_version END) IS NOT TRUE THEN
    -- Its upstream has finished it, and leaves to the owner what is left to do: to take out the lease, and to tell those who wait.
    IF stored.schema = 1 AND stored.state = 2 AND stored.token = _if_token THEN
      PERFORM idempotency.fold(_service, _id);
      waiting := idempotency.waiting(_service, _id);
    END IF;
    RETURN;
  END IF;
  IF _more > 0 THEN
    -- The state that allows it may be an old one, to which a failover went back.
    SELECT h.remaining, h.since INTO remaining, since FROM idempotency.held(_service, _skew, 0, _grace, _seen) h;
    IF remaining > 0 THEN
      PERFORM set_config('synchronous_commit', 'off', true);
      at := idempotency.now(_skew);
      RETURN;
    END IF;
  END IF;
  done := true;
  version := stored.version + 1;
  fence := greatest(stored.fence + _more, _fence);
  created_at := stored.created_at;
  stored := NULL;
  UPDATE idempotency.records r
  SET schema = _schema, state = _state, version = swap.version, fence = swap.fence, token = _token, updated_at = swap.at,
    due = swap.at + _due_in, drop_at = swap.at + _drop_in, head = _head, payload = _payload
  WHERE r.id = _id AND r.service = _service AND r.version = taken.own_version;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'the record that was read is not the one that is there' USING ERRCODE = 'serialization_failure';
  END IF;
  PERFORM idempotency.file(_service, _id, _state, _token, at + _due_in, at + _drop_in, _head);
  waiting := CASE _state WHEN 1 THEN '' ELSE idempotency.waiting(_service, _id) END;
END $$;

-- `put` for many: claims of keys that the service mostly does not have, with one commit. First a row for the statement, then one for each item
-- that is decided. An item without a row was not touched: what is not as simple as most is left to `put`. Waits for nobody but another who is
-- claiming the same. OFFSET 0: whatever the planner knows of the tables, which are new and empty when it plans, it looks for each id by itself.
CREATE OR REPLACE FUNCTION idempotency.claims(
  _service text, _skew bigint, _wait integer, _grace bigint, _seen bigint, _ids text[], _entries integer[],
  _fences bigint[], _created_at bigint[], _due_in bigint[], _drop_in bigint[], _starts integer[], _payloads integer[], _ends integer[], _bytes bytea
) RETURNS TABLE (
  id text, at bigint, done boolean, version bigint, fence bigint, created_at bigint, waiting text, stored idempotency.stored
) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
  refused bigint;
  is_held boolean;
  own text[];
BEGIN
  PERFORM idempotency.start(_wait);
  at := idempotency.now(_skew);
  RETURN NEXT;
  -- Of others, and in time.
  RETURN QUERY SELECT i.id, claims.at, false, NULL::bigint, NULL::bigint, NULL::bigint, NULL::text, s.stored
  FROM unnest(_ids, _starts) AS i (id, start),
    LATERAL (SELECT x FROM idempotency.stored x WHERE x.id = i.id AND x.service = _service OFFSET 0) AS s (stored)
  WHERE (s.stored).drop_at > claims.at AND (s.stored).token <> substr(_bytes, i.start + 17, 16);
  GET DIAGNOSTICS refused = ROW_COUNT;
  IF refused = cardinality(_ids) THEN RETURN; END IF;
  -- After the look at records, as in `put`.
  SELECT h.remaining > 0 INTO is_held FROM idempotency.held(_service, _skew, 0, _grace, _seen) h;
  WITH claimed AS (
    INSERT INTO idempotency.records AS r (id, service, schema, state, version, fence, token, created_at, updated_at, due, drop_at, head, payload)
    SELECT i.id, _service, 1, 1, claims.at, coalesce(nullif(i.fence, 0), claims.at), substr(_bytes, i.start + 17, 16),
      coalesce(nullif(i.created_at, 0), claims.at), claims.at, claims.at + i.due_in, claims.at + i.drop_in,
      substr(_bytes, i.start + 57, i.payload - i.start - 56), substr(_bytes, i.payload + 1, i.ending - i.payload)
    FROM unnest(_ids, _entries, _fences, _created_at, _due_in, _drop_in, _starts, _payloads, _ends)
      AS i (id, entry, fence, created_at, due_in, drop_in, start, payload, ending)
    WHERE NOT (is_held AND i.entry = 0)
      AND NOT EXISTS (SELECT FROM idempotency.records x WHERE x.id = i.id AND x.service = _service OFFSET 0)
    -- Two of these wait for each other in one direction only.
    ORDER BY i.id COLLATE "C"
    ON CONFLICT ON CONSTRAINT records_pkey DO NOTHING
    RETURNING r.id
  )
  SELECT array_agg(c.id) INTO own FROM claimed c;
  IF own IS NULL THEN
    PERFORM set_config('synchronous_commit', 'off', true);
    RETURN;
  END IF;
  -- As in `put`: it may have waited.
  IF idempotency.now(_skew) > at + 5 THEN
    at := idempotency.now(_skew);
    UPDATE idempotency.records r SET version = claims.at, fence = coalesce(nullif(i.fence, 0), claims.at),
      created_at = coalesce(nullif(i.created_at, 0), claims.at), updated_at = claims.at, due = claims.at + i.due_in, drop_at = claims.at + i.drop_in
    FROM unnest(_ids, _fences, _created_at, _due_in, _drop_in) AS i (id, fence, created_at, due_in, drop_in)
    WHERE r.id = i.id AND r.service = _service AND r.id = ANY (own);
  END IF;
  RETURN QUERY WITH claimed AS (
    SELECT i.* FROM unnest(_ids, _fences, _created_at, _due_in, _drop_in, _starts) AS i (id, fence, created_at, due_in, drop_in, start)
    WHERE i.id = ANY (own)
  ), filed AS (
    INSERT INTO idempotency.unresolved AS u (id, service, state, token, due, drop_at, renewals)
    SELECT c.id, _service, 1, substr(_bytes, c.start + 17, 16), claims.at + c.due_in, claims.at + c.drop_in, 0 FROM claimed c
    ON CONFLICT ON CONSTRAINT unresolved_pkey
    DO UPDATE SET state = 1, token = excluded.token, due = excluded.due, drop_at = excluded.drop_at, renewals = 0
  )
  SELECT c.id, claims.at, true, claims.at, coalesce(nullif(c.fence, 0), claims.at), coalesce(nullif(c.created_at, 0), claims.at), '',
    NULL::idempotency.stored
  FROM claimed c;
END $$;

-- `swap` for many: attempts end, each under its own token. As `claims`: what is refused, locked or expired is left to `swap`. Waits for nobody
-- but a renewal. _accepted: a bit for each state.
CREATE OR REPLACE FUNCTION idempotency.outcomes(
  _service text, _skew bigint, _wait integer, _ids text[], _accepted integer[], _states smallint[],
  _fences bigint[], _due_in bigint[], _drop_in bigint[], _starts integer[], _payloads integer[], _ends integer[], _bytes bytea
) RETURNS TABLE (
  id text, at bigint, done boolean, version bigint, fence bigint, created_at bigint, waiting text, stored idempotency.stored
) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
  own text[];
  renewed text[];
  times bigint[];
BEGIN
  PERFORM idempotency.start(_wait);
  at := idempotency.now(_skew);
  RETURN NEXT;
  SELECT array_agg(r.id) INTO own FROM unnest(_ids, _accepted, _starts) AS i (id, accepted, start), LATERAL (
    SELECT x.id FROM idempotency.records x
    WHERE x.id = i.id AND x.service = _service AND x.schema = 1 AND x.drop_at > outcomes.at
      AND x.token = substr(_bytes, i.start + 17, 16) AND 1 << x.state & i.accepted > 0
    FOR NO KEY UPDATE SKIP LOCKED
  ) AS r;
  -- Not by the index of services, which the planner might take.
  WITH gone AS (
    DELETE FROM idempotency.unresolved u WHERE u.id = ANY (own) AND u.service || '' = _service RETURNING u.id, u.renewals
  )
  SELECT array_agg(g.id), array_agg(g.renewals) INTO renewed, times FROM gone g WHERE g.renewals > 0;
  at := idempotency.now(_skew);
  RETURN QUERY WITH ended AS (
    UPDATE idempotency.records r
    SET state = i.state, fence = greatest(r.fence, i.fence), updated_at = outcomes.at, due = outcomes.at + i.due_in, drop_at = outcomes.at + i.drop_in,
      version = r.version + 1 + coalesce((SELECT l.times FROM unnest(renewed, times) AS l (id, times) WHERE l.id = r.id), 0),
      head = substr(_bytes, i.start + 57, i.payload - i.start - 56), payload = substr(_bytes, i.payload + 1, i.ending - i.payload)
    FROM unnest(_ids, _states, _fences, _due_in, _drop_in, _starts, _payloads, _ends)
      AS i (id, state, fence, due_in, drop_in, start, payload, ending)
    WHERE r.id = i.id AND r.service = _service AND r.id = ANY (own)
    RETURNING r.id, r.version, r.fence, r.created_at, r.state, r.token, r.due, r.drop_at,
      -- As in `file`.
      CASE WHEN r.state = 4 THEN r.due
        WHEN r.state = 2 AND length(r.head) > 4 AND get_byte(r.head, 4) & 4 > 0 THEN idempotency.bodies_from() + r.due END AS place
  ), filed AS (
    INSERT INTO idempotency.unresolved (id, service, state, token, due, drop_at, renewals)
    SELECT e.id, _service, e.state, e.token, e.place, e.drop_at, 0 FROM ended e WHERE e.place IS NOT NULL
  )
  -- As `waiting`, which would be one call for each.
  SELECT e.id, outcomes.at, true, e.version, e.fence, e.created_at,
    coalesce((SELECT string_agg(w.channel, ' ') FROM idempotency.waits w WHERE w.id = e.id AND w.service = _service), ''),
    NULL::idempotency.stored
  FROM ended e;
END $$;

-- Of records in progress, by writing the lease alone. Those that somebody is at work on are passed over: one must not keep the others.
CREATE OR REPLACE FUNCTION idempotency.renew(
  _service text, _skew bigint, _wait integer, _ids text[], _tokens bytea[], _due_in bigint[], _drop_in bigint[],
  OUT renewed text
) LANGUAGE plpgsql AS $$
DECLARE
  at bigint := idempotency.now(_skew);
BEGIN
  PERFORM idempotency.start(_wait);
  WITH own AS (
    SELECT u.id, i.due_in, i.drop_in FROM unnest(_ids, _tokens, _due_in, _drop_in) AS i (id, token, due_in, drop_in)
    JOIN idempotency.unresolved u ON u.id = i.id AND u.service = _service AND u.token = i.token AND u.state = 1 AND u.drop_at > at
    WHERE EXISTS (SELECT FROM idempotency.records r WHERE r.id = i.id AND r.service = _service AND r.schema = 1 AND r.state = 1)
    FOR UPDATE OF u SKIP LOCKED
  ), prolonged AS (
    UPDATE idempotency.unresolved u
    SET due = at + own.due_in, drop_at = greatest(u.drop_at, at + own.drop_in), renewals = u.renewals + 1
    FROM own WHERE u.id = own.id AND u.service = _service
    RETURNING u.id
  )
  SELECT coalesce(string_agg(p.id, ' '), '') INTO renewed FROM prolonged p;
END $$;

-- Of one record, which is in progress under this token, or unknown under it by nothing but its owner's silence: then in progress again.
CREATE OR REPLACE FUNCTION idempotency.revive(
  _service text, _id text, _skew bigint, _wait integer, _token bytea, _due_in bigint, _drop_in bigint,
  OUT done boolean
) LANGUAGE plpgsql AS $$
DECLARE
  taken record;
  s idempotency.stored;
BEGIN
  PERFORM idempotency.start(_wait);
  SELECT * INTO taken FROM idempotency.take(_service, _id, _skew);
  s := taken.stored;
  done := false;
  IF NOT taken.is_there OR s.schema <> 1 OR s.token <> _token OR s.state NOT IN (1, 4) THEN RETURN; END IF;
  IF s.state = 4 AND (length(s.head) < 5 OR get_byte(s.head, 4) & 1 = 0) THEN RETURN; END IF;
  done := true;
  s.due := taken.at + _due_in;
  s.drop_at := greatest(s.drop_at, taken.at + _drop_in);
  UPDATE idempotency.records r
  SET state = 1, version = s.version + 1, due = s.due, drop_at = s.drop_at,
    head = CASE WHEN length(r.head) < 5 THEN r.head ELSE set_byte(r.head, 4, 0) END
  WHERE r.id = _id AND r.service = _service AND r.version = taken.own_version;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'the record that was read is not the one that is there' USING ERRCODE = 'serialization_failure';
  END IF;
  PERFORM idempotency.file(_service, _id, 1::smallint, _token, s.due, s.drop_at, s.head);
END $$;

CREATE OR REPLACE FUNCTION idempotency.remove(
  _service text, _id text, _skew bigint, _wait integer, _version bigint,
  OUT done boolean, OUT waiting text
) LANGUAGE plpgsql AS $$
DECLARE
  taken record;
  s idempotency.stored;
BEGIN
  PERFORM idempotency.start(_wait);
  SELECT * INTO taken FROM idempotency.take(_service, _id, _skew);
  s := taken.stored;
  done := taken.is_there AND s.version = _version;
  IF NOT done THEN RETURN; END IF;
  PERFORM idempotency.erase(_service, _id);
  waiting := idempotency.waiting(_service, _id);
END $$;

-- The places of the index after one of them, in order, as "due id,due id". _what: "due" and "bodies", those whose time has come of unresolved
-- records and of responses that end before their records; "list", those of all unresolved records, of an unknown schema, too.
CREATE OR REPLACE FUNCTION idempotency.places(
  _service text, _skew bigint, _wait integer, _what text, _after_due bigint, _after_id text, _limit integer, OUT listed text
) LANGUAGE plpgsql AS $$
DECLARE
  at bigint := idempotency.now(_skew);
  last bigint := CASE _what WHEN 'due' THEN at WHEN 'bodies' THEN idempotency.bodies_from() + at ELSE idempotency.bodies_from() - 1 END;
  finished text[];
BEGIN
  PERFORM idempotency.start(_wait);
  IF _what = 'due' THEN
    -- Leases of owners that died after idempotency.complete. They would be in the way of the others.
    SELECT array_agg(d.id) INTO finished FROM (
      SELECT u.id FROM idempotency.unresolved u WHERE u.service = _service AND u.due <= at ORDER BY u.due, u.id LIMIT _limit
    ) d JOIN idempotency.records r ON r.id = d.id AND r.service = _service AND r.state = 2;
    IF finished IS NOT NULL THEN
      PERFORM idempotency.fold(_service, d.id) FROM (
        SELECT r.id FROM idempotency.records r JOIN idempotency.unresolved u ON u.id = r.id AND u.service = r.service
        WHERE r.id = ANY (finished) AND r.service = _service AND r.state = 2
        FOR NO KEY UPDATE OF r SKIP LOCKED FOR UPDATE OF u SKIP LOCKED
      ) d;
    END IF;
  END IF;
  SELECT coalesce(string_agg(d.due || ' ' || d.id, ',' ORDER BY d.due, d.id), '') INTO listed FROM (
    SELECT u.id, u.due FROM idempotency.unresolved u
    JOIN idempotency.records r ON r.id = u.id AND r.service = u.service AND r.token = u.token
    WHERE u.service = _service AND (u.due, u.id) > (_after_due, _after_id) AND u.due <= last AND u.drop_at > at
      AND r.state = ANY (CASE WHEN _what = 'bodies' THEN '{2}' ELSE '{1,4}' END::smallint[]) AND (r.schema = 1 OR _what = 'list')
    ORDER BY u.due, u.id LIMIT _limit
  ) d;
END $$;

-- No character of an id sorts after ~.
CREATE OR REPLACE FUNCTION idempotency.list(
  _service text, _skew bigint, _wait integer, _beginning text, _after text, _limit integer, OUT ids text
) LANGUAGE plpgsql AS $$
DECLARE
  at bigint := idempotency.now(_skew);
BEGIN
  PERFORM idempotency.start(_wait);
  SELECT coalesce(string_agg(d.id, ' ' ORDER BY d.id), '') INTO ids FROM (
    SELECT s.id FROM idempotency.stored s
    WHERE s.service = _service AND s.id > _after AND s.id >= _beginning AND s.id < _beginning || '~' AND s.drop_at > at
    ORDER BY s.id LIMIT _limit
  ) d;
END $$;

CREATE OR REPLACE FUNCTION idempotency.ping(_skew bigint, _wait integer, OUT at bigint) LANGUAGE plpgsql AS $$
BEGIN
  PERFORM idempotency.start(_wait);
  at := idempotency.now(_skew);
END $$;

-- As history.ts. Locks the record against removal alone, so no history outlives it. Not worth a wait for the disk.
CREATE OR REPLACE FUNCTION idempotency.note(
  _service text, _id text, _skew bigint, _wait integer,
  _tags text[], _counts bigint[], _first_ago bigint[], _last_ago bigint[], _texts text[], OUT done boolean
) LANGUAGE plpgsql AS $$
DECLARE
  at bigint;
  s idempotency.stored;
  n idempotency.notes;
  newest text;
  count bigint;
  first bigint;
BEGIN
  PERFORM idempotency.start(_wait), set_config('synchronous_commit', 'off', true);
  PERFORM 1 FROM idempotency.records r WHERE r.id = _id AND r.service = _service FOR KEY SHARE;
  done := FOUND;
  IF NOT done THEN RETURN; END IF;
  at := idempotency.now(_skew);
  SELECT x.* INTO s FROM idempotency.stored x WHERE x.id = _id AND x.service = _service AND x.drop_at > at;
  done := s.id IS NOT NULL AND s.schema = 1;
  IF NOT done THEN RETURN; END IF;
  INSERT INTO idempotency.notes (id, service, created_at, lines) VALUES (_id, _service, s.created_at, '{}') ON CONFLICT DO NOTHING;
  SELECT x.* INTO n FROM idempotency.notes x WHERE x.id = _id AND x.service = _service FOR UPDATE;
  IF n.created_at <> s.created_at THEN n.lines := '{}'; END IF;
  FOR i IN 1 .. cardinality(_tags) LOOP
    newest := n.lines[cardinality(n.lines)];
    count := _counts[i];
    first := at - _first_ago[i];
    IF split_part(newest, ' ', 1) = _tags[i] THEN
      count := count + split_part(newest, ' ', 2)::bigint;
      first := split_part(newest, ' ', 3)::bigint;
      n.lines := n.lines[:cardinality(n.lines) - 1];
    END IF;
    n.lines := n.lines || concat_ws(' ', _tags[i], count, first, at - _last_ago[i], _texts[i]);
    IF cardinality(n.lines) > 50 THEN
      n.lines := n.lines[:10] || n.lines[12:];
    END IF;
  END LOOP;
  UPDATE idempotency.notes x SET created_at = s.created_at, lines = n.lines WHERE x.id = _id AND x.service = _service;
END $$;

CREATE OR REPLACE FUNCTION idempotency.notes_of(
  _service text, _id text, _skew bigint, _wait integer, OUT lines json
) LANGUAGE plpgsql AS $$
DECLARE
  at bigint := idempotency.now(_skew);
BEGIN
  PERFORM idempotency.start(_wait);
  SELECT to_json(n.lines) INTO lines FROM idempotency.notes n
  JOIN idempotency.stored s ON s.id = n.id AND s.service = n.service AND s.created_at = n.created_at
  WHERE n.id = _id AND n.service = _service AND s.schema = 1 AND s.drop_at > at;
END $$;

-- As gcra.ts.
CREATE OR REPLACE FUNCTION idempotency.throttle(
  _service text, _id text, _skew bigint, _wait integer, _count bigint, _per bigint, _units integer,
  OUT wait bigint
) LANGUAGE plpgsql AS $$
DECLARE
  _at bigint;
  b idempotency.buckets;
  most numeric := _count::numeric * _per;
  _debt numeric;
BEGIN
  PERFORM idempotency.start(_wait), set_config('synchronous_commit', 'off', true);
  LOOP
    SELECT x.* INTO b FROM idempotency.buckets x WHERE x.id = _id AND x.service = _service FOR UPDATE;
    _at := idempotency.now(_skew);
    _debt := CASE WHEN b.id IS NULL THEN 0
      ELSE greatest(0, least(most, ceil(b.debt::numeric * _count / b.count)) - abs(_at - b.at)::numeric * _count) END;
    IF _debt + _units * _per > most THEN
      wait := ceil((_debt + _per - most) / _count);
      RETURN;
    END IF;
    _debt := _debt + _units * _per;
    wait := 0;
    IF _debt <= 0 THEN
      DELETE FROM idempotency.buckets x WHERE x.id = _id AND x.service = _service;
      RETURN;
    ELSIF b.id IS NOT NULL THEN
      UPDATE idempotency.buckets x SET at = _at, debt = _debt, count = _count, full_at = _at + ceil(_debt / _count)
      WHERE x.id = _id AND x.service = _service;
      RETURN;
    END IF;
    INSERT INTO idempotency.buckets (id, service, at, debt, count, full_at) VALUES (_id, _service, _at, _debt, _count, _at + ceil(_debt / _count))
    ON CONFLICT DO NOTHING;
    EXIT WHEN FOUND;
  END LOOP;
END $$;

-- From when it returns no end of an attempt goes unnoticed: whoever is writing one has committed, and whoever will sees the row.
CREATE OR REPLACE FUNCTION idempotency.watch(
  _service text, _id text, _skew bigint, _wait integer, _channel text
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM idempotency.start(_wait), set_config('synchronous_commit', 'off', true);
  PERFORM 1 FROM idempotency.records r WHERE r.id = _id AND r.service = _service FOR SHARE;
  INSERT INTO idempotency.waits AS w (id, service, channel, since) VALUES (_id, _service, _channel, idempotency.now(_skew))
  ON CONFLICT (id, service, channel) DO UPDATE SET since = excluded.since;
END $$;

CREATE OR REPLACE FUNCTION idempotency.unwatch(_service text, _id text, _channel text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  DELETE FROM idempotency.waits w WHERE w.id = _id AND w.service = _service AND w.channel = _channel;
END $$;

-- A transaction of its own: NOTIFY takes a lock on the whole server until it ends.
CREATE OR REPLACE FUNCTION idempotency.tell(_channels text[], _message text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  PERFORM pg_notify(c, _message) FROM unnest(_channels) AS c;
END $$;

-- Removes expired records of all services from some pages of the table, and goes round it so: no index is needed, which every record would
-- pay for. What anybody is at work on is passed over. However many replicas ask, it is done once in so many milliseconds.
CREATE OR REPLACE FUNCTION idempotency.prune(
  _skew bigint, _wait integer, _every integer, _pages integer, _limit integer, OUT pruned bigint
) LANGUAGE plpgsql AS $$
DECLARE
  _at bigint := idempotency.now(_skew);
  size bigint := pg_relation_size('idempotency.records') / current_setting('block_size')::bigint;
  p idempotency.pruning;
BEGIN
  pruned := 0;
  PERFORM idempotency.start(_wait), set_config('synchronous_commit', 'off', true);
  SELECT x.* INTO p FROM idempotency.pruning x WHERE x.done_at NOT BETWEEN _at - _every + 1 AND _at FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN RETURN; END IF;
  SELECT count(*) FILTER (WHERE idempotency.discard(d.service, d.id, _at, false)) INTO pruned FROM (
    SELECT r.service, r.id FROM idempotency.records r
    WHERE r.ctid >= format('(%s,0)', p.page)::tid AND r.ctid < format('(%s,0)', p.page + _pages)::tid AND r.drop_at <= _at
      AND NOT EXISTS (SELECT FROM idempotency.stored s WHERE s.id = r.id AND s.service = r.service AND s.drop_at > _at)
    LIMIT _limit FOR UPDATE OF r SKIP LOCKED
  ) d;
  IF pruned >= _limit THEN
    -- These pages again, and at once.
    UPDATE idempotency.pruning x SET done_at = 0;
    RETURN;
  END IF;
  UPDATE idempotency.pruning x SET done_at = _at, page = CASE WHEN p.page + _pages >= size THEN 0 ELSE p.page + _pages END;
  DELETE FROM idempotency.buckets b WHERE b.ctid = ANY (ARRAY(
    SELECT x.ctid FROM idempotency.buckets x WHERE x.full_at <= _at LIMIT _limit FOR UPDATE SKIP LOCKED));
  -- Of replicas that have gone.
  DELETE FROM idempotency.waits w WHERE w.ctid = ANY (ARRAY(
    SELECT x.ctid FROM idempotency.waits x WHERE x.since <= _at - 3600000 LIMIT _limit FOR UPDATE SKIP LOCKED));
END $$;

-- A length and as many bytes of a stored record (docs/record-format.md): where they end.
CREATE OR REPLACE FUNCTION idempotency.text_end(_bytes bytea, _from integer) RETURNS integer LANGUAGE sql IMMUTABLE AS $$
  -- Of `<<` and `|`, neither goes first.
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

-- Header lines as the record has them; raises if one cannot be sent. These rules are those of an operator's answer (`resolve`).
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
      RAISE EXCEPTION 'headers: the value of % is not one of a header line; allowed: Latin-1 without control characters, no blanks around it', _name
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

-- For the upstream, in its own transaction (docs/postgres.md): ends its attempt with this answer. Raises if the attempt may not end it, so
-- that nothing else of that transaction stands either. False: an earlier transaction of this attempt has committed this very answer.
-- Writes the record and nothing else: a renewal neither waits for that transaction nor makes it fail, under any isolation level.
-- It runs with the rights of the schema's owner and the settings of any caller: no dynamic SQL, no backslash in a literal.
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
  -- The extension `completion` of the record, and so that of a route that has told its upstream of the record.
  terms bigint[];
  ttl bigint;
  -- How long the record answers after its response (`ttl.body`).
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

  -- A plain head is no shorter (docs/record-format.md).
  IF octet_length(r.head) < 4 + 91 THEN
    RAISE EXCEPTION 'the record is sealed (store.encryption): its upstream cannot end it' USING ERRCODE = 'object_not_in_prerequisite_state';
  END IF;

  -- Behind the length of all, the flags, attempts and two digests: recipe, route, method and path stay, as all before them but the flags; the
  -- error and the status go; the extensions stay; the result is new.
  error_at := 71;
  FOR n IN 1 .. 4 LOOP
    error_at := idempotency.text_end(r.head, error_at);
  END LOOP;
  extensions_at := idempotency.text_end(r.head, error_at) + 2;
  result_at := extensions_at + 1;
  FOR n IN 1 .. get_byte(r.head, extensions_at) LOOP
    name_end := idempotency.text_end(r.head, result_at);
    value_end := idempotency.text_end(r.head, name_end);
    -- Of an earlier call, and the last one.
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

  -- A repeat gets the Date of the first time.
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
    -- Too large, or of a route that keeps the outcome alone.
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

-- Whatever path the caller or its role has: nobody who may make things in another schema has a say in these.
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
