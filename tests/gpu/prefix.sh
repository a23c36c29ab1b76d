#!/usr/bin/env bash
# An install prefix out of a build folder, so that the real launcher can be measured without pip:
# prints the path of its `reflex`.
#
# usage: tests/gpu/prefix.sh BUILD       BUILD holds reflex (the launcher), _native, _boot and _testing
set -eu
cd "$(dirname "$0")/../.."
BUILD=$(cd "$1" && pwd) PREFIX=$(cd "$1" && pwd)/prefix
SITE=$PREFIX/lib/$(python3 -c 'import sys; print("python%d.%d" % sys.version_info[:2])')/site-packages
rm -rf "$PREFIX" && mkdir -p "$PREFIX/bin" "$SITE"
cp -r reflex_worker protocol/reflex_protocol "$SITE/"
find "$BUILD" -path "$PREFIX" -prune -o -path "$BUILD/stage" -prune -o \
  \( -name '_native*.so' -o -name '_testing*.so' -o -name '_boot*.so' \) -print | xargs -I{} cp {} "$SITE/reflex_worker/"
ln -s "$(python3 -c 'import msgspec, os; print(os.path.dirname(msgspec.__file__))')" "$SITE/msgspec"
cp "$(find "$BUILD" -path "$PREFIX" -prune -o -type f -name reflex -perm -u+x -print | head -1)" "$PREFIX/bin/reflex"
ln -s "$(python3 -c 'import os, sys; print(os.path.realpath(sys.executable))')" "$PREFIX/bin/python3"
echo "$PREFIX/bin/reflex"
