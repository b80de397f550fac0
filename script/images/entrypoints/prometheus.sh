#!/bin/bash
# What the official prom/prometheus image understands: options of prometheus. It runs as nobody.
set -euo pipefail
if [ "$(id -u)" = 0 ]; then
    chown nobody:nobody /prometheus
    exec chroot --userspec=nobody:nobody --skip-chdir / "$0" "$@"
fi
exec prometheus "$@"
