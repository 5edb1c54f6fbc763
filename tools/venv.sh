#!/bin/sh
# Create or refresh the virtual environment that the Makefile works in: venv.sh DIR EXTRAS.
#
# Needs a Python of 3.11 or later and a package index (or pip's cache). Debian's Python may come
# without ensurepip, so there is more than one way to a pip inside the environment; when none works,
# the last lines say what to install.
set -eu

directory=$1
extras=$2

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if command -v "$candidate" >/dev/null 2>&1 && is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "QuackMQ needs Python 3.11 or later: install it, or name one with make PYTHON=..." >&2
    exit 1
}

has_pip() {
    "$directory/bin/python" -m pip --version >/dev/null 2>&1
}

create() {
    "$python" -m venv "$directory" >/dev/null 2>&1 && has_pip && return
    "$python" -m virtualenv --clear "$directory" >/dev/null 2>&1 && has_pip && return
    # An environment without pip, filled by the pip outside of it.
    "$python" -m venv --clear --without-pip "$directory" >/dev/null 2>&1 &&
        "$python" -m pip --python "$directory/bin/python" install --quiet pip >/dev/null 2>&1 &&
        has_pip && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "installing python3-venv" >&2
        apt-get install --yes --quiet python3-venv >/dev/null 2>&1 ||
            { apt-get update --quiet && apt-get install --yes --quiet python3-venv; } >/dev/null 2>&1 ||
            true
        "$python" -m venv --clear "$directory" >/dev/null 2>&1 && has_pip && return
    fi
    rm -rf "$directory"
    echo "cannot create a virtual environment with $python: install its venv module" >&2
    echo "(Debian and Ubuntu: apt-get install python3-venv) or virtualenv, then run make again" >&2
    exit 1
}

# Run pip and show one line per package, so that a long download is not a silent one. A pipe
# answers with the exit code of its last command, so pip's own goes through a file.
install() {
    status="$directory/.pip-status"
    {
        "$directory/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
            --editable ".[$extras]" 2>&1
        echo $? >"$status"
    } | awk '
        /^ *(Downloading|Using cached) .*[.](whl|tar[.]gz)/ {
            # "Downloading NAME-VERSION-TAGS.whl (SIZE UNIT)"
            name = $0; sub(/^ *(Downloading|Using cached) /, "", name); sub(/ .*/, "", name)
            split(name, part, "-"); size = ""
            if (match($0, /[(][^)]*[)]$/)) size = " " substr($0, RSTART)
            print "    " part[1] " " part[2] size; fflush(); next
        }
        /^Installing collected/ { print "    unpacking all of them"; fflush() }
        /ERROR|error:/ { print "    " $0; fflush() }'
    [ "$(cat "$status")" = 0 ]
}

if ! { has_pip && is_new_enough "$directory/bin/python"; }; then
    rm -rf "$directory"
    python=$(find_python)
    echo "creating the virtual environment $directory with $("$python" --version)"
    create
fi
echo "installing QuackMQ with the extras $extras into $directory; the first time takes a few minutes"
if ! install; then
    echo "cannot install QuackMQ's dependencies: is a package index reachable?" >&2
    exit 1
fi
