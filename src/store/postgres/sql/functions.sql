-- Every operation is one call: one round trip, one transaction. It reads before it writes, since an INSERT would wait for any uncommitted
-- change of the record.

-- The store's time.
CREATE OR REPLACE FUNCTION idempotency.now(_skew bigint) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
  RETURN trunc(extract(epoch FROM clock_timestamp()) * 1000::numeric)::bigint + _skew;
END $$;

-- Begins every operation. Refuses on a standby: a record missing there may exist on the primary. Settings of this transaction: how long it
-- waits for another one (then nothing was applied), how bytes are written, and that the proxy is warned of a commit that did not reach a
-- standby.
CREATE OR REPLACE FUNCTION idempotency.start(_wait integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF pg_is_in_recovery() THEN
    RAISE EXCEPTION 'the server is a standby' USING ERRCODE = 'IP001';
  END IF;
  PERFORM set_config('lock_timeout', _wait::text, true), set_config('bytea_output', 'hex', true), set_config('client_min_messages', 'warning', true);
END $$;

-- The channels that wait for the record; they are notified after the commit.
CREATE OR REPLACE FUNCTION idempotency.waiting(_service text, _id text) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT coalesce(string_agg(w.channel, ' '), '') FROM idempotency.waits w WHERE w.id = _id AND w.service = _service;
$$;

-- Greater than any time: added to `due` of a response that ends before its record, so that it sorts after all unresolved records.
CREATE OR REPLACE FUNCTION idempotency.bodies_from() RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
  SELECT 281474976710656::bigint;
$$;

-- Sets the index row of a record that is in progress or unknown, or whose response ends before it; deletes the row of any other.
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

-- Locks the record, then its lease (the same order everywhere), and reads both. is_there: there was a record to lock, and it has not
-- expired. own_version: without renewals. Taking the row lock writes WAL, so this commit also waits for the standby: what it returns is on
-- the standby, too.
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

-- Deletes the lease of a record that idempotency.complete has finished and the caller has locked. Its renewals stay in the version.
CREATE OR REPLACE FUNCTION idempotency.fold(_service text, _id text) RETURNS void LANGUAGE sql AS $$
  WITH gone AS (
    DELETE FROM idempotency.unresolved u WHERE u.id = _id AND u.service = _service AND u.due < idempotency.bodies_from() RETURNING u.token, u.renewals
  )
  UPDATE idempotency.records r SET version = r.version + gone.renewals FROM gone
  WHERE r.id = _id AND r.service = _service AND r.token = gone.token AND gone.renewals > 0;
  SELECT idempotency.file(r.service, r.id, r.state, r.token, r.due, r.drop_at, r.head) FROM idempotency.records r
  WHERE r.id = _id AND r.service = _service;
$$;

-- Removes a record if it has expired. False: not expired, gone, or its lease is locked and _waits is false.
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

-- The grace after a failover (docs/adr/0091): how long claims are still held (remaining), and when this server was first seen (since). A server
-- is the start time of its process and the file of its records: a promotion, a restart on an older copy, TRUNCATE and a restored dump change
-- one of them. A crash that the process survives changes neither, but empties `graces`. _entry: 0 a claim, 1 a claim of a fresh key, 2 a
-- record that is written again, 3 a check. _seen: `since` as the proxy knows it; 0: it has not asked before.
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
      -- One claim is written again: others are likely to follow.
      IF _entry = 2 AND _till > at AND least(at + 200, since + 2 * _grace) > _till THEN
        _till := least(at + 200, since + 2 * _grace);
        UPDATE idempotency.graces g SET till = _till
        WHERE g.ctid = (SELECT x.ctid FROM idempotency.graces x WHERE x.service = _service FOR UPDATE SKIP LOCKED);
      END IF;
      remaining := greatest(0, _till - at);
      RETURN;
    END IF;
    EXIT WHEN is_locked;
    -- Of the proxies that notice the change, one records it.
    INSERT INTO idempotency.epochs (service) VALUES (_service) ON CONFLICT DO NOTHING;
    PERFORM 1 FROM idempotency.epochs e WHERE e.service = _service FOR UPDATE;
    is_locked := true;
  END LOOP;
  IF NOT is_there AND _seen = 0 THEN
    -- A new store: this proxy has claimed nothing that could be lost. One that has takes the next branch.
    since := at;
    _till := at;
  ELSIF is_same AND since <= at THEN
    -- This proxy reconnects late, or another has recorded the server as new after it lost this proxy's claims.
    _till := at + _grace;
  ELSE
    -- Another server, a crash, or a clock set back: claims may be lost.
    since := at;
    _till := at + _grace;
  END IF;
  UPDATE idempotency.epochs e SET started = pg_postmaster_start_time(), file = pg_relation_filenode('idempotency.records') WHERE e.service = _service;
  INSERT INTO idempotency.graces AS g (service, since, till) VALUES (_service, held.since, _till)
  ON CONFLICT (service) DO UPDATE SET since = held.since, till = _till;
  remaining := _till - at;
END $$;

-- A proxy's periodic check of the server.
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
      -- After reading records: TRUNCATE now waits for this transaction.
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
        -- The INSERT may have waited for a claim that was rolled back or removed: the stamps must not be older than that claim's.
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
      -- This claim's own record, whose reply was lost: the standby may not have it. Taking the row lock writes WAL, so this commit waits
      -- for the standby.
      PERFORM 1 FROM idempotency.records r WHERE r.id = _id AND r.service = _service FOR KEY SHARE;
      IF FOUND THEN RETURN; END IF;
    ELSE
      -- Waits for others that discard it, too.
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
    -- The upstream has completed it by idempotency.complete. The owner still has to delete the lease and notify waiters.
    IF stored.schema = 1 AND stored.state = 2 AND stored.token = _if_token THEN
      PERFORM idempotency.fold(_service, _id);
      waiting := idempotency.waiting(_service, _id);
    END IF;
    RETURN;
  END IF;
  IF _more > 0 THEN
    -- A failover may have gone back to this state.
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

-- `put` for many claims, in one transaction. Returns a row for the statement, then one for each item that it decided. An item without a row
-- was not touched and is left to `put`, as are all special cases. Waits only for another claim of the same key. OFFSET 0 forces one index
-- lookup per id: the plan is made while the tables are empty, and kept.
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
  -- Records of other owners that have not expired.
  RETURN QUERY SELECT i.id, claims.at, false, NULL::bigint, NULL::bigint, NULL::bigint, NULL::text, s.stored
  FROM unnest(_ids, _starts) AS i (id, start),
    LATERAL (SELECT x FROM idempotency.stored x WHERE x.id = i.id AND x.service = _service OFFSET 0) AS s (stored)
  WHERE (s.stored).drop_at > claims.at AND (s.stored).token <> substr(_bytes, i.start + 17, 16);
  GET DIAGNOSTICS refused = ROW_COUNT;
  IF refused = cardinality(_ids) THEN RETURN; END IF;
  -- After reading records, as in `put`.
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
    -- Always in this order, so that two batches cannot deadlock.
    ORDER BY i.id COLLATE "C"
    ON CONFLICT ON CONSTRAINT records_pkey DO NOTHING
    RETURNING r.id
  )
  SELECT array_agg(c.id) INTO own FROM claimed c;
  IF own IS NULL THEN
    PERFORM set_config('synchronous_commit', 'off', true);
    RETURN;
  END IF;
  -- As in `put`: the INSERT may have waited.
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

-- `swap` for many attempts that end, each under its own token. As in `claims`, what is refused, locked or expired is left to `swap`. Waits only
-- for a renewal. _accepted: states that may be replaced, a bit for each.
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
  -- `|| ` keeps the planner from using the index on service.
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
  -- As `waiting`, without a call per record.
  SELECT e.id, outcomes.at, true, e.version, e.fence, e.created_at,
    coalesce((SELECT string_agg(w.channel, ' ') FROM idempotency.waits w WHERE w.id = e.id AND w.service = _service), ''),
    NULL::idempotency.stored
  FROM ended e;
END $$;

-- Renews leases of records in progress, writing only the lease. Skips locked ones, so that one cannot hold up the others.
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

-- Renews the lease of one record that is in progress under this token, or unknown only because the lease expired: then in progress again.
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
