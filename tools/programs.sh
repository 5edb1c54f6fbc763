#!/bin/sh
# Fetch the programs from outside Python that some tests need.
#
# Tries only what is missing, and never fails: a test that needs a program which is still not there
# is left out by tests/conftest.py, by name, and with CI=true that is a failure.
set -u

# Each with Debian's package, where that is called otherwise.
programs="curl kcat socat strace wrk node:nodejs npm javac:default-jdk-headless mvn:maven"

missing=
for program in $programs; do
    command -v "${program%:*}" >/dev/null 2>&1 || missing="$missing ${program#*:}"
done
# PostgreSQL's server is not in the PATH on Debian.
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null 2>&1 ||
    missing="$missing postgresql"
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "not here, and not ours to install:$missing" >&2
    exit 0
fi
echo "installing$missing" >&2
export DEBIAN_FRONTEND=noninteractive
install() {
    # Tests start servers of their own: the package must not create and start one at installation.
    [ "$1" != postgresql ] || without_cluster || return
    apt-get install --yes --quiet --no-install-recommends "$1" >/dev/null 2>&1
}
without_cluster() {
    settings=/etc/postgresql-common/createcluster.conf
    apt-get install --yes --quiet --no-install-recommends postgresql-common >/dev/null 2>&1 &&
        sed -i 's/^#* *create_main_cluster *=.*/create_main_cluster = false/' "$settings" &&
        grep -q '^create_main_cluster = false' "$settings"
}
# Lists may be old or missing, so ask for them only when a first try fails.
updated=
for package in $missing; do
    install "$package" && continue
    [ -n "$updated" ] || apt-get update --quiet >/dev/null 2>&1
    updated=yes
    install "$package" || echo "could not be installed: $package" >&2
done
exit 0
