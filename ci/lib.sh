# Shared by the commands in ci/: where things are, how a step speaks, how packages are installed. Source it.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BUILD=$ROOT/build
VENV=$BUILD/venv
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONDONTWRITEBYTECODE=1

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

die() {
    printf '%s: error: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# quietly LOGNAME COMMAND...: runs the command with its output in build/log/LOGNAME, shown only when it fails.
quietly() {
    local log=$BUILD/log/$1
    shift
    mkdir -p "$BUILD/log"
    "$@" >"$log" 2>&1 </dev/null || {
        local status=$?
        tail -n 60 "$log" >&2
        say "failed ($status): $*; the whole output is in $log"
        return "$status"
    }
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo -n "$@" || die "needs root for '$*': run it as root, or let sudo work without a password"
    else
        die "needs root for '$*': neither root nor sudo here"
    fi
}

# Prints those of the given Debian packages that are not installed.
apt_missing() {
    local package
    local -A installed=()
    while read -r package; do
        installed[$package]=1
    done < <(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "$@" 2>/dev/null | sed -n 's/^installed //p')
    for package in "$@"; do
        [ -n "${installed[$package]:-}" ] || printf '%s\n' "$package"
    done
}

# Installs what is missing of the given Debian packages; reads the package lists anew only when the old ones don't do.
apt_need() {
    command -v dpkg-query >/dev/null || die "this set-up is for Debian; install by hand: $*"
    local missing
    mapfile -t missing < <(apt_missing "$@")
    [ "${#missing[@]}" = 0 ] && return
    say "installing ${missing[*]}"
    local install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}")
    if ! as_root "${install[@]}" >/dev/null 2>&1 </dev/null; then
        quietly apt-update as_root apt-get update || die "apt-get update failed"
        quietly apt-install as_root "${install[@]}" || die "apt-get could not install: ${missing[*]}"
    fi
}

# venv_need FOLDER REQUIREMENTS: a Python venv that holds what the requirements file lists. Made once; looked at again
# only when the list or the interpreter changes.
venv_need() {
    local venv=$1 list=$2 stamp
    stamp=$(cat "$list" <(python3 -c 'import sys; print(sys.version, sys.base_prefix)') | sha256sum)
    if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    say "making ${venv#"$ROOT"/} (${list#"$ROOT"/})"
    rm -rf "$venv"
    quietly venv python3 -m venv "$venv" || die "python3 -m venv failed: is python3-venv installed?"
    quietly "pip-${venv##*/}" "$venv/bin/pip" install -r "$list" || die "pip could not install ${list#"$ROOT"/}"
    printf '%s\n' "$stamp" >"$venv/stamp"
}

# The folder that holds dlpack/dlpack.h (1.0 or newer): from the venv's apache-tvm-ffi.
dlpack_include() {
    local found
    found=$("$VENV/bin/python" - <<'PY'
import importlib.util, pathlib
spec = importlib.util.find_spec("tvm_ffi")
for place in (spec.submodule_search_locations if spec else ()):
    for header in sorted(pathlib.Path(place).rglob("dlpack/dlpack.h")):
        print(header.parent.parent)
        raise SystemExit
PY
    )
    [ -n "$found" ] || die "no dlpack/dlpack.h in $VENV: remove that folder and start again"
    printf '%s\n' "$found"
}

# meson_build NAME OPTION...: configures build/NAME (again only when the options changed) and compiles it. CC, CFLAGS
# and the like come from the environment.
meson_build() {
    local dir=$BUILD/$1 wanted
    shift
    set -- "-Ddlpack_include=$(dlpack_include)" "$@"
    wanted=$(printf '%s\n' "${CC:-}" "${CFLAGS:-}" "${LDFLAGS:-}" "$ROOT" "$@")
    if [ ! -f "$dir/build.ninja" ] || [ "$(cat "$dir/options" 2>/dev/null)" != "$wanted" ]; then
        rm -rf "$dir"
        quietly "${dir##*/}-setup" "$VENV/bin/meson" setup "$dir" "$ROOT" "$@" || return
        printf '%s\n' "$wanted" >"$dir/options"
    fi
    # ninja, not `meson compile`: the same thing, without a second of start-up.
    PATH=$VENV/bin:$PATH quietly "${dir##*/}-compile" ninja -C "$dir"
}
