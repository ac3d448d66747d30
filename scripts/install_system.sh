#!/bin/bash
# Install the system packages that the demo, the tests and the private Slurm cluster need, where
# missing.
#
#   scripts/install_system.sh                  Slurm, munge, MariaDB core
#   scripts/install_system.sh slurm chromium   also headless Chromium and fonts
#   scripts/install_system.sh vllm             libnuma, which vLLM's CPU build links
#   scripts/install_system.sh --check [GROUP]  only say what is missing
#
# Exit: 0 all there, 2 usage, 3 something is missing and could not be installed here.
set -euo pipefail
# The daemons live in sbin, which a user's PATH often lacks.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

# program -> package. Alternatives after | in order: Ubuntu 22.04 has MariaDB's version in the name.
declare -A SLURM=(
  [slurmctld]=slurmctld [slurmd]=slurmd [slurmdbd]=slurmdbd [sbatch]=slurm-client
  [munged]=munge
  # the tests' clusters whose nodes have a network each, and the faults of these networks
  [ip]=iproute2 [nft]=nftables
  [mariadbd]='mariadb-server-core|mariadb-server-core-10.6'
  [mariadb]='mariadb-client-core|mariadb-client-core-10.6'
)
# file below the multiarch library folder -> package
declare -A SLURM_FILES=(
  [select_cons_tres.so]=slurm-wlm-basic-plugins
  [accounting_storage_mysql.so]=slurm-wlm-mysql-plugin
)
declare -A CHROMIUM=([chromium]='chromium|chromium-browser')

main() {
  local check=no groups=() wanted=() group
  for argument in "$@"; do
    case $argument in
      --check) check=yes ;;
      slurm | chromium | vllm) groups+=("$argument") ;;
      -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; return 0 ;;
      *) echo "install_system: unknown argument '$argument':" \
           "expected --check, slurm, chromium, vllm" >&2
         return 2 ;;
    esac
  done
  [ ${#groups[@]} -gt 0 ] || groups=(slurm)
  for group in "${groups[@]}"; do mapfile -t -O ${#wanted[@]} wanted < <("missing_$group"); done
  [ ${#wanted[@]} -gt 0 ] || return 0
  if [ $check = yes ]; then
    printf 'missing: %s\n' "${wanted[@]%%|*}"
    return 3
  fi
  install_packages "${wanted[@]}"
  for group in "${groups[@]}"; do
    if [ -n "$("missing_$group")" ]; then
      echo "install_system: apt-get succeeded, but still missing: $("missing_$group" | xargs)" >&2
      return 3
    fi
  done
}

missing_slurm() {
  local program file
  for program in "${!SLURM[@]}"; do
    command -v "$program" >/dev/null || echo "${SLURM[$program]}"
  done
  for file in "${!SLURM_FILES[@]}"; do
    compgen -G "/usr/lib/*/slurm*/$file" >/dev/null || echo "${SLURM_FILES[$file]}"
  done
}

missing_chromium() {
  command -v chromium >/dev/null || command -v chromium-browser >/dev/null ||
    echo "${CHROMIUM[chromium]}"
  compgen -G '/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf' >/dev/null || echo fonts-dejavu-core
}

missing_vllm() {
  [[ $(ldconfig -p) == *libnuma.so.1* ]] || echo libnuma1
}

# The first alternative that apt offers.
available() {
  local name IFS='|'
  for name in $1; do
    if [[ $(LC_ALL=C apt-cache policy "$name" 2>/dev/null) == *'Candidate: '[^\(]* ]]; then
      echo "$name"
      return 0
    fi
  done
  return 1
}

resolve() {
  local entry name
  for entry in "$@"; do
    name=$(available "$entry") || return 1
    echo "$name"
  done
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

may_be_root() {
  [ "$(id -u)" = 0 ] || { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }
}

ask_a_person() {
  echo "install_system: $1; run as root:" >&2
  echo "  apt-get update && apt-get install -y --no-install-recommends ${*:2}" >&2
  exit 3
}

install_packages() {
  local wanted=("$@") names log
  command -v apt-get >/dev/null ||
    { echo "install_system: no apt-get here; install by hand: ${wanted[*]%%|*}" >&2; exit 3; }
  may_be_root || ask_a_person "packages are missing and this user may not install them" \
    "${wanted[@]%%|*}"
  log=$(mktemp)
  # A fresh machine or image has no package lists.
  if ! names=$(resolve "${wanted[@]}"); then
    as_root apt-get update -qq >"$log" 2>&1 || { tail -n 20 "$log" >&2
      ask_a_person "apt-get update failed" "${wanted[@]%%|*}"; }
    names=$(resolve "${wanted[@]}") ||
      ask_a_person "apt offers no such package" "${wanted[@]%%|*}"
  fi
  install_quietly "$log" $names || {
    # Lists may be older than the archive: fetch them once and try again.
    as_root apt-get update -qq >>"$log" 2>&1
    install_quietly "$log" $names; } || { tail -n 20 "$log" >&2
      ask_a_person "apt-get install failed (log: $log)" $names; }
  rm -f "$log"
}

install_quietly() {
  # RUNLEVEL=1: no service is started by a package; the private cluster has its own daemons.
  as_root env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${@:2}" >>"$1" 2>&1
}

main "$@"
