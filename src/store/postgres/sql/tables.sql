-- The schema of the PostgreSQL store of idempotency-proxy, created by the first proxy that may, or by hand (`migrate --print`).
-- Running it again changes nothing. If the proxy's role is not the one that runs this, it needs:
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
-- A statement that waits for a table lock blocks all later ones. So nothing that exists is locked: the blocks below check the catalog
-- before each CREATE and ALTER.
SET LOCAL lock_timeout = '250ms';

-- Leave the schema of a later release as it is.
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

-- The owner of the schema could replace anything that is created here.
DO $$
DECLARE
  owner name;
BEGIN
  SELECT pg_get_userbyid(n.nspowner) INTO owner FROM pg_namespace n WHERE n.nspname = 'idempotency' AND NOT pg_has_role(n.nspowner, 'USAGE');
  IF FOUND THEN
    RAISE EXCEPTION 'the schema belongs to %, and % is not a member of that role', owner, current_user USING ERRCODE = 'insufficient_privilege';
  END IF;
  -- IF NOT EXISTS requires the privilege to create one even if it exists.
  IF to_regnamespace('idempotency') IS NULL THEN
    CREATE SCHEMA idempotency;
  END IF;
END $$;

-- The version changes with the tables; a release refuses a version that it does not know. The revision changes with the functions; earlier
-- releases can use later ones.
CREATE TABLE IF NOT EXISTS idempotency.layout (
  only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
  version integer NOT NULL,
  revision integer NOT NULL
);

-- Times are milliseconds since 1970. No index but the key: completing a record changes no indexed column, so updates are HOT and leave
-- VACUUM nothing to do in the index. head and payload: docs/record-format.md.
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

-- Leases live here: a renewal writes no record. For a record in progress or unknown, they hold the current due and drop_at, and each
-- renewal adds one to the version. Rows of other records are ignored.
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

-- Histories. created_at identifies the record under that id.
CREATE TABLE IF NOT EXISTS idempotency.notes (
  created_at bigint NOT NULL,
  id text COLLATE "C" NOT NULL,
  service text COLLATE "C" NOT NULL,
  lines text[] NOT NULL,
  PRIMARY KEY (id, service)
) WITH (fillfactor = 80);

-- Rate limits. Losing them in a crash does no harm.
CREATE UNLOGGED TABLE IF NOT EXISTS idempotency.buckets (
  at bigint NOT NULL,
  debt bigint NOT NULL,
  count bigint NOT NULL,
  full_at bigint NOT NULL,
  id text COLLATE "C" NOT NULL,
  service text COLLATE "C" NOT NULL,
  PRIMARY KEY (id, service)
) WITH (fillfactor = 80);

-- Which channels wait for the end of an attempt: only those are notified. A replica that misses a message polls.
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

-- The identity of the server, as last recorded by a proxy (docs/adr/0091).
CREATE TABLE IF NOT EXISTS idempotency.epochs (
  service text COLLATE "C" PRIMARY KEY,
  started timestamptz,
  file oid
);
-- When that identity was first seen, and until when claims are held. A crash empties this table, which is how proxies notice it.
CREATE UNLOGGED TABLE IF NOT EXISTS idempotency.graces (
  since bigint NOT NULL,
  till bigint NOT NULL,
  service text COLLATE "C" PRIMARY KEY
);

-- Records with their leases. One completed by idempotency.complete may still have a lease, which counts towards its version.
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
