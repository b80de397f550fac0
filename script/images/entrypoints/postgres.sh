#!/bin/bash
# What the official postgres image understands: POSTGRES_USER, POSTGRES_PASSWORD, POSTGRES_DB,
# POSTGRES_INITDB_ARGS, POSTGRES_HOST_AUTH_METHOD, PGDATA; a command that begins with a dash is
# options of postgres.
set -euo pipefail
[ $# -gt 0 ] || set -- postgres
case $1 in -*) set -- postgres "$@" ;; esac
[ "$1" = postgres ] || exec "$@"

if [ "$(id -u)" = 0 ]; then
    mkdir -p "$PGDATA" /var/run/postgresql
    chown -R postgres:postgres "$PGDATA" /var/run/postgresql
    chmod 700 "$PGDATA"
    exec chroot --userspec=postgres:postgres --skip-chdir / "$0" "$@"
fi

if [ ! -s "$PGDATA/PG_VERSION" ]; then
    user=${POSTGRES_USER:-postgres}
    database=${POSTGRES_DB:-$user}
    method=${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}
    if [ -z "${POSTGRES_PASSWORD:-}" ] && [ "$method" != trust ]; then
        echo "POSTGRES_PASSWORD must be set to create a database" >&2
        exit 1
    fi
    # Arguments are words, as in the official image.
    # shellcheck disable=SC2086
    initdb -D "$PGDATA" -U "$user" -E UTF8 --pwfile=<(printf '%s\n' "${POSTGRES_PASSWORD:-unused}") \
        --auth-local=trust --auth-host="$method" ${POSTGRES_INITDB_ARGS:-}
    echo "host all all all $method" >>"$PGDATA/pg_hba.conf"
    echo "listen_addresses = '*'" >>"$PGDATA/postgresql.conf"
    if [ "$database" != postgres ]; then
        printf 'CREATE DATABASE "%s";\n' "$database" | postgres --single -D "$PGDATA" postgres
    fi
fi
exec "$@"
