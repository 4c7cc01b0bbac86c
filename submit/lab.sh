#!/usr/bin/env bash
# A Slurm cluster of two nodes on this machine, to try submit scripts: submit/lab.sh COMMAND...
#
#     submit/lab.sh bash -c 'cd 03_ddp && sbatch --wait --output=ddp.txt submit.slurm --max-steps 20; cat ddp.txt'
#
# It starts Slurm's own programs (Debian: apt install slurmctld slurmd slurm-client munge) with everything of theirs in a
# temporary folder, runs the command with SITE=slurm_cpu, and takes all down again. The nodes are two slurmd on this machine:
# real scheduling and real srun, one host name. Scripts may ask for 4 GPUs a node; programs see those of this machine. With
# Debian's slurm-wlm-torque, qsub takes PBS scripts, too: they find PBS_O_WORKDIR and PBS_NODEFILE. (Its -v takes no blanks.)
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: submit/lab.sh COMMAND..." >&2; exit 2; }
export PATH="$PATH:/usr/sbin"
for program in slurmctld slurmd munged srun; do
    command -v "$program" >/dev/null || { echo "lab.sh: no $program here: apt install slurmctld slurmd slurm-client munge" >&2; exit 2; }
done
lab=$(mktemp -d "${TMPDIR:-/tmp}/lab.XXXXXX")
export SLURM_CONF="$lab/slurm.conf"  # from here on no command means another Slurm of this machine
user=$(id -un) host=$(hostname -s)
read -r -a ports < <(python3 -c 'import socket
held = [socket.create_server(("", 0)) for _ in range(3)]
print(*(one.getsockname()[1] for one in held))')

take_down() {
    if [ -s "$lab/slurmctld.pid" ]; then
        scancel --user="$user" 2>/dev/null || true
        for _ in $(seq 30); do
            [ -n "$(squeue --noheader 2>/dev/null)" ] || break
            sleep 0.1
        done
    fi
    for file in "$lab"/*.pid; do
        if [ -s "$file" ]; then kill "$(<"$file")" 2>/dev/null || true; fi
    done
    rm -rf "$lab" 2>/dev/null || { sleep 1; rm -rf "$lab"; }
}
trap take_down EXIT
trap 'exit 130' INT TERM

dd if=/dev/urandom of="$lab/key" bs=128 count=1 status=none
chmod 600 "$lab/key"
chmod 755 "$lab"
munged --force --key-file="$lab/key" --socket="$lab/munge" --pid-file="$lab/munged.pid" --log-file="$lab/munged.log" \
    --seed-file="$lab/seed"
# FirstJobId: MPICH names its shared memory by job and step; that of another lab, or of ranks once killed there, is not ours
cat >"$lab/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$lab/munge
StateSaveLocation=$lab/state
SlurmdSpoolDir=$lab/%n
SlurmctldPidFile=$lab/slurmctld.pid
SlurmdPidFile=$lab/%n.pid
SlurmctldLogFile=$lab/slurmctld.log
SlurmdLogFile=$lab/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
FirstJobId=$((1 + 2000 * RANDOM))
InactiveLimit=0
KillWait=2
MpiDefault=none
TaskProlog=$lab/prolog
PlugStackConfig=$lab/plugstack.conf
NodeName=127.0.0.1 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=64 RealMemory=16000 Gres=gpu:4
NodeName=127.0.0.2 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=64 RealMemory=16000 Gres=gpu:4
PartitionName=debug Nodes=127.0.0.[1-2] Default=YES MaxTime=60 OverSubscribe=YES
CONF
echo "optional spank_pbs.so" >"$lab/plugstack.conf"
cat >"$lab/prolog" <<'PROLOG'
#!/bin/sh
file="${SLURM_CONF%/*}/nodes.$SLURM_JOB_ID"
scontrol show hostnames "$SLURM_JOB_NODELIST" >"$file"
echo "export PBS_NODEFILE=$file"
PROLOG
chmod +x "$lab/prolog"
printf 'NodeName=127.0.0.[1-2] Name=gpu File=%s\n' /dev/null /dev/zero /dev/full /dev/random >"$lab/gres.conf"
export SITE="${SITE:-slurm_cpu}"
slurmctld
slurmd -N 127.0.0.1
slurmd -N 127.0.0.2
for _ in $(seq 300); do
    [ "$(sinfo --noheader --format=%T 2>/dev/null)" != idle ] || break
    sleep 0.1
done
if [ "$(sinfo --noheader --format=%T)" != idle ]; then
    tail -n 5 "$lab"/*.log >&2
    echo "lab.sh: Slurm does not come up" >&2
    exit 1
fi
"$@"
