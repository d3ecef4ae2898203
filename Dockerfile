# Image of idempotency-proxy: emitted JavaScript and its runtime dependencies on Node, nothing else.
#
#   docker build -t idempotency-proxy .
#   docker run --rm --read-only --cap-drop ALL --security-opt no-new-privileges \
#     -p 8080:8080 -v idempotency:/data idempotency-proxy \
#     --listen 0.0.0.0:8080 --upstream http://api:3000
#
# The working directory is the volume /data, so the embedded store (sqlite:./idempotency.db, the default) lies
# there; with a store elsewhere nothing is ever written.

# A release pins its base: --build-arg NODE_IMAGE=node:24-slim@sha256:… (CONTRIBUTING.md, docs/adr/0030). There is no
# digest here, since no image registry could be reached where this was written.
ARG NODE_IMAGE=node:24-slim

FROM ${NODE_IMAGE} AS build
WORKDIR /src
COPY package.json package-lock.json .npmrc ./
# The image has the right Node: no install script has anything to add (the dev dependency `node` would fetch one).
RUN npm ci --ignore-scripts --no-progress
COPY tsconfig.json tsconfig.build.json ./
COPY src ./src
RUN npm run --silent build

FROM ${NODE_IMAGE} AS dependencies
WORKDIR /src
COPY package.json package-lock.json .npmrc ./
RUN npm ci --omit=dev --ignore-scripts --no-progress

# The example API, for docker-compose.yml and the Helm chart: docker build --target example-payments .
FROM ${NODE_IMAGE} AS example-payments
LABEL org.opencontainers.image.title="example-payments" \
      org.opencontainers.image.description="A payments API that counts its charges, to try idempotency-proxy with"
WORKDIR /data
RUN chown 65532:65532 /data
COPY scripts/healthcheck.sh /usr/local/bin/healthcheck
COPY examples/payments/package.json examples/payments/server.ts /app/
ENV NODE_ENV=production HOST=0.0.0.0 PORT=3000 DATABASE=/data/payments.db
USER 65532:65532
VOLUME ["/data"]
EXPOSE 3000
STOPSIGNAL SIGTERM
ENTRYPOINT ["node", "/app/server.ts"]

FROM ${NODE_IMAGE} AS proxy
ENV NODE_ENV=production
WORKDIR /data
RUN chown 65532:65532 /data
COPY package.json /app/
COPY --from=dependencies /src/node_modules /app/node_modules
COPY --from=build /src/dist /app/dist
# For hooks and for `kubectl exec`: idempotency-proxy drain, doctor, list, inspect.
RUN chmod +x /app/dist/cli.js && ln -s /app/dist/cli.js /usr/local/bin/idempotency-proxy
COPY scripts/healthcheck.sh /usr/local/bin/healthcheck
# Code that V8 compiled in one start, so that every start is shorter. V8 takes it only with the flags of the entry point, Node only for
# the user who wrote it. Written when the proxy ends; read-only afterwards.
ENV NODE_COMPILE_CACHE=/app/compile-cache
RUN set -e; install -d -o 65532 "$NODE_COMPILE_CACHE"; touch /tmp/start.log; \
    setpriv --reuid=65532 --regid=65532 --clear-groups \
      node --max-semi-space-size=16 --max-old-space-size=512 /app/dist/cli.js \
      --listen 127.0.0.1:0 --service build --store redis://127.0.0.1:9/0 --upstream http://127.0.0.1:9 >/tmp/start.log 2>&1 & \
    proxy=$!; \
    until grep -q '"msg":"listening"' /tmp/start.log; do \
      kill -0 $proxy || { cat /tmp/start.log; exit 1; }; \
      sleep 0.1; \
    done; \
    kill -TERM $proxy; wait $proxy; rm /tmp/start.log; \
    ls -d "$NODE_COMPILE_CACHE"/*-65532; chown -R root:root "$NODE_COMPILE_CACHE"; chmod -R a+rX "$NODE_COMPILE_CACHE"
USER 65532:65532
VOLUME ["/data"]
EXPOSE 8080
STOPSIGNAL SIGTERM
# The admin listener is on loopback, where this check can reach it. Set HEALTHCHECK_URL where admin.listen says something else.
# Kubernetes does not read this; its probes ask ops.listen.
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s --retries=3 CMD ["healthcheck"]
# A heap that is collected before it has grown to what the machine would allow (docs/internals/performance.md).
ENTRYPOINT ["node", "--max-semi-space-size=16", "--max-old-space-size=512", "/app/dist/cli.js"]
# Last, so that a new commit or time makes no other layer anew.
ARG NODE_IMAGE
ARG VERSION=0.1.0
# What only the build knows: the commit, the time (RFC 3339), the address of the repository.
ARG REVISION=""
ARG CREATED=""
ARG SOURCE=""
LABEL org.opencontainers.image.title="idempotency-proxy" \
      org.opencontainers.image.description="A reverse proxy that makes any HTTP API safe to retry" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${NODE_IMAGE}"
