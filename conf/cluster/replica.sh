#!/bin/bash
# The start of `two`: copies `one` when there are no data yet, and follows it.
set -euo pipefail

PGPASSWORD=$(cat /run/secrets/password)
export PGPASSWORD
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    install -d -o postgres -g postgres -m 0700 "$PGDATA"
    until gosu postgres pg_basebackup -D "$PGDATA" -R -X stream -c fast \
        -d "host=one user=$POSTGRES_USER application_name=two"; do
        sleep 1
        find "$PGDATA" -mindepth 1 -delete
    done
fi
exec docker-entrypoint.sh postgres
