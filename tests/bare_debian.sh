#!/usr/bin/env bash
# Run the README's first command on a bare Debian, as a new user; as root, with debootstrap:
#     bash tests/bare_debian.sh bookworm [COMMAND ...]   (or trixie, sid; Ubuntu's noble, resolute)
# Install the packages that `make demo` says are missing. Then `make demo` has to draw its picture, in one
# pass, and each COMMAND runs, such as "make test". The system stays in /tmp/bare/SUITE. Each step prints its
# seconds; failed steps are listed at the end, and then the exit code is 1.
set -euo pipefail
suite=$1
system=/tmp/bare/$suite
home=/home/student
checkout=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
shift
if [ -z "${INSIDE:-}" ]; then  # in a mount namespace, so that the mounts end with this script
    INSIDE=yes exec unshare --mount "$0" "$suite" "$@"
fi

failed_steps=()
run_step() {  # NAME COMMAND...: run it and print its seconds
    local start=$SECONDS name=$1 code=0
    shift
    "$@" || code=$?
    [ "$code" = 0 ] || failed_steps+=("$name")
    printf '== %-9s %-40s %4d s, exit %d\n' "$suite" "$name" $((SECONDS - start)) "$code"
}
apt_install() {
    chroot "$system" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -qq --no-install-recommends "$@" >/dev/null
}
run_as_student() {
    chroot "$system" runuser -u student -- env -i HOME="$home" PATH=/usr/bin:/bin \
        sh -c "cd ~/my\ workshop && $1"
}

source=()
case $suite in
    noble | resolute)  # --no-check-gpg: Debian has no package of Ubuntu's keys
        source=(http://archive.ubuntu.com/ubuntu gutsy --no-check-gpg "--components=main,universe") ;;
esac

rm -rf "$system"
run_step debootstrap debootstrap --variant=minbase --include=ca-certificates \
    "${source[@]:2}" "$suite" "$system" "${source[@]:0:2}" >/tmp/debootstrap.log
mount --rbind /dev "$system/dev"
mount -t tmpfs tmpfs "$system/dev/shm"
mount -t proc proc "$system/proc"
mount -t sysfs sysfs "$system/sys"
cp /etc/resolv.conf /etc/hosts "$system/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$system/etc/ssl/certs/"  # includes a site's own CA
chroot "$system" apt-get update -qq -o Acquire::Check-Valid-Until=false  # a mirror may lag
apt_install python3 make git
chroot "$system" useradd --create-home student
git clone -q "$checkout" "$system$home/my workshop"
chroot "$system" chown -R student:student "$home"

output=$(run_as_student "make demo" 2>&1) || true
echo "$output"
read -ra packages <<<"$(grep -o 'apt install [a-z0-9+ -]*' <<<"$output" | cut -d ' ' -f 3-)"
run_step "apt install ${packages[*]}" apt_install "${packages[@]}"
run_as_student "python3 --version; g++ --version | head -n 1"
run_step "make demo" run_as_student "make demo PASSES=1"
run_as_student "ls -l results/demo.png"
for command; do
    run_step "$command" run_as_student "$command"
done
[ ${#failed_steps[@]} = 0 ] || { echo "$suite: failed: ${failed_steps[*]}" >&2; exit 1; }
