# Image of idempotency-proxy: one bundle of it and its dependencies on Node, nothing else.
#
#   docker build -t idempotency-proxy .
#   docker run --rm --read-only --cap-drop ALL --security-opt no-new-privileges \
#     -p 8080:8080 -v idempotency:/data -v ./proxy.yaml:/etc/proxy.yaml:ro idempotency-proxy --config /etc/proxy.yaml
#
# with, in proxy.yaml,
#
#   listen: 0.0.0.0:8080
#   upstream: { url: http://api:3000 }
#   defaults: { scope: { caller: "header:authorization", anonymous: reject } }
#
# The working directory is the volume /data, so the embedded store (sqlite:./idempotency.db, the default) lies
# there; with a store elsewhere nothing is ever written.

# A release pins its base: --build-arg NODE_IMAGE=node:24-slim@sha256:… (CONTRIBUTING.md, docs/adr/0074). There is no
# digest here, since no image registry could be reached where this was written.
ARG NODE_IMAGE=node:24-slim

FROM ${NODE_IMAGE} AS build
WORKDIR /src
COPY package.json package-lock.json .npmrc ./
# The image has the right Node: no install script has anything to add (the dev dependency `node` would fetch one).
RUN npm ci --ignore-scripts --no-progress
COPY tsconfig.json ./
COPY scripts/build.ts scripts/npm-script.js ./scripts/
COPY src ./src
RUN npm run --silent build

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
# One arena of malloc for all threads: of several, each keeps what it has freed (docs/internals/performance.md).
ENV NODE_ENV=production MALLOC_ARENA_MAX=1
WORKDIR /data
RUN chown 65532:65532 /data
COPY package.json /app/
COPY --from=build /src/dist /app/dist
# The one dependency that is not in the bundle, for the user's SDK.
COPY --from=build /src/node_modules/@opentelemetry/api /app/node_modules/@opentelemetry/api
# For hooks and for `kubectl exec`: idempotency-proxy drain, doctor, list, inspect.
RUN chmod +x /app/dist/cli.js && ln -s /app/dist/cli.js /usr/local/bin/idempotency-proxy
COPY scripts/healthcheck.sh /usr/local/bin/healthcheck
# Code that V8 compiled in a start on each store and its first request, so that every start is shorter. V8 takes it only with the flags
# of the entry point, Node only for the user who wrote it. Written when the proxy ends; read-only afterwards.
ENV NODE_COMPILE_CACHE=/app/compile-cache
RUN set -e; install -d -o 65532 "$NODE_COMPILE_CACHE" /tmp/warm; \
    for store in sqlite:/tmp/warm/records.db redis://127.0.0.1:9/0; do \
      : >/tmp/start.log; \
      setpriv --reuid=65532 --regid=65532 --clear-groups \
        node --min-semi-space-size=8 --max-semi-space-size=8 --max-old-space-size=512 /app/dist/cli.js \
        --listen 127.0.0.1:8080 --service build --store "$store" --upstream http://127.0.0.1:9 >/tmp/start.log 2>&1 & \
      proxy=$!; \
      until grep -q '"msg":"listening"' /tmp/start.log; do \
        kill -0 $proxy || { cat /tmp/start.log; exit 1; }; \
        sleep 0.1; \
      done; \
      NODE_DISABLE_COMPILE_CACHE=1 node -e 'for (const method of ["GET", "POST"]) await fetch("http://127.0.0.1:8080", { method, headers: { "Idempotency-Key": "k" } })'; \
      kill -TERM $proxy; wait $proxy; \
    done; \
    rm -r /tmp/start.log /tmp/warm; \
    ls -d "$NODE_COMPILE_CACHE"/*-65532; chown -R root:root "$NODE_COMPILE_CACHE"; chmod -R a+rX "$NODE_COMPILE_CACHE"
USER 65532:65532
VOLUME ["/data"]
EXPOSE 8080
STOPSIGNAL SIGTERM
# The admin listener is on loopback, where this check can reach it. Set HEALTHCHECK_URL where admin.listen says something else.
# Kubernetes does not read this; its probes ask ops.listen.
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s --retries=3 CMD ["healthcheck"]
# A heap that is collected before it has grown to what the machine would allow (docs/internals/performance.md).
ENTRYPOINT ["node", "--min-semi-space-size=8", "--max-semi-space-size=8", "--max-old-space-size=512", "/app/dist/cli.js"]
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
