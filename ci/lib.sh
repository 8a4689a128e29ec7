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
    [ -f "$dir/.ninja_log" ] || say "compiling ${dir#"$ROOT"/}"
    PATH=$VENV/bin:$PATH quietly "${dir##*/}-compile" ninja -C "$dir"
}

CUDA_LIB=/usr/local/cuda/lib64

# torch_need VENV PACKAGE...: a venv with torch (TORCH says which, 2.11 or 2.15), these packages, and libfsdp as it is in
# the repository. Torch's wheel is a CUDA build: where a CUDA 13 toolkit is installed it needs only a few small packages
# beside it, elsewhere pip brings all of it.
torch_need() {
    local venv=$1 lists=$BUILD/${1##*/}-requirements stamp bare
    shift
    case ${TORCH:-2.11} in
    2.11) bare="torch==2.11.0 nvidia-cufile==1.15.1.6 nvidia-nvshmem-cu13==3.4.5 nvidia-cusparselt-cu13==0.8.0" ;;
    2.15)
        bare="torch==2.15.0 nvidia-cufile==1.15.1.6 nvidia-nvshmem-cu13==3.7.2 nvidia-cusparselt-cu13==0.8.1
            nvidia-nccl-cu13==2.30.7"
        ;;
    *) die "torch $TORCH: tried are 2.11 and 2.15" ;;
    esac
    mkdir -p "$lists"
    if compgen -G "$CUDA_LIB/libcudart.so.13*" >/dev/null; then
        # shellcheck disable=SC2086 # a list
        printf '%s\n' $bare >"$lists/bare"
        printf '%s\n' numpy filelock typing_extensions sympy networkx jinja2 fsspec setuptools "$@" >"$lists/whole"
    else
        : >"$lists/bare"
        printf '%s\n' "torch${TORCH:+==$TORCH.*}" numpy "$@" >"$lists/whole"
    fi
    stamp=$(cat "$lists/bare" "$lists/whole" <(python3 --version) | sha256sum)
    if [ ! -x "$venv/bin/python" ] || [ "$(cat "$venv/stamp" 2>/dev/null)" != "$stamp" ]; then
        say "making ${venv#"$ROOT"/} with torch"
        rm -rf "$venv"
        quietly "${venv##*/}" python3 -m venv "$venv"
        [ ! -s "$lists/bare" ] || quietly "${venv##*/}-bare" "$venv/bin/pip" install --no-deps -r "$lists/bare"
        quietly "${venv##*/}-pip" "$venv/bin/pip" install -r "$lists/whole"
        printf '%s\n' "$ROOT/shims/python" \
            >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/libfsdp.pth"
        printf '%s\n' "$stamp" >"$venv/stamp"
    fi
    [ ! -d "$CUDA_LIB" ] || export LD_LIBRARY_PATH=$CUDA_LIB${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}

# tensorplay_need VENV PYTHON VERSION PACKAGE...: a venv with that TensorPlay, these packages, and libfsdp as it is in
# the repository. Its wheel has 85 MB and is for some versions of Python only.
tensorplay_need() {
    local venv=$1 python=$2 list=$BUILD/${1##*/}-requirements stamp
    printf '%s\n' "tensorplay==$3" numpy "${@:4}" >"$list"
    stamp=$(cat "$list" <("$python" -c 'import sys; print(sys.version, sys.base_prefix)') | sha256sum)
    if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    say "making ${venv#"$ROOT"/} with TensorPlay $3"
    rm -rf "$venv"
    quietly "${venv##*/}" "$python" -m venv "$venv"
    quietly "${venv##*/}-pip" "$venv/bin/pip" install -r "$list"
    printf '%s\n' "$ROOT/shims/python" \
        >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/libfsdp.pth"
    printf '%s\n' "$stamp" >"$venv/stamp"
}

# python_find X.Y: prints a Python of that version that can make venvs; fails where there is none.
python_find() {
    local python is="import ensurepip, sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')"
    for python in "$(command -v "python$1")" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        if [ -x "$python" ] && "$python" -c "$is" 2>/dev/null; then
            printf '%s\n' "$python"
            return
        fi
    done
    return 1
}
