-- The tables of the API, and what its role needs of the proxy's schema. To be run when the proxy has made that, by its owner.
CREATE TABLE charges (id text PRIMARY KEY, amount bigint NOT NULL, record text NOT NULL);
CREATE INDEX charges_record ON charges (record);
CREATE ROLE charges_api LOGIN;
GRANT SELECT, INSERT ON charges TO charges_api;
GRANT USAGE ON SCHEMA idempotency TO charges_api;
GRANT EXECUTE ON FUNCTION idempotency.complete TO charges_api;
