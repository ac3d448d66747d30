#!/usr/bin/env bash
# Make .venv with the packages of locks/*.txt: scripts/install_python.sh [cpu|cuda|sglang]
# Every file that pip takes has a hash there, whichever index it comes from.
# Called by the Makefile; a second call that finds nothing new returns at once, and a call after
# one that was killed fixes what that one left. Without an argument: as .venv is, or else cpu.
#
#   PYTHON           the interpreter to build on; default: the first in PATH that the locks cover
#   TORCH_CPU_INDEX  asked for the CPU build of torch where pip's own index has only CUDA builds,
#                    as PyPI; default: PyTorch's index. A site with a mirror names it here.
#   PIP_*            pip's own settings, such as PIP_INDEX_URL
# Addresses of indexes are https or file; http only on loopback.
#
# Exit: 0 installed, 2 usage, 3 could not be installed here (pip's whole log: .venv/install.log)
set -euo pipefail
cd "$(dirname "$0")/.."
script=scripts/install_python.sh
venv=.venv
log=$venv/install.log
torch_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
flavour=${1:-$(cat "$venv/.flavour" 2>/dev/null || echo cpu)}
lock=locks/$flavour.txt

say() { printf 'install: %s\n' "$*"; }
die() { printf 'install: %s\n' "$*" >&2; exit "${code:-3}"; }
without_password() { sed -E 's#//[^/@ ]*@#//#g' <<<"$1"; }

