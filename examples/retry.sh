#!/bin/sh
# Creates one charge, however often it has to ask: one key, made once, and the same request under it until there is an
# answer.
#
#   sh examples/retry.sh AMOUNT [KEY]
#
# URL     where to send it             http://127.0.0.1:8080/v1/charges
# TRIES   how often at most            6
# PAUSE   seconds between two tries,   1
#         where the answer names none
#
# Prints the charge and ends with 0; with 1 where it was refused; with 2 where it is still not known whether it was made:
# then call it again with the same KEY, which is on standard error.
set -eu
amount=$1
key=${2:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
url=${URL:-http://127.0.0.1:8080/v1/charges}
tries=${TRIES:-6}

answer=$(mktemp -d)
trap 'rm -rf "$answer"' EXIT
echo "Idempotency-Key: $key" >&2

# A head that breaks off is an answer without a body to curl. It is whole where it ends with its empty line.
whole() { [ -s "$answer/head" ] && [ -z "$(tail -n 1 "$answer/head" | tr -d '\r')" ]; }

while [ "$tries" -gt 0 ]; do
  tries=$((tries - 1))
  : >"$answer/head"
  : >"$answer/body"
  # curl fails, whatever the status was, where the connection did or where a body broke off.
  if status=$(curl --silent --show-error --max-time 60 \
    --output "$answer/body" --dump-header "$answer/head" --write-out '%{http_code}' \
    --header 'Authorization: Bearer sk_test_example' --header "Idempotency-Key: $key" \
    --data "amount=$amount&currency=eur&source=tok_visa" "$url") && whole; then
    case $status in
      2??)
        cat "$answer/body"
        exit 0
        ;;
      409 | 429 | 5??) ;; # Still running, not known, or not now: the same again.
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
