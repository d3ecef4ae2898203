-- What an order changes, and the message about it, are committed together:
--   BEGIN; INSERT INTO orders …; INSERT INTO outbox (body) …; COMMIT;
CREATE TABLE orders (id uuid PRIMARY KEY, amount bigint NOT NULL);
CREATE TABLE outbox (
  -- The message id, and so the key.
  id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
  body jsonb NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  sent_at timestamptz
);
CREATE INDEX outbox_unsent ON outbox (created_at) WHERE sent_at IS NULL;
