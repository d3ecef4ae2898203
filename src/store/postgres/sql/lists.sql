-- Lists, histories, rate limits, watchers, and the removal of what has expired.

-- Entries of the index after the given one, in order, as "due id,due id". _what: "due": unresolved records whose time has come; "bodies":
-- the same for responses that end before their records; "list": all unresolved records, including those of an unknown schema.
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
    -- Otherwise leases whose owners died after idempotency.complete would use up the limit.
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

-- Ids in order. "~" sorts after every character of an id.
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

-- Like `noted` in side-ports.ts. Locks the record only against removal, so that no history outlives it. Does not wait for the disk.
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

-- The algorithm of `drawFromBucket` in side-ports.ts.
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

-- Once it has returned, no end of an attempt is missed: a writer either committed before or sees this row.
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

-- In its own transaction, since NOTIFY holds a server-wide lock until the commit.
CREATE OR REPLACE FUNCTION idempotency.tell(_channels text[], _message text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  PERFORM pg_notify(c, _message) FROM unnest(_channels) AS c;
END $$;

-- Removes expired records of all services from the next pages of the table, in a circle: an index on the expiry would cost every write. Skips
-- locked records. Works at most once in _every milliseconds, however many replicas call it.
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
    -- There may be more on these pages.
    UPDATE idempotency.pruning x SET done_at = 0;
    RETURN;
  END IF;
  UPDATE idempotency.pruning x SET done_at = _at, page = CASE WHEN p.page + _pages >= size THEN 0 ELSE p.page + _pages END;
  DELETE FROM idempotency.buckets b WHERE b.ctid = ANY (ARRAY(
    SELECT x.ctid FROM idempotency.buckets x WHERE x.full_at <= _at LIMIT _limit FOR UPDATE SKIP LOCKED));
  -- Left by replicas that have ended.
  DELETE FROM idempotency.waits w WHERE w.ctid = ANY (ARRAY(
    SELECT x.ctid FROM idempotency.waits x WHERE x.since <= _at - 3600000 LIMIT _limit FOR UPDATE SKIP LOCKED));
END $$;
