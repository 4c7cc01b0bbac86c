#!/usr/bin/env bash
# A cluster on this machine: nodes with their own host names and addresses, a switch, links whose
# speed you choose.
#
#     cluster/lab.sh up 2 --rate 1gbit                  # nid1 and nid2; [--slurm]
#     cluster/lab.sh run -n 2 python 03_ddp/main.py     # mpiexec; [--ppn 1]: ranks per node
#     cluster/lab.sh rate 100mbit                       # also during a run; none: no limit
#     cluster/lab.sh on nid2 ip address                 # a command on a node, or on login
#     cluster/lab.sh kill nid2                          # the node dies, with all that runs on it
#     cluster/lab.sh status
#     cluster/lab.sh down
#
# LAB=name cluster/lab.sh ... uses a second lab. A node is a set of Linux namespaces, which last as
# long as its first process; all nodes end with the lab's first process. The nodes share this
# machine's processors, memory and disks; only the network is separate.
# More in LAB.md.
set -euo pipefail
program=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/lab.sh
PATH="$PATH:/usr/sbin:/sbin"
lab=${LAB_FOLDER:-${TMPDIR:-/tmp}/lab-$UID-${LAB:-lab}}  # LAB_FOLDER: set for commands within a lab
namespaces=(--net --mount --uts --ipc --pid)
network=10.77.0
max_nodes=32
use_exec=  # not empty: exec replaces this process by the command, so that signals reach it

fail() {
    echo "lab.sh: $1" >&2
    exit 2
}

# Arguments

