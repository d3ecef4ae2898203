#!/usr/bin/env bash
# Builds the real Dockerfile and runs the image as a cautious operator would: read-only root, no capabilities, no
# new privileges, uid 65532. Checks an execution and its replay on Redis and on the embedded store, the health
# check, that a volume is all it writes to, what is in the image, and that SIGTERM ends it with 0.
#
# Needs a Docker engine, redis-server and curl; not part of `npm test`. Without an image registry, run
# scripts/image-base.sh first. Containers use the host's network, loopback only; port 9464 has to be free.
#
#   bash scripts/image-test.sh            # builds both images, then tests
#   bash scripts/image-test.sh --no-build
#   node scripts/image-in-pod.ts            # then: as the Helm charts run it, under load, within their memory limit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PROXY=idempotency-proxy:test
API=example-payments:test
RUN=(docker run -d --network host --read-only --cap-drop ALL --security-opt no-new-privileges --user 65532:65532)
failed=0
containers=()
work=$(mktemp -d)
chmod 755 "$work"

docker version >/dev/null 2>&1 || { echo 'No Docker engine answers: start one first (dockerd, or Docker Desktop).' >&2; exit 1; }

cleanup() {
  [ ${#containers[@]} -eq 0 ] || docker rm -fv "${containers[@]}" >/dev/null 2>&1 || true
  docker volume rm "idempotency-test-$$" >/dev/null 2>&1 || true
  # Without its folder it would refuse to end.
  [ -z "${redis:-}" ] || { kill "$redis" && wait "$redis"; } 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT

check() { # check WHAT FOUND WANTED
  if [ "$2" = "$3" ]; then printf '  ok        %-58s %s\n' "$1" "$2"; else
    printf '  NOT TRUE  %-58s %s, wanted %s\n' "$1" "$2" "$3"
    failed=1
  fi
}
free_port() {
  node -e "const s = require('node:net').createServer().listen(0, '127.0.0.1', () => { console.log(s.address().port); s.close() })"
}
until_ok() { # until_ok SECONDS COMMAND…
  local end=$((SECONDS + $1)); shift
  until "$@" >/dev/null 2>&1; do
    if [ $SECONDS -ge $end ]; then echo "gave up waiting for: $*" >&2; return 1; fi
    sleep 0.05
  done
}
pay() { # pay KEY NAME: headers to NAME.h, body to NAME.b
  curl -sS -D "$work/$2.h" -o "$work/$2.b" "http://127.0.0.1:$port/v1/payments" -H 'Content-Type: application/json' \
    -H "Idempotency-Key: $1" -d '{"amount": 4200, "currency": "eur"}'
}
status() { head -1 "$work/$1.h" | cut -d' ' -f2; }
marker() { grep -i '^idempotent-replayed:' "$work/$1.h" | tr -d '\r' | cut -d' ' -f2 || true; }
same() { cmp -s "$work/$1.b" "$work/$2.b" && echo same || echo different; }
charges() { curl -sS "http://127.0.0.1:$api_port/v1/payments?key=$1" | sed 's/.*"charges":\([0-9]*\).*/\1/'; }
health() { docker inspect -f '{{.State.Health.Status}}' "$1"; }
healthy() { [ "$(health "$1")" = healthy ]; }
stop() { # stop CONTAINER: SIGTERM, then the exit code
  docker kill -s TERM "$1" >/dev/null
  timeout 20 docker wait "$1" 2>/dev/null || echo 'still running after 20 s'
}

if [ "${1:-}" != --no-build ]; then
  echo 'building'
  docker build -q --network host --build-arg REVISION="$(git rev-parse HEAD)" -t "$PROXY" . >/dev/null
  docker build -q --network host --target example-payments -t "$API" . >/dev/null
fi

echo 'the image'
inside() { docker run --rm --read-only --network none --entrypoint node "$PROXY" -e "$1"; }
check 'user' "$(docker inspect -f '{{.Config.User}}' "$PROXY")" 65532:65532
check 'stop signal' "$(docker inspect -f '{{.Config.StopSignal}}' "$PROXY")" SIGTERM
label() { docker inspect -f "{{index .Config.Labels \"org.opencontainers.image.$1\"}}" "$PROXY"; }
check 'labels: licence, base' "$(label licenses) $(label base.name)" "Apache-2.0 ${NODE_IMAGE:-node:24-slim}"
check 'label: revision' "$(label revision)" "$(git rev-parse HEAD)"
check 'packages in /app that npm run sbom does not name' "$(comm -13 <(npm run --silent sbom 2>/dev/null |
  node -p "JSON.parse(fs.readFileSync(0)).components.map((one) => one.name + '@' + one.version).join('\n')" | sort -u) \
  <(inside "const fs = require('node:fs')
  const api = JSON.parse(fs.readFileSync('/app/node_modules/@opentelemetry/api/package.json', 'utf8'))
  console.log(api.name + '@' + api.version)
  for (const [, one] of fs.readFileSync('/app/dist/THIRD-PARTY.txt', 'utf8').matchAll(/^(\S+@\S+) \(/gm)) console.log(one)" | sort -u) | wc -l)" 0
check 'NODE_ENV' "$(inside 'console.log(process.env.NODE_ENV)')" production
check 'what is in /app' "$(inside "const { readdirSync } = require('node:fs')
  console.log([...readdirSync('/app'), ...readdirSync('/app/node_modules')].sort().join(' '))")" \
  '@opentelemetry compile-cache dist node_modules package.json'
check 'idempotency-proxy on the PATH, for hooks' "$(docker run --rm --read-only --network none --entrypoint idempotency-proxy "$PROXY" \
  drain --help >/dev/null && echo 'exit 0')" 'exit 0'
check 'compiled code is taken, and all of it can be read' "$(docker run --rm --read-only --network none -e NODE_DEBUG_NATIVE=COMPILE_CACHE \
  "$PROXY" --help 2>&1 | grep -oE 'was accepted|permission denied' | sort -u)" 'was accepted'
check 'the health check starts no Node' "$(docker inspect -f '{{json .Config.Healthcheck.Test}}' "$PROXY")" '["CMD","healthcheck"]'
check '--help' "$(docker run --rm --read-only --network none "$PROXY" --help >/dev/null && echo 'exit 0')" 'exit 0'
printf '            %-58s %s MB, of which base %s MB\n' 'size (unpacked)' \
  "$(($(docker image inspect -f '{{.Size}}' "$PROXY") / 1000000))" \
  "$(($(docker image inspect -f '{{.Size}}' "${NODE_IMAGE:-node:24-slim}") / 1000000))"

echo 'on Redis'
redis_port=$(free_port); api_port=$(free_port); port=$(free_port)
mkdir "$work/redis"
"${REDIS_SERVER:-redis-server}" --port "$redis_port" --bind 127.0.0.1 --dir "$work/redis" --appendonly yes \
  --maxmemory-policy noeviction >/dev/null &
redis=$!
api=$("${RUN[@]}" -v /data -e HOST=127.0.0.1 -e "PORT=$api_port" "$API")
containers+=("$api")
until_ok 10 curl -fsS "http://127.0.0.1:$api_port/healthz"
cat >"$work/proxy.yaml" <<YAML
service: payments
listen: 127.0.0.1:$port
upstream: { url: "\${UPSTREAM_URL}" }
store: { url: "\${REDIS_URL}" }
routes:
  - name: create-payment
    match: { methods: [POST], path: /v1/payments }
    key: required
    scope: { caller: none }
YAML
began=$(date +%s%N)
proxy=$("${RUN[@]}" --health-interval 1s -v "$work/proxy.yaml:/etc/proxy.yaml:ro" \
  -e "UPSTREAM_URL=http://127.0.0.1:$api_port" -e "REDIS_URL=redis://127.0.0.1:$redis_port/0" "$PROXY" --config /etc/proxy.yaml)
containers+=("$proxy")
until_ok 15 curl -sS "http://127.0.0.1:$port/v1/payments" || docker logs "$proxy"
printf '            %-58s %s ms\n' 'docker run to the first answer' $((($(date +%s%N) - began) / 1000000))
pay key-1 first; pay key-1 second
check 'first' "$(status first) $(marker first)" '201 '
check 'retry' "$(status second) $(marker second)" '201 true'
check 'bytes of both' "$(same first second)" same
check 'charges' "$(charges key-1)" 1
check 'uid of the process' "$(docker exec "$proxy" node -p 'process.getuid()')" 65532
check 'effective capabilities' "$(docker exec "$proxy" sh -c "sed -n 's/^CapEff:[[:space:]]*//p' /proc/1/status")" 0000000000000000
check 'no new privileges' "$(docker exec "$proxy" sh -c "sed -n 's/^NoNewPrivs:[[:space:]]*//p' /proc/1/status")" 1
check 'files written outside of volumes' "$(docker diff "$proxy" | grep -vE '^[AC] /(etc|etc/proxy.yaml|data)$' | wc -l)" 0
check 'files written to /data' "$(docker exec "$proxy" sh -c 'ls -A /data | wc -l')" 0
until_ok 20 healthy "$proxy" || true
check 'health' "$(health "$proxy")" healthy
printf '            %-58s %s MB\n' 'resident memory' \
  "$(($(docker exec "$proxy" sh -c "sed -n 's/^VmRSS:[[:space:]]*\([0-9]*\).*/\1/p' /proc/1/status") / 1024))"
check 'exit code after SIGTERM' "$(stop "$proxy")" 0

echo 'a running call at SIGTERM is finished and stored'
port=$(free_port)
sed -i "s/^listen:.*/listen: 127.0.0.1:$port/" "$work/proxy.yaml"
proxy=$("${RUN[@]}" -v "$work/proxy.yaml:/etc/proxy.yaml:ro" \
  -e "UPSTREAM_URL=http://127.0.0.1:$api_port" -e "REDIS_URL=redis://127.0.0.1:$redis_port/0" "$PROXY" --config /etc/proxy.yaml)
containers+=("$proxy")
until_ok 15 curl -sS "http://127.0.0.1:$port/v1/payments"
pay key-1 third
check 'another container, the same Redis: retry' "$(status third) $(marker third)" '201 true'
check 'its bytes' "$(same first third)" same
curl -sS -o "$work/slow.b" -D "$work/slow.h" "http://127.0.0.1:$port/v1/payments" -H 'Content-Type: application/json' \
  -H 'Idempotency-Key: key-2' -H 'X-Demo-Delay: 1500ms' -d '{"amount": 4200, "currency": "eur"}' &
slow=$!
until_ok 5 test "$(sleep 0.5; charges key-2)" = 1
check 'exit code after SIGTERM' "$(stop "$proxy")" 0
wait $slow || true
check 'the answer of the running call' "$(status slow)" 201

echo 'on the embedded store, flags only, a volume at /data'
port=$(free_port)
embedded() {
  proxy=$("${RUN[@]}" --health-interval 1s -v "idempotency-test-$$:/data" "$PROXY" \
    --upstream "http://127.0.0.1:$api_port" --listen "127.0.0.1:$port")
  containers+=("$proxy")
  until_ok 15 curl -sS "http://127.0.0.1:$port/v1/payments" || docker logs "$proxy"
}
embedded
pay key-3 fourth
check 'first' "$(status fourth) $(marker fourth)" '201 '
check 'exit code after SIGTERM' "$(stop "$proxy")" 0
embedded
pay key-3 fifth
check 'a new container on the same volume: retry' "$(status fifth) $(marker fifth)" '201 true'
check 'its bytes' "$(same fourth fifth)" same
docker kill -s KILL "$proxy" >/dev/null
embedded
pay key-3 sixth
check 'after kill -9: retry' "$(status sixth) $(marker sixth)" '201 true'
check 'charges' "$(charges key-3)" 1
check 'exit code of the example API after SIGTERM' "$(stop "$api")" 0

echo
[ $failed -eq 0 ] && echo 'image-test: all true' || echo 'image-test: FAILED'
exit $failed
