#!/usr/bin/env bash
# A bare Debian, a new user, the README's first command:
#     bash tests/bare_debian.sh bookworm [COMMAND ...]      (or trixie, sid; as root, by debootstrap)
# What `make demo` says is missing is installed; then it has to reach its picture. COMMAND, such as
# "make test", comes after. The system is made in /tmp/bare/SUITE, and stays there. The seconds of
# each part are printed; one that fails is named again at the end, and the exit code is 1.
set -euo pipefail
suite=$1
system=/tmp/bare/$suite
home=/home/student
checkout=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
shift
if [ -z "${INSIDE:-}" ]; then  # mounts of its own, which end with it
    INSIDE=yes exec unshare --mount "$0" "$suite" "$@"
fi

failed=()
part() {  # what follows, with its seconds
    local started=$SECONDS name=$1 code=0
    shift
    "$@" || code=$?
    [ "$code" = 0 ] || failed+=("$name")
    printf '== %-9s %-40s %4d s, exit %d\n' "$suite" "$name" $((SECONDS - started)) "$code"
}
install() {
    chroot "$system" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -qq --no-install-recommends "$@" >/dev/null
}
student() {
    chroot "$system" runuser -u student -- env -i HOME="$home" PATH=/usr/bin:/bin \
        sh -c "cd ~/my\ workshop && $1"
}

rm -rf "$system"
part debootstrap debootstrap --variant=minbase --include=ca-certificates "$suite" "$system" \
    >/tmp/debootstrap.log
mount --rbind /dev "$system/dev"
mount -t tmpfs tmpfs "$system/dev/shm"
mount -t proc proc "$system/proc"
mount -t sysfs sysfs "$system/sys"
cp /etc/resolv.conf /etc/hosts "$system/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$system/etc/ssl/certs/"  # with a site's own authority
chroot "$system" apt-get update -qq -o Acquire::Check-Valid-Until=false  # a mirror may lag
install python3 make git
chroot "$system" useradd --create-home student
git clone -q "$checkout" "$system$home/my workshop"
chroot "$system" chown -R student:student "$home"

said=$(student "make demo" 2>&1) || true
echo "$said"
read -ra lacking <<<"$(grep -o 'apt install [a-z0-9+ -]*' <<<"$said" | cut -d ' ' -f 3-)"
part "apt install ${lacking[*]}" install "${lacking[@]}"
student "python3 --version; g++ --version | head -n 1"
part "make setup" student "make setup"
part "make demo" student "make demo"
student "ls -l results/demo.png"
for command; do
    part "$command" student "$command"
done
[ ${#failed[@]} = 0 ] || { echo "$suite: failed: ${failed[*]}" >&2; exit 1; }
