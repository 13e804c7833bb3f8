#!/bin/bash
# Runs once, when the data of `one` are made: lets `two` copy and follow them. The names of replicas that commits wait for
# are set last and take effect with the start that follows, because nothing could be committed before `two` is there.
set -euo pipefail

cat >>"$PGDATA/pg_hba.conf" <<'EOF'
host replication geventstalk all scram-sha-256
EOF
psql --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'EOF'
ALTER SYSTEM SET wal_retrieve_retry_interval = '100ms';
ALTER SYSTEM SET wal_sender_timeout = '5s';
ALTER SYSTEM SET wal_receiver_timeout = '5s';
ALTER SYSTEM SET wal_keep_size = '1GB';
ALTER SYSTEM SET synchronous_standby_names = 'one, two';
EOF
