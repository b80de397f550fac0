#!/bin/bash
# What the official apache/kafka image understands: KAFKA_A_B=x becomes a.b=x in server.properties
# (__ stands for _ and ___ for -), CLUSTER_ID is that of the storage, which the first start formats.
set -euo pipefail
if [ "$(id -u)" = 0 ]; then
    mkdir -p /var/lib/kafka/data /opt/kafka/config
    chown -R appuser:appuser /var/lib/kafka /opt/kafka/config
    exec chroot --userspec=appuser:appuser --skip-chdir / "$0" "$@"
fi

properties=/opt/kafka/config/server.properties
not_settings='^KAFKA_(HEAP_OPTS|OPTS|JVM_PERFORMANCE_OPTS|GC_LOG_OPTS|JMX_.*|LOG4J.*|VERSION)='
{ env | grep '^KAFKA_' || true; } | { grep -Ev "$not_settings" || true; } |
    while IFS='=' read -r name value; do
        name=${name#KAFKA_}
        name=${name,,}
        name=${name//___/-}
        name=${name//__/@}
        name=${name//_/.}
        printf '%s=%s\n' "${name//@/_}" "$value"
    done >"$properties"
grep -q '^log\.dirs\?=' "$properties" || echo "log.dirs=/tmp/kraft-combined-logs" >>"$properties"

# The virtual machine's own words, so that they may be replaced.
read -r -a java <<<"java ${KAFKA_HEAP_OPTS:--Xms256m -Xmx640m} -XX:+UseSerialGC \
    -XX:TieredStopAtLevel=1 ${KAFKA_OPTS:-} -Dlog4j2.configurationFile=/etc/kafka/log4j2.properties"

data=$(sed -n 's/^log\.dirs\?=//p' "$properties" | tail -n 1)
if [ ! -s "${data%%,*}/meta.properties" ]; then
    "${java[@]}" -cp '/opt/kafka/libs/*' kafka.tools.StorageTool format \
        --cluster-id "${CLUSTER_ID:?must be set}" --config "$properties"
fi
exec "${java[@]}" -cp '/opt/kafka/libs/*' kafka.Kafka "$properties"