# By http anyone on the way answers in the index's name; the way to a loopback address is in here.
# No ? # or \ before the @: what stands left of them is the host for those who connect.
is_safe() {
    local loopback='^http://([^][/@?#\ ]*@)?(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?(/|$)'
    [[ $1 =~ ^(https|file):// || $1 =~ $loopback ]]
}

check_usage() {
    local name url
    case $flavour in
        cpu | cuda | sglang) ;;
        *) code=2 die "unknown flavour '$flavour': expected cpu, cuda or sglang" ;;
    esac
    is_safe "$torch_index" || code=2 die "TORCH_CPU_INDEX is '$(without_password "$torch_index")':" \
        "expected a https or file URL (http only on a loopback address)"
    for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS; do
        for url in ${!name:-}; do
            [[ ${url,,} != http://* ]] || is_safe "$url" ||
                code=2 die "$name has '$(without_password "$url")': expected a https or file URL" \
                    "(http only on a loopback address)"
        done
    done
}

find_python() {
    local name candidates=(python3.11 python3.12 python3.13 python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for name in "${candidates[@]}"; do
        # Those that scripts/lock.py found files for (PYTHONS).
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
            2>/dev/null; then
            echo "$name"
            return
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 among: ${candidates[*]};" \
        "next: apt-get install python3 (as root), or PYTHON=/path/to/python make install"
}

# activate is what `python -m venv` writes last, and it names the folder it was made for.
venv_is_whole() {
    grep -qsF "$(pwd -P)/$venv" "$venv/bin/activate" && "$venv/bin/python" -c '' 2>/dev/null
}

make_venv() {
    local python
    python=$(find_python)
    say "making $venv with $("$python" --version)"
    # Debian and Ubuntu ship Python without ensurepip.
    "$python" -c 'import ensurepip' 2>/dev/null || install_ensurepip "$python"
    rm -rf "$venv"
    "$python" -m venv "$venv" || die "$python could not make $(pwd)/$venv (its error is above)"
}

install_ensurepip() {
    local package root=()
    package=$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    [ "$(id -u)" = 0 ] || root=(sudo -n)
    if command -v apt-get >/dev/null && "${root[@]}" true 2>/dev/null; then
        say "installing $package by apt-get"
        { "${root[@]}" apt-get update -qq && "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq "$package"; } >/dev/null ||
            die "apt-get could not install $package (its error is above)"
    else
        die "Python has no venv module; next: apt-get install $package (as root)"
    fi
}

# A call that was killed while pip replaced itself leaves one that starts and cannot install.
pip_is_whole() {
    compgen -G "$venv/lib/python3*/site-packages/pip-*.dist-info/INSTALLER" >/dev/null &&
        "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

# pip writes INSTALLER after a package's last file, but takes a folder without it for installed.
forget_half_installed() {
    local packages folder
    packages=$(echo "$venv"/lib/python3*/site-packages)
    for folder in "$packages"/*.dist-info; do
        [ -f "$folder/INSTALLER" ] || rm -rf "$folder"
    done
    rm -rf "$packages"/~*
}

run_pip() {
    : >"$log"
    # With a log, pip shows its bars in spite of --quiet.
    PIP_PROGRESS_BAR=off \
        "$venv/bin/python" -m pip --disable-pip-version-check --no-input --quiet --log "$log" "$@"
}

# The first index page that gave no answer, and why. pip goes on as if the page were empty;
# 404 is an answer: the index has no such package.
unanswered() {
    local first='/Could not fetch URL/{/: 404 /!{s/.*fetch URL (.*) - skipping/\1/;'
    # Of urllib3's nested errors only the innermost says something.
    first+='s/HTTPS?ConnectionPool.*Caused by (.*)\)$/\1/;s/<?pip[^>]*>: //;p;q}}'
    without_password "$(sed -nE "$first" "$log")"
}

# Ends with the reason of pip's failure, or with $1 and the next command $2.
explain_pip() {
    local page
    page=$(unanswered)
    [ -z "$page" ] || die "a package index cannot be read: $page; expected a page of packages;" \
        "next: fix the network, the proxy or the index (PIP_INDEX_URL and what else" \
        "'pip config list' shows; TORCH_CPU_INDEX), then: make install"
    ! grep -q 'DO NOT MATCH THE HASHES' "$log" ||
        die "a package index has another file than the one of $lock (both hashes are above), so" \
            "it was not installed; next: PIP_INDEX_URL=(an index that has it) make install, and" \
            "for torch TORCH_CPU_INDEX"
    die "${1:-pip failed: its error is above, its whole log is $log}; next: ${2:-make install}"
}

# The rows of the lock of these packages, each with the hashes below it.
locked() {
    sed -nE "/^($(IFS='|' && echo "$*"))==/,/[^\\]$/p" "$lock"
}

# Nothing is resolved, as a lock is complete. Without isolation: pip takes what a build needs from
# the index by its newest version and without a hash.
install_locked() {
    run_pip install --no-deps --no-build-isolation --require-hashes --requirement /dev/stdin "$@"
}

# Only its local version tells a CPU build from a CUDA build.
install_cpu_torch() {
    local rows wanted shown
    rows=$(locked torch)
    wanted=${rows%%[ ;]*}
    install_locked <<<"$rows" 2>&1 | { grep -v '^ERROR: .*torch' >&2 || true; } && return
    [ -z "$(unanswered)" ] && grep -q 'No matching distribution found' "$log" || explain_pip
    shown=$(without_password "$torch_index")
    say "pip's package index has no CPU build of torch: asking $shown"
    install_locked --index-url "$torch_index" <<<"$rows" && return
    grep -q 'No matching distribution found' "$log" || explain_pip
    explain_pip "$shown has no $wanted for $("$venv/bin/python" --version) on $(uname -m)" \
        "TORCH_CPU_INDEX=(an index that has it) make install"
}

# Before all else: the pip of the venv module is years old, and setuptools builds the rest.
install_tools() {
    local rows
    rows=$(locked pip setuptools)
    [ -z "$rows" ] || install_locked <<<"$rows" || explain_pip
}

install_packages() {
    install_tools
    if [ "$flavour" = cpu ]; then
        # It may be outside the folders that install_system.sh knows, as in a conda environment.
        "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
            scripts/install_system.sh vllm || exit 3
        install_cpu_torch
    fi
    install_locked <"$lock" || explain_pip
    run_pip install --no-deps --no-build-isolation -e ./executor -e . || explain_pip
}

check_usage
inputs=("$script" "$lock" pyproject.toml executor/pyproject.toml)
stamp=$venv/.installed-$(cat "${inputs[@]}" | cksum | cut -d' ' -f1)-$flavour
# Two makes at once take turns; so does a pip that outlived the call that started it.
exec 9<"$script"
flock -n 9 || { say "another install is running: waiting for it"; flock 9; }
if venv_is_whole; then
    [ ! -f "$stamp" ] || exit 0
    forget_half_installed
    # Builds of torch for CPU and CUDA count as the same version, so one would stay for the other.
    [ "$(cat "$venv/.flavour" 2>/dev/null || echo "$flavour")" = "$flavour" ] || make_venv
    # The file says that this script made it.
    pip_is_whole || [ ! -f "$venv/.flavour" ] || make_venv
else
    make_venv
fi
pip_is_whole ||
    die "$venv has no pip, so another tool made it; next: rm -rf $venv && make install"
rm -f "$venv"/.installed-*
echo "$flavour" >"$venv/.flavour"
say "installing the pinned packages ($flavour); the first time takes a few minutes"
install_packages
# As pip does for all but editable packages; where it cannot, each start compiles anew.
"$venv/bin/python" -m compileall -q src executor/src || true
touch "$stamp"
say "done: $venv"