check_rate() {
    [[ $1 =~ ^0*[1-9][0-9]*(\.[0-9]+)?[kmg]bit$ || $1 == none ]] ||
        fail "invalid rate $1: use for example 100mbit, or none"
}
check_count() { [[ $2 =~ ^[1-9][0-9]{0,3}$ ]] || fail "$1: $2 is not a whole number above 0"; }
check_value() { [ $# -gt 1 ] || fail "$1 requires a value"; }
check_node() {
    [[ $1 == login || ($1 == nid* && -e $lab/nodes/$1) ]] ||
        fail "unknown node $1: choose from login $(nodes)"
    is_alive "$1" || fail "node $1 is dead"
}
check_lab() {
    [ -e "$lab/ready" ] || fail "no lab is up: cluster/lab.sh up 2"
    is_up || fail "the lab has died: cluster/lab.sh down, and up again"
}

# State: the file holder contains the process id of the lab's first process. The files in nodes/
# contain those of the nodes, which are valid within the lab.

nodes() { (cd "$lab/nodes" && printf "%s\n" nid*) | sort -V | paste -s -d " "; }
is_up() {
    [ -s "$lab/holder" ] && grep -q -a -F "$lab" "/proc/$(<"$lab/holder")/cmdline" 2>/dev/null
}
is_alive() { [ "$1" = login ] || as_root test -e "/proc/$(<"$lab/nodes/$1")/ns/net"; }
as_root() {  # COMMAND: run it on the login node, as root of the lab
    local user=()
    [ ! -e "$lab/user" ] || user=(--user --preserve-credentials)
    ${use_exec:+exec} nsenter --target "$(<"$lab/holder")" "${user[@]}" "${namespaces[@]}" \
        setpriv --pdeathsig TERM "$@"
}
at() {  # NODE COMMAND, from within the lab
    ${use_exec:+exec} nsenter --target "$(<"$lab/nodes/$1")" "${namespaces[@]}" \
        env -C "$PWD" setpriv --pdeathsig TERM "${@:2}"
}
as_user() {  # COMMAND: run it as the invoking user, if a user namespace made him root
    if [ -e "$lab/user" ]; then
        ${use_exec:+exec} unshare --user --map-user="$(head -n 1 "$lab/user")" \
            --map-group="$(tail -n 1 "$lab/user")" "$@"
    else
        ${use_exec:+exec} "$@"
    fi
}

# Up

up() {
    check_value up "$@"
    check_count up "$1"
    local count=$1 rate=none slurm=no user=() problem parent=
    shift
    ((count <= max_nodes)) || fail "$count nodes are too many for one machine: at most $max_nodes"
    while [ $# -gt 0 ]; do
        case $1 in
            --rate) check_value "$@"; check_rate "$2"; rate=$2; shift 2 ;;
            --slurm) slurm=yes; shift ;;
            *) fail "up: unknown option $1" ;;
        esac
    done
    [[ ${LAB:-lab} =~ ^[A-Za-z0-9_-]+$ ]] || fail "LAB=$LAB: use letters, digits, - and _ only"
    [[ $lab != *[[:space:]]* ]] || fail "TMPDIR=$TMPDIR has a blank: export TMPDIR=/tmp"
    [ "$(uname)" = Linux ] ||
        fail "nodes are made of Linux namespaces: use a Linux machine, or a virtual one"
    require iproute2 ip tc
    require util-linux nsenter unshare setpriv
    [ $slurm = no ] || require "slurmctld slurmd slurm-client munge" slurmctld slurmd srun munged
    if ! unshare "${namespaces[@]}" --fork --mount-proc ip link set lo up 2>/dev/null; then
        user=(--user --map-root-user)
        unshare "${user[@]}" "${namespaces[@]}" --fork --mount-proc ip link set lo up 2>/dev/null ||
            fail "this kernel does not let you create namespaces: see LAB.md, or run it as root"
    fi
    ! is_up || fail "the lab ${LAB:-lab} is up already: cluster/lab.sh down, or \
LAB=another cluster/lab.sh up $count"
    [ ! -e "$lab/holder" ] || rm -rf "$lab"  # left by a lab that died
    (umask 077 && mkdir "$lab") 2>/dev/null ||
        fail "cannot create the folder $lab: another lab.sh up is running; if it was \
killed, cluster/lab.sh down"
    trap 'kill -KILL $parent 2>/dev/null; rm -rf "$lab"; exit 130' INT TERM
    mkdir "$lab/nodes"
    ln -s "$program" "$lab/lab.sh"  # the launcher's path must not contain a space
    [ ${#user[@]} = 0 ] || { id -u; id -g; } >"$lab/user"
    id -un >"$lab/name"
    echo "$rate" >"$lab/rate"
    setsid unshare "${user[@]}" "${namespaces[@]}" --fork --kill-child \
        bash "$program" hold "$lab" "$count" $slurm </dev/null >"$lab/log" 2>&1 &
    parent=$!
    while [ ! -e "$lab/ready" ] && kill -0 $parent 2>/dev/null; do sleep 0.01; done
    if [ ! -e "$lab/ready" ]; then
        problem=$(tail -n 1 "$lab/log")
        rm -rf "$lab"
        fail "the lab could not start: $problem"
    fi
    status
}
require() {  # PACKAGE PROGRAM...: check that the programs of a Debian package are installed
    local name
    for name in "${@:2}"; do
        command -v "$name" >/dev/null || fail "$name not found: apt install $1"
    done
}

# The first processes of the lab and of its nodes. They keep the namespaces, and bash reaps
# orphaned processes.

stay() {
    while true; do
        sleep 1000 &
        wait
    done
}

hold() {  # FOLDER COUNT yes|no: start the login node, the switch and COUNT nodes, with Slurm or not
    lab=$1
    local count=$2 number holder
    read -r holder _ </proc/self/stat  # as in the outer system, whose /proc is still mounted
    echo "$holder" >"$lab/holder"
    mount -t proc proc /proc
    hostname login
    {
        printf '%s localhost\n' 127.0.0.1 ::ffff:127.0.0.1
        printf '%s login\n' $network.254 ::ffff:$network.254
        for number in $(seq "$count"); do
            printf "%s nid$number\n" "$network.$number" "::ffff:$network.$number"
        done
    } >"$lab/hosts"
    mount --bind "$lab/hosts" /etc/hosts
    ip link set lo up
    # Give the switch its own address. By default it has that of a wire; if this wire's node dies,
    # packets are lost for a minute
    ip link add name switch address 02:00:00:00:00:fe type bridge
    ip address add $network.254/24 dev switch
    ip link set switch mtu 9000 up
    for number in $(seq "$count"); do
        unshare "${namespaces[@]}" --fork --kill-child \
            bash "$program" hold_node "$lab" "nid$number" &
    done
    for number in $(seq "$count"); do
        until [ -s "$lab/nodes/nid$number" ]; do sleep 0.01; done
        ip link add "wire$number" mtu 9000 type veth \
            peer name eth0 netns "$(<"$lab/nodes/nid$number")"
        ip link set "wire$number" master switch up
        at "nid$number" ip address add "$network.$number/24" dev eth0
        at "nid$number" ip link set eth0 mtu 9000 up
    done
    limit "$lab" "$(<"$lab/rate")"
    [ "$3" = no ] || start_slurm "$count"
    touch "$lab/ready"
    stay
}

hold_node() {  # FOLDER NODE
    local number
    read -r number _ </proc/self/stat
    mount -t proc proc /proc
    mount -t tmpfs tmpfs /dev/shm  # a node must not see the shared memory of another
    hostname "$2"
    ip link set lo up
    echo "$number" >"$1/nodes/$2"
    stay
}

limit() {  # FOLDER RATE: limit what each node sends, and what the switch sends to it
    lab=$1
    local node wire
    echo "$2" >"$lab/rate"
    for node in $(nodes); do
        wire=wire${node#nid}
        [ -e "/proc/$(<"$lab/nodes/$node")/ns/net" ] || continue
        limit_device "$2" eth0 at "$node"
        if ip link show "$wire" >/dev/null 2>&1; then limit_device "$2" "$wire"; fi
    done
}
limit_device() {  # RATE DEVICE PREFIX...: the prefix runs tc on the device's node
    if [ "$1" = none ]; then
        "${@:3}" tc qdisc delete dev "$2" root 2>/dev/null || true  # there may be no limit
    else
        "${@:3}" tc qdisc replace dev "$2" root tbf rate "$1" burst 32kb limit 4mb
    fi
}

# COUNT: slurmctld on the login node, a slurmd on each node. A node's 4 GPUs can be requested, not
# used.
start_slurm() {
    mkdir "$lab/slurm"
    dd if=/dev/urandom of="$lab/slurm/key" bs=128 count=1 status=none
    chmod 600 "$lab/slurm/key"
    cat >"$lab/slurm/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=login($network.254)
SlurmUser=$(<"$lab/name")
SlurmdUser=$(<"$lab/name")
AuthType=auth/munge
AuthInfo=socket=$lab/slurm/munge,cred_expire=5
StateSaveLocation=$lab/slurm/state
SlurmdSpoolDir=$lab/slurm/%n
SlurmctldPidFile=$lab/slurm/slurmctld.pid
SlurmdPidFile=$lab/slurm/%n.pid
SlurmctldLogFile=$lab/slurm/slurmctld.log
SlurmdLogFile=$lab/slurm/%n.log
SlurmdParameters=config_overrides
SlurmdTimeout=5
MessageTimeout=5
SchedulerParameters=sched_interval=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
InactiveLimit=0
KillWait=2
MpiDefault=none
TaskProlog=$lab/slurm/prolog
PlugStackConfig=$lab/slurm/plugstack.conf
NodeName=nid[1-$1] CPUs=64 RealMemory=16000 Gres=gpu:4
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 OverSubscribe=YES
CONF
    for device in null zero full random; do
        echo "NodeName=nid[1-$1] Name=gpu File=/dev/$device"
    done >"$lab/slurm/gres.conf"
    # With Debian's slurm-wlm-torque, qsub accepts PBS scripts, which require PBS_NODEFILE. (Its -v
    # accepts no blanks.)
    echo "optional spank_pbs.so" >"$lab/slurm/plugstack.conf"
    cat >"$lab/slurm/prolog" <<'PROLOG'
#!/bin/sh
file="${SLURM_CONF%/*}/nodes.$SLURM_JOB_ID"
scontrol show hostnames "$SLURM_JOB_NODELIST" >"$file"
echo "export PBS_NODEFILE=$file"
PROLOG
    chmod +x "$lab/slurm/prolog"
    export SLURM_CONF=$lab/slurm/slurm.conf
    as_user munged --force --key-file="$lab/slurm/key" --socket="$lab/slurm/munge" \
        --pid-file="$lab/slurm/munged.pid" --log-file="$lab/slurm/munged.log" \
        --seed-file="$lab/slurm/seed"
    as_user slurmctld
    for number in $(seq "$1"); do at "nid$number" bash "$program" as_user "$lab" slurmd; done
    for _ in $(seq 300); do
        [ "$(sinfo --noheader --format=%T 2>/dev/null)" != idle ] || return 0
        sleep 0.05
    done
    tail -q -n 1 "$lab/slurm/slurmctld.log" "$lab/slurm/nid1.log"
    exit 1
}

# While the lab is up

run() {
    local ranks="" ranks_per_node="" live_nodes=() node
    while [[ ${1:-} == -* ]]; do
        case $1 in
            -n) check_value "$@"; check_count -n "$2"; ranks=$2; shift 2 ;;
            --ppn) check_value "$@"; check_count --ppn "$2"; ranks_per_node=$2; shift 2 ;;
            *) fail "run: unknown option $1" ;;
        esac
    done
    [[ -n $ranks && $# -gt 0 ]] || fail "usage: run -n RANKS [--ppn K] COMMAND"
    check_lab
    for node in $(nodes); do
        if is_alive "$node"; then live_nodes+=("$node"); fi
    done
    ranks_per_node=${ranks_per_node:-$(((ranks + ${#live_nodes[@]} - 1) / ${#live_nodes[@]}))}
    ((ranks <= ranks_per_node * ${#live_nodes[@]})) ||
        fail "$ranks ranks are more than $ranks_per_node on each of ${#live_nodes[@]} nodes"
    [[ $(mpiexec --version 2>/dev/null) == *HYDRA* ]] ||
        fail "MPICH's mpiexec is not on the path: . .venv/bin/activate"
    enter_lab mpiexec -launcher ssh -launcher-exec "$lab/lab.sh" \
        -hosts "$(IFS=,; echo "${live_nodes[*]}")" -n "$ranks" -ppn "$ranks_per_node" "$@"
}

enter_lab() {  # COMMAND: run it on the login node, with LAB_FOLDER set
    export LAB_FOLDER=$lab LAB_LINK  # LAB_LINK is written to the record of a run
    LAB_LINK=$(<"$lab/rate")
    # MPICH's default assumes that all ranks share memory
    export MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp
    if [ -e "$lab/slurm" ]; then export SLURM_CONF=$lab/slurm/slurm.conf SITE=${SITE:-slurm_cpu}; fi
    use_exec=yes
    as_root env -C "$PWD" "$@"
}

kill_node() {
    check_lab
    check_node "$1"
    [ "$1" != login ] || fail "the login node is the lab itself: cluster/lab.sh down"
    local number
    number=$(<"$lab/nodes/$1")
    # Take the link down first, so that no connection is closed cleanly
    as_root nsenter --target "$number" --net ip link set eth0 down
    as_root bash -c 'kill -KILL "$1"' _ "$number"  # some systems have no program kill
}

status() {
    check_lab
    local node state
    echo "lab ${LAB:-lab}: link $(<"$lab/rate")$([ ! -e "$lab/slurm" ] || echo ", with Slurm")"
    for node in $(nodes); do
        state=up
        is_alive "$node" || state=dead
        echo "$node $network.${node#nid} $state"
    done
}

down() {
    [ -d "$lab" ] || fail "no lab is up: cluster/lab.sh up 2"
    if is_up; then
        kill -KILL "$(<"$lab/holder")"
        while is_up; do sleep 0.01; done
    fi
    rm -rf "$lab"
}

case ${1:-} in
    up | run) "$@" ;;
    on)
        [ $# -gt 2 ] || fail "usage: on NODE COMMAND"
        check_lab
        check_node "$2"
        enter_lab bash "$program" at_node "${@:2}"
        ;;
    rate)
        check_value "$@"
        check_rate "$2"
        check_lab
        as_root bash "$program" limit "$lab" "$2"
        ;;
    kill)
        check_value "$@"
        kill_node "$2"
        ;;
    status | down) "$1" ;;
    # Within the lab
    hold | hold_node | limit) "$@" ;;
    as_user)
        lab=$2
        use_exec=yes
        as_user "${@:3}"
        ;;
    at_node)
        use_exec=yes
        if [ "$2" = login ]; then
            as_user "${@:3}"
        else
            at "$2" bash "$program" as_user "$lab" "${@:3}"
        fi
        ;;
    -x)  # mpiexec starts its helper on a node as if by ssh
        use_exec=yes
        at "$2" bash "$program" as_user "$lab" sh -c "${*:3}"
        ;;
    *) fail "up NODES [--rate 1gbit] [--slurm], run -n RANKS [--ppn K] COMMAND, on NODE COMMAND, \
rate 100mbit, kill NODE, status, down" ;;
esac
