#!/bin/sh
# Fetch the Kafka clients of other languages that tests/interop/ tries, and build what drives them;
# and Spark's connector for Kafka, which tests/spark/ tries.
#
# npm and Maven are used as they are configured here. Tries only what is missing or has changed, and
# never fails: a test whose client is not there is left out by tests/conftest.py, by name, and with
# CI=true that is a failure.
set -u
cd "$(dirname "$0")/../tests/interop" || exit 0

# Whether the files are those that the stamp was written for.
is_fresh() { # STAMP FILES...
    stamp=$1
    shift
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(cksum "$@")" ]
}

# Run a command, whose words are of interest only when it fails.
fetch() { # WHAT COMMAND...
    what=$1
    shift
    if ! command -v "$1" >/dev/null 2>&1; then
        echo "could not be fetched without $1: $what" >&2
        return 1
    fi
    echo "fetching $what" >&2
    said=$("$@" 2>&1) && return
    echo "could not be fetched: $what" >&2
    echo "$said" | tail -n 15 >&2
    return 1
}

javascript() {
    files="package.json package-lock.json"
    # shellcheck disable=SC2086
    is_fresh node_modules/.made-from $files && return
    # No package needs scripts to be installed, so none gets to run any.
    # shellcheck disable=SC2086
    fetch "kafkajs and @platformatic/kafka" npm ci --ignore-scripts --no-fund --no-audit &&
        cksum $files >node_modules/.made-from
}

java() {
    files="pom.xml $(find src -type f | sort)"
    # shellcheck disable=SC2086
    is_fresh target/.made-from $files && return
    rm -rf target
    # shellcheck disable=SC2086
    fetch "kafka-clients" mvn --batch-mode --quiet process-classes &&
        cksum $files >target/.made-from
}

# Kafka's own broker, where the benchmarks have it too: they mark it by the same file.
kafka() {
    jars=$(pwd)/../target/kafka
    cmp -s pom.xml "$jars/.made-from" && return
    rm -rf "$jars"
    fetch "Kafka's broker" mvn --batch-mode --quiet process-resources "-Djars=$jars" &&
        cp pom.xml "$jars/.made-from"
}

# Spark's own Kafka connector, for tests/spark and the benchmarks.
connector() {
    cmp -s pom.xml target/.made-from && return
    rm -rf target
    fetch "Spark's Kafka connector" mvn --batch-mode --quiet process-resources &&
        cp pom.xml target/.made-from
}

(cd javascript && javascript)
(cd java && java)
(cd ../../benchmarks/peers && kafka)
(cd ../spark/connector && connector)
exit 0
