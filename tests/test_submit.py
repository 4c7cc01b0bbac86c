"""Submit scripts and site files, without a scheduler, and what check_script.py says of scripts."""

import re
import shutil
import sys

import pytest
from conftest import LESSONS, ROOT, load_module, run_command, tracked_files

SITES = sorted(tracked_files(ROOT.glob("submit/sites/*.sh")))


@pytest.mark.check
def test_a_submit_script_runs_without_a_scheduler(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text('mpiexec() { echo mpiexec "$@"; }\n')
    result = run_command(["bash", "submit.slurm", "--epochs", 3], cwd=ROOT / "03_ddp",
                         env={"SITE": "here", "VENV": str(tmp_path)})
    assert (result.code, result.out) == (0, "mpiexec -n 2 python main.py --epochs 3\n"), result.err


@pytest.mark.check
@pytest.mark.fault
def test_a_rehearsal_without_a_scheduler_is_refused(tmp_path):
    """Although course.sh has a function qsub."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    for name in "bash", "dirname":
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    text = (ROOT / "submit" / "course.sh").read_text()
    (tmp_path / "course.sh").write_text(text.replace("/shared/workshop-env", str(tmp_path)))
    command = ["bash", "-c", '. ./course.sh; bash "$0"', ROOT / "submit" / "rehearse.sh"]
    result = run_command(command, cwd=tmp_path, env={"PATH": f"{tmp_path}/bin"})
    assert result.code == 2 and not result.out, result.out
    assert re.fullmatch("rehearse.sh: neither sbatch nor qsub found: .*\n", result.err), result.err


@pytest.mark.check
@pytest.mark.fault
@pytest.mark.parametrize(("env", "message"), [
    ({"SITE": "atlantis"}, "SITE=atlantis: there is no submit/sites/atlantis.sh"),
    ({"VENV": "/nowhere"}, "no environment in /nowhere that you may read: make setup SITE=here"),
    ({"FLAGS": "--data-dir 'my data'"}, "no flag may contain")])  # PBS would split it
def test_wrong_variables_of_a_submit_script_are_refused(env, message):
    env = {"SITE": "here", "VENV": sys.prefix, "PBS_O_WORKDIR": str(ROOT / "03_ddp")} | env
    result = run_command(["bash", "submit.pbs"], cwd=ROOT / "03_ddp", env=env)
    assert result.code == 2 and message in result.err and not result.out, result.err


@pytest.mark.check
@pytest.mark.parametrize("site", SITES, ids=lambda path: path.stem)
def test_each_site_file_launches_the_ranks(site, tmp_path):
    """As many as the batch system says, then as many as the sweep says by RANKS and NODES."""
    (tmp_path / "nodes").write_text("x1\nx1\nx2\nx2\n")  # a node counts once
    env = {"PBS_NODEFILE": "nodes", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "USER": "me",
           "SLURM_CPUS_PER_TASK": "8", "PYTORCH": "/p", "CONTAINER": "/c.sif"}
    command = ('module() { :; }; conda() { :; }; mpiexec() { echo mpiexec "$@"; }; '
               f'srun() {{ echo srun "$@"; }}; . "{site}"; launch python main.py --epochs 3; '
               'RANKS=5 NODES=1; launch python')
    result = run_command(["bash", "-euc", command], env=env, cwd=tmp_path)
    assert result.code == 0, result.err
    first_line, second_line = result.out.splitlines()
    assert re.match("(mpiexec|srun) .*python main.py --epochs 3$", first_line)
    assert re.search(" (-n |--ntasks=)5 ", second_line)


@pytest.mark.check
def test_submit_scripts_of_all_chapters_are_equal():
    for name in "submit.pbs", "submit.slurm":
        for folder in {path.parent for path in LESSONS.values()} - {ROOT / "01_single_node"}:
            text = re.sub(r"(-N |--job-name=)\w+", r"\1ddp", (folder / name).read_text())
            text = re.sub(r'"\${PROGRAM:-(main|fsdp).py}"', "main.py", text)  # two programs
            assert text == (ROOT / "03_ddp" / name).read_text()


CHECKED_LINES = {  # of public scripts, and what check_script.py says; empty: nothing
    "# SBATCH -n 2": "not read by the scheduler", "# PBS -q a": "note: not read",
    "#sbatch -N 2": "write `#SBATCH `",
    "#PSB -q debug": "write `#PBS `", "##SBATCH -n 8": "",
    "#SBATCH --nodes=2 #SBATCH -n 8": "second directive", "#SBATCH -output=x": "`utput=x`",
    "#SBATCH -J a \\\n--nodes=2": "not continue", "#PBS -q debug \\\n-l x=y": "",
    "#SBATCH --array=1-9 -o x%A": "add %a", "#SBATCH --array=1-9 -o x%j": "",
    "#SBATCH --export=NONE\nsrun a": "not even PATH",
    "#SBATCH --export=NONE\nunset SLURM_EXPORT_ENV\nsrun a": "",
    "#SBATCH -n 8\n#SBATCH --ntasks=9": "--ntasks is 9, and line 3 says 8",
    "#SBATCH --mail-type=begin\n#SBATCH --mail-type=end": "",
    "#SBATCH -n 1 --ntasks-per-n=2": "--ntasks=1 overrides",
    "#SBATCH --signal=B:USR1@60\nsrun a": "this ends the shell",
    "#SBATCH --signal=SIGUSR2@60\nsrun -n 1 torchrun a": "ends torchrun",
    "#SBATCH --signal=USR1@60\nsrun -n 1 torchrun --signals-to-handle=SIGUSR1 a": "",
    "#SBATCH --signal=B:USR1@60\ntrap a USR1\nsrun a &\nwait": "",
    "#PBS -l walltime=30": "walltime=30 is in seconds", "#PBS -l walltime=3600": "",
    "#PBS -o logs/x\nmkdir -p logs": "",
    "ls\n#SBATCH --nodes=2": "first command", "#SBATCH -o here/": "is a folder",
    "#SBATCH --output=logs/%j.out": "no folder logs:", "#SBATCH -o here/%x.%j": "",
    "#PBS -o logs/": "no folder logs:", "#PBS -o host:logs/x -e here/$x/": "",
    "#sbatch -N 2 run": "", "ls <<A\n#SBATCH -N 2\nA": "", "if true": "bash: syntax error",

    "#SBATCH --gres=gpu:4\npython a.py": "note: one of 4 GPUs",
    "#SBATCH --nodes=2\ntorchrun a.py": "torchrun uses one of 2 nodes",
    "#SBATCH -N 2\nsrun python x": "", "#SBATCH -N 2\nlaunch python x": "",
    "#SBATCH --gres=gpu:a100:4\ntorchrun --nproc-per-node 4 a.py": "",
    "#SBATCH -G 4\ntorchrun --nproc-per-node 8 a.py": "ranks on a node: 8, GPUs: 4",
    "#SBATCH --gpus-per-node=4\nN=2\nuv run torchrun --nproc_per_node=$N a.py": "so some are idle",
    "#SBATCH -N2 -n8 --gpus-per-node=2\nsrun python a.py": "ranks on a node: 4, GPUs: 2",
    "#SBATCH -N 2 --ntasks-per-node=4\nsrun torchrun --nproc-per-node 4 a.py": "8 tasks start",
    "#SBATCH -N 2 --ntasks-per-node=4\nsrun -n 2 torchrun --nnodes $SLURM_NNODES "
    "--rdzv-backend c10d --rdzv-endpoint $X:1 a.py": "",
    "cd x\nmpiexec -n 8 --ppn $N \\\n torchrun --nproc-per-node=$N a.py": "8 tasks start torchrun",
    "#PBS -l select=1+1\ncd x\ntorchrun --nnodes=2 --node_rank=$1 --master_addr=$2 a.py":
        "--nnodes 2, and torchrun is started on 1",
    "#PBS -l select=2:mpiprocs=4\ncd x\nmpiexec -n 16 --ppn 4 python a.py": "job has 2 nodes",
    "#PBS -l select=2:mpiprocs=4\ncd x\nmpiexec -n 4 --ppn 4 python a.py": "1 of the job's 2",
    "#PBS -l select=2:mpiprocs=4\ncd x\nmpiexec -n $((2 * 4)) python a.py": "",
    "#PBS -l select=2:mpiprocs=4\nmpiexec -n 8 python a.py": "in your home folder",
    "#PBS -l select=1,wd\npython a.py": "", "#PBS -l wd\npython a.py": "", "#YBATCH -r a": "",
    "#SBATCH -N 2\nmpirun -n 6 a": "not enough slots",
    "#SBATCH -N 2 --exclusive\nmpirun -n 6 a": "",
    "cd x\nhorovodrun -np 8 -H a:2,b:2 python a.py": "-np 8, and -H a:2,b:2",
    "#SBATCH -N 2\nA=(--machine_rank $SLURM_PROCID)\nA+=(--num_machines 2 --main_process_ip $X)\n"
    'srun accelerate launch "${A[@]}" a.py': "--machine_rank 0 on each node",
    "#SBATCH -N 2\nsrun bash -c 'torchrun --nnodes=2 \\\n --node_rank $SLURM_NODEID "
    "--master_addr=$X a.py'": "",
    "#SBATCH -N 2\nsrun torchrun --nnodes=2 --rdzv-endpoint=$X a": "each node is node 0",
    "#SBATCH -N 2\nsrun torchrun --nnodes=2 --rdzv-backend=c10d a": "give the first node",
    "#SBATCH -N 2\nsrun torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:1 a":
        "another machine on each",
    "#SBATCH -N 2\nX=$(scontrol show hostnames \\$SLURM_NODELIST)": "without the \\",
    "#SBATCH -N 2\nsrun accelerate launch --num_machines 1 a.py": "2 tasks start accelerate",
    "#SBATCH -N 2\nsrun torchrun $FLAGS a.py": "",
    "#PBS -l select=2\ncd x\nfor h in $H; do ssh $h torchrun --nnodes=3 --rdzv-backend=c10d "
    "--rdzv-endpoint=$X a.py; done": "--nnodes 3, and the job has 2",
    "#SBATCH -N 4\ndeepspeed --hostfile h --num_nodes 2 a.py": "--num_nodes 2, and the job has 4",
    "#SBATCH -N 2 -n 4\nexport WORLD_SIZE=2\nsrun python a.py": "WORLD_SIZE=2, and srun starts 4",
    "#SBATCH -N 2\nexport RANK=$SLURM_PROCID\nsrun python a.py": "note: RANK is 0 for all",
    "#SBATCH -N 2\nsrun bash -c 'RANK=$SLURM_LOCALID python a.py'": "RANK is $SLURM_PROCID",
    "#SBATCH -N 2 -n 8\nsrun -n 4 python a.py": "4 ranks, and the job has 8 tasks",
    "#SBATCH -n 8\nsrun -n 16 ./a": "More processors requested",
    "#SBATCH -N 2 -G 8\necho h slots=8 > hosts\ndeepspeed --hostfile hosts a.py": "slots=8 in the",
    "#SBATCH -N 2 -G 8\nhorovodrun -np 8 -H a:8,b:8 python a.py": "a node has 4 GPUs",
    "#SBATCH --gres=gpu:4\ntorchrun --nproc-per-node=$SLURM_GPUS_PER_NODE a": "not set, as",
    "#SBATCH --nodes=2\npython a.py": "note: one of 2 nodes",
    "#SBATCH -N 2\nMASTER_ADDR=$(scontrol show hostnames | tail -n 1)\nsrun python a.py":
        "the last node",
    "#SBATCH -N 2\nsrun torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=n1:1 a.py":
        "may not belong to the job",
    "#SBATCH -N 2\nfor ((i=1; i<2; i++)); do srun -w $i torchrun --nnodes=2 --node_rank=$i "
    "--master_addr=$X a.py; done": "node 0 is never started",
    "#SBATCH -n 2\n#SBATCH hetjob\n#SBATCH -n 4\nsrun -n 9 python a": "",
    "#SBATCH -N 4\nif [ $SLURM_NNODES -eq 1 ]; then srun -N 9 a\nelif [ $SLURM_NNODES = 2 ]\n"
    "then srun -N 8 a\nelse srun -N 7 a; fi": "the job has 4 nodes",
    'N=$(echo $X | tr -d ")")\n' + 30 * "X=$(date)\n": "",  # in no time
}


@pytest.mark.check
def test_check_script_accepts_ours_and_reports_wrong_headers(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere.slurm"
    elsewhere.write_text("#SBATCH -D x\n#SBATCH -o logs/%j\n")  # a folder of the job's own
    patterns = "0*/**/submit.*", "cluster/*.pbs", "cluster/*.slurm"
    scripts = tracked_files(path for pattern in patterns for path in ROOT.glob(pattern))
    check_script = ROOT / "submit" / "check_script.py"
    result = run_command([sys.executable, check_script, elsewhere, *scripts])
    assert len(scripts) > 10 and (result.code, result.out) == (0, "no problems found\n"), result

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    find_problems = load_module(check_script).find_problems
    for text, expected in CHECKED_LINES.items():
        lines = ["#!/bin/bash", "#PBS -l place=scatter:group=tier0,ncpus=3", *text.split("\n")]
        problems = [problem for _, problem in find_problems(lines, [tmp_path])]
        assert len(problems) == bool(expected) and expected in "".join(problems), (text, problems)
