#!/bin/sh
# Write the versions of all that an environment has, but for QuackMQ itself: lock.sh PYTHON FILE.
set -eu

python=$1
file=$2
{
    echo "# The versions with which the tests were last seen to pass, on Python $("$python" -c 'import platform; print(platform.python_version())')."
    echo "# Made by \`make lock\`; used as constraints: see CONTRIBUTING.md, \"Dependencies\"."
    "$python" -m pip --disable-pip-version-check freeze --exclude-editable --exclude quackmq
} >"$file.new"
mv "$file.new" "$file"
