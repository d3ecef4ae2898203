-- What the PostgreSQL store of idempotency-proxy needs, made by the first proxy that may, or by hand (`migrate --print`). Running it again
-- changes nothing. If the proxy's role is another than the one that runs this, it needs:
--   GRANT USAGE ON SCHEMA idempotency TO <role>;
--   GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA idempotency TO <role>;
--   GRANT SELECT ON idempotency.layout, idempotency.stored TO <role>;
--   GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency.records, idempotency.unresolved, idempotency.notes, idempotency.buckets,
--     idempotency.waits, idempotency.pruning, idempotency.epochs, idempotency.graces TO <role>;
-- An upstream that finishes its attempts itself (docs/postgres.md) has a role of its own, which needs:
--   GRANT USAGE ON SCHEMA idempotency TO <upstream>;
--   GRANT EXECUTE ON FUNCTION idempotency.complete TO <upstream>;
BEGIN;
SET LOCAL lock_timeout = '4s';
SET LOCAL search_path = pg_catalog, pg_temp;

-- One at a time: replicas start together.
SELECT pg_advisory_xact_lock(7236832157210483000);
-- Whoever waits for a table has everybody else wait behind. What is there already is not even locked: in the blocks below, each CREATE and
-- ALTER is behind a look at the catalog.
SET LOCAL lock_timeout = '250ms';

-- What a later release has made is left as it is.
DO $$
DECLARE
  later boolean := false;
BEGIN
  IF to_regclass('idempotency.layout') IS NOT NULL THEN
    SELECT l.version > 1 OR l.revision > 9 INTO later FROM idempotency.layout l;
  END IF;
  IF later THEN
    RAISE EXCEPTION 'a later release of idempotency-proxy has changed the schema idempotency' USING ERRCODE = 'object_in_use';
  END IF;
END $$;

-- Who owns the schema can put something else in the place of what is made here.
DO $$
DECLARE
  owner name;
BEGIN
  SELECT pg_get_userbyid(n.nspowner) INTO owner FROM pg_namespace n WHERE n.nspname = 'idempotency' AND NOT pg_has_role(n.nspowner, 'USAGE');
  IF FOUND THEN
    RAISE EXCEPTION 'the schema belongs to %, and % is no member of that role', owner, current_user USING ERRCODE = 'insufficient_privilege';
  END IF;
  -- IF NOT EXISTS asks for the right to make one, too.
  IF to_regnamespace('idempotency') IS NULL THEN
    CREATE SCHEMA idempotency;
  END IF;
END $$;

-- The version changes with the tables, and no release uses one that it does not know. The revision changes with the functions, of which
-- later ones do for earlier releases, too.
CREATE TABLE IF NOT EXISTS idempotency.layout (
  only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
  version integer NOT NULL,
  revision integer NOT NULL
);

-- Times are milliseconds since 1970. No index but the key: completing a record changes no indexed column, so the new row takes the place of
-- the old one on its page (HOT), and nothing is left for VACUUM in the index. head and payload: docs/record-format.md.
DO $$ BEGIN
IF to_regclass('idempotency.records') IS NULL THEN
CREATE TABLE idempotency.records (
  version bigint NOT NULL,
  fence bigint NOT NULL,
  created_at bigint NOT NULL,
  updated_at bigint NOT NULL,
  due bigint NOT NULL,
  drop_at bigint NOT NULL,
  schema smallint NOT NULL,
  state smallint NOT NULL,
  id text COLLATE "C" NOT NULL,
  service text COLLATE "C" NOT NULL,
  token bytea NOT NULL,
  head bytea NOT NULL,
  payload bytea NOT NULL,
  PRIMARY KEY (id, service)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05);
-- Answers are often compressed already.
ALTER TABLE idempotency.records ALTER COLUMN payload SET STORAGE EXTERNAL;
END IF;
END $$;

-- Leases live here: a renewal writes no record. Of a record that is in progress or unknown these say when it is due and gone, and each
-- renewal is one version more. A row whose record says otherwise means nothing.
DO $$ BEGIN
IF to_regclass('idempotency.unresolved') IS NULL THEN
CREATE TABLE idempotency.unresolved (
  due bigint NOT NULL,
  drop_at bigint NOT NULL,
  renewals bigint NOT NULL,
  state smallint NOT NULL,
  id text COLLATE "C" NOT NULL,
  service text COLLATE "C" NOT NULL,
  token bytea NOT NULL,
  PRIMARY KEY (id, service)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX unresolved_due ON idempotency.unresolved (service, due, id);
END IF;
END $$;

-- Histories. created_at says of which record under that id.
CREATE TABLE IF NOT EXISTS idempotency.notes (
  created_at bigint NOT NULL,
  id text COLLATE "C" NOT NULL,
  service text COLLATE "C" NOT NULL,
  lines text[] NOT NULL,
  PRIMARY KEY (id, service)
) WITH (fillfactor = 80);

-- Rate limits, lost in a crash: it harms nobody.
CREATE UNLOGGED TABLE IF NOT EXISTS idempotency.buckets (
  at bigint NOT NULL,
  debt bigint NOT NULL,
  count bigint NOT NULL,
  full_at bigint NOT NULL,
  id text COLLATE "C" NOT NULL,
  service text COLLATE "C" NOT NULL,
  PRIMARY KEY (id, service)
) WITH (fillfactor = 80);

-- Who listens for the end of an attempt, by channel: only then is anybody notified. Whoever loses a message polls.
CREATE UNLOGGED TABLE IF NOT EXISTS idempotency.waits (
  since bigint NOT NULL,
  id text COLLATE "C" NOT NULL,
  service text COLLATE "C" NOT NULL,
  channel text COLLATE "C" NOT NULL,
  PRIMARY KEY (id, service, channel)
);

-- How far the removal of expired records has come.
CREATE TABLE IF NOT EXISTS idempotency.pruning (
  only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
  page bigint NOT NULL,
  done_at bigint NOT NULL
);
INSERT INTO idempotency.pruning (page, done_at) VALUES (0, 0) ON CONFLICT DO NOTHING;

-- Which life of which server this is, as far as proxies have noticed (docs/adr/0091).
CREATE TABLE IF NOT EXISTS idempotency.epochs (
  service text COLLATE "C" PRIMARY KEY,
  started timestamptz,
  file oid
);
-- Since when that is so, and until when claims are held. A crash empties it, which is how a crash is noticed.
CREATE UNLOGGED TABLE IF NOT EXISTS idempotency.graces (
  since bigint NOT NULL,
  till bigint NOT NULL,
  service text COLLATE "C" PRIMARY KEY
);

-- Records with their leases. Those that idempotency.complete has finished still have one, which goes on counting as part of the version.
DO $$ BEGIN
IF to_regclass('idempotency.stored') IS NULL THEN
CREATE VIEW idempotency.stored AS
SELECT r.id, r.service, r.schema, r.state, r.fence, r.token, r.created_at, r.updated_at, r.head, r.payload,
  r.version + coalesce(u.renewals, 0) AS version,
  CASE WHEN r.state IN (1, 4) THEN coalesce(u.due, r.due) ELSE r.due END AS due,
  CASE WHEN r.state IN (1, 4) THEN greatest(u.drop_at, r.drop_at) ELSE r.drop_at END AS drop_at
FROM idempotency.records r
LEFT JOIN idempotency.unresolved u ON u.id = r.id AND u.service = r.service AND u.token = r.token;
END IF;
END $$;
