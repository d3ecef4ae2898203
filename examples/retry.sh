#!/bin/sh
# Creates one charge, however many tries it takes: one key, made once, and the same request under it until a response
# arrives.
#
#   sh examples/retry.sh AMOUNT [KEY]
#
# URL     where to send it             http://127.0.0.1:8080/v1/charges
# TRIES   maximum number of tries      6
# PAUSE   seconds between two tries    1
#         without Retry-After
#
# Prints the charge and exits 0; exits 1 if it was refused, and 2 if it is still not known whether it was made: then run it
# again with the same KEY, which is on standard error.
set -eu
amount=$1
key=${2:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
url=${URL:-http://127.0.0.1:8080/v1/charges}
tries=${TRIES:-6}

answer=$(mktemp -d)
trap 'rm -rf "$answer"' EXIT
echo "Idempotency-Key: $key" >&2

# curl takes truncated headers for a response without a body. They are complete if they end with an empty line.
whole() { [ -s "$answer/head" ] && [ -z "$(tail -n 1 "$answer/head" | tr -d '\r')" ]; }

while [ "$tries" -gt 0 ]; do
  tries=$((tries - 1))
  : >"$answer/head"
  : >"$answer/body"
  # curl fails, whatever the status, if the connection did or the body broke off.
  if status=$(curl --silent --show-error --max-time 60 \
    --output "$answer/body" --dump-header "$answer/head" --write-out '%{http_code}' \
    --header 'Authorization: Bearer sk_test_example' --header "Idempotency-Key: $key" \
    --data "amount=$amount&currency=eur&source=tok_visa" "$url") && whole; then
    case $status in
      2??)
        cat "$answer/body"
        exit 0
        ;;
      409 | 429 | 5??) ;; # Still running, unknown, or not now: retry.
      *)
        cat "$answer/body" >&2
        exit 1
        ;;
    esac
  fi
  [ "$tries" -eq 0 ] && break
  wait=$(tr -d '\r' <"$answer/head" | sed -n 's/^[Rr]etry-[Aa]fter: *\([0-9][0-9]*\)$/\1/p')
  sleep "${wait:-${PAUSE:-1}}"
done
cat "$answer/body" >&2
exit 2
