"""Compare the numbers of a job with those of the commands that start its ranks.

nodes, tasks, GPUs and ranks are None where the script alone does not tell them, as in `-N $1`.
"""

import operator
import re
from types import SimpleNamespace

from shell_commands import read_commands

RANK_VARIABLES = "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "PBS_NODENUM"
NO_LAUNCH = re.compile(r"(?:echo|printf|which|command|type|module|ml|pip3?|cat|git|cp|if|elif|for|"
                       r"conda|source|alias|mkdir|\.|\[\[?|\w+\(\))(?:\s|$)")
STARTER = re.compile(r"(?<!\S)(?:\S*/)?(srun|mpirun|mpiexec)(?:\.\w+)?\s(.*)", re.S)
LAUNCHER = re.compile(
    r"(?<!\S)(?:\S*/)?(torchrun|deepspeed|horovodrun|accelerate launch|python\S* (?:-\w )*-m (?:"
    r"torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch)|python[\d.]*)\s(.*)", re.S)
ROLES = {option: role for role, options in {  # of the options of starters and launchers
    "ranks": "-n --ntasks -np --np --num-processes --num-proc",
    "nodes": "-N --nodes --nnodes --num-machines --num-nodes",
    "per node": "--ppn -ppn --npernode -npernode --nproc-per-node --num-gpus",
    "hosts": "-w --nodelist -H --host --hosts --hostfile -f --map-by --oversubscribe --overcommit",
    "node rank": "--node-rank --machine-rank", "backend": "--rdzv-backend --rdzv-conf",
    "address": "--master-addr --main-process-ip --rdzv-endpoint",
    "other": "--config-file --standalone --no-ssh"}.items() for option in options.split()}
CONTAINER = re.compile(r"(?:uv|poetry|conda) run |(?:apptainer|singularity) (?:exec|run) ")
OTHERS = re.compile(  # which may start ranks: programs, and scripts except conda's and set-up's
    r"\b((?!torch)\w*run|mpi\w+|p?ssh|pb?s?dsh|clush|parallel|deepspeed|ray|dask\S*|spark\S*|sbatch|"
    r"qsub)\b|\b(bash|sh) \S|(?<!conda)(?<!modules)\.sh\b")


def number_of(text):
    return int(text) if text and re.fullmatch(r"\d{1,6}", text) else None


def count_chunks(resources):
    """Return (nodes, tasks, GPUs per node) of `#PBS -l select=1:ngpus=4:mpiprocs=4+2:ngpus=4`."""
    match = re.search(r"\b(?:select|nodes)=([^,\s]+)", resources)
    if not match:
        return None, None, None
    chunks = match[1].split("+")
    counts = [number_of(chunk.split(":")[0]) or int("=" in chunk.split(":")[0]) for chunk in chunks]
    nodes = sum(counts) if all(counts) else None
    tasks, gpus = ([number_of(re.search(rf"\b(?:{name})=(\w+)|$", chunk)[1]) for chunk in chunks]
                   for name in ("mpiprocs|ppn", "n?gpus"))
    return (nodes, sum(map(operator.mul, counts, tasks)) if nodes and all(tasks) else None,
            gpus[0] if len({*gpus}) == 1 else None)


def count_tasks(options):
    """Return (nodes, tasks, GPUs per node) of Slurm's options {name: value}."""
    count = {name: number_of(value.split(":")[-1]) for name, value in options.items()}
    tasks, per_node = count.get("--ntasks"), count.get("--ntasks-per-node", 1)
    nodes = count.get("--nodes", None if "--ntasks" in options else 1)
    nodes = 1 if tasks == 1 else nodes
    if "--ntasks" not in options:  # which overrides --ntasks-per-node
        tasks = nodes and per_node and nodes * per_node
    gres = re.search(r"\bgpu(?=,|$)|(?<=gpu:)[^,(]*|$", options.get("--gres", ""))[0]
    gpus = options.get("--gpus-per-node") or re.sub("^gpu$", "1", gres)
    total = count.get("--gpus")
    if "--exclusive" in options and not {"--ntasks", "--ntasks-per-node"} & {*options}:
        tasks = None  # for Open MPI, as many as the nodes have cores
    return nodes, tasks, number_of(gpus.split(":")[-1]) or (total and nodes and total // nodes)


def read_options(text):
    """Return {role: (option, value)} of a command's options, up to the name of a program."""
    text = re.sub(r"(?<!\S)-([nNH])(\d)", r"-\1 \2", re.split(r"\s\S+\.py\b", text)[0])
    options = re.findall(r"(?<!\S)(--?[A-Za-z][\w-]*)(?:[= ]\s*([^\s-]\S*))?", text)
    roles = {ROLES.get(option.replace("_", "-")): (option, value) for option, value in options}
    if re.search(r"(?<!\S)[^-\s]\S* +\$|^ *\$", text):  # $ARGS, which may be options
        roles["other"] = ("$", "")
    return roles


def find_problems(shell, options, resources):
    """Return what does not fit between a job and its commands, as (line number, text).

    options: Slurm's, as {name: value}; resources: what `#PBS -l` asks for, or "".
    """
    job = SimpleNamespace(options=options)
    job.nodes, job.tasks, job.gpus = count_tasks(options) if options else count_chunks(resources)
    variables = {name: str(number) for name, number in {
        "SLURM_NNODES": job.nodes, "SLURM_JOB_NUM_NODES": job.nodes, "PBS_NUM_NODES": job.nodes,
        "SLURM_NTASKS": job.tasks, "SLURM_NPROCS": job.tasks, "SLURM_GPUS_ON_NODE": job.gpus,
        "SLURM_NTASKS_PER_NODE": number_of(options.get("--ntasks-per-node")),
        **dict.fromkeys(RANK_VARIABLES, 0)}.items() if number is not None}
    problems, launches, others = [], [], []
    in_home = bool(resources and not options)
    for match in re.finditer(r"(?<!\\)\$\([^()]*(\\\$\{?(?:SLURM|PBS)\w+)", shell):
        problems.append((1 + shell.count("\n", 0, match.start()),
                         f"{match[1]} is not replaced by its value: without the \\"))
    for line, text, in_loop in read_commands(shell, variables):
        in_home = in_home and not re.match(r"(cd|pushd)\b", text)
        launch = find_launch(text, variables)
        if not launch:
            others.append(text)
            continue
        launch.line = line
        launch.is_free |= in_loop or bool({"--array", "--nodelist"} & {*options})
        launches.append(launch)
        if in_home and (program := re.search(r"\s((?:[\w.-]+/)*[\w-]+\.py)\b", text)):
            problems.append((line, "PBS starts this script in your home folder: write `cd "
                             f'"$PBS_O_WORKDIR"` before {program[1]}'))
    is_alone = len(launches) == 1 and not OTHERS.search("\n".join(others))
    return problems + [(launch.line, problem) for launch in launches
                       for problem in judge_launch(launch, job, is_alone)]


def find_launch(text, variables):
    """Return how a command starts ranks, or None.

    starter: srun, mpiexec, mpirun or None; launcher: torchrun or the like, python, or ""; their
    options, as read_options() returns them; is_free: which hosts it uses is not known.
    """
    text = re.sub(r"\$\{?(\w+)\}?", lambda name: name[0] if name[1] in RANK_VARIABLES
                  else variables.get(name[1]) or name[0], text)  # as the shell of a task does
    starter = STARTER.search(text)
    launcher = LAUNCHER.search(starter[2] if starter else text)
    if NO_LAUNCH.match(text) or not (starter or launcher):
        return None
    options = read_options(starter[2][:launcher and launcher.start()]) if starter else {}
    is_wrapped = not starter and launcher.start() and not CONTAINER.match(text)
    return SimpleNamespace(
        text=text, starter=starter[1] if starter else "", starter_options=options,
        launcher=launcher[1] if launcher else "",
        options=read_options(launcher[2]) if launcher else {},
        variables={**variables}, is_free=bool("hosts" in options or is_wrapped))


def judge_launch(launch, job, is_alone):
    """Return what does not fit between a command that starts ranks and its job.

    is_alone: nothing else in the script starts processes.
    """
    def number(role, options, default=None):
        return number_of(options[role][1]) if role in options else default

    def printed(role):
        return " ".join(options[role]) if role in options else ""

    nodes, tasks, gpus = job.nodes, job.tasks, job.gpus
    launcher, options = launch.launcher, launch.options
    starter, starter_options = launch.starter, launch.starter_options
    by_mpi = starter.startswith("mpi")
    is_torchrun = bool(re.search(r"torchrun|torch\.dist|accelerate", launcher))
    starts_ranks = is_torchrun or launcher in ("deepspeed", "horovodrun")
    is_rank = bool(starter) and launcher.startswith("python") and not is_torchrun

    # Of the starter: the processes that it starts, and on how many nodes
    copies = number("ranks", starter_options, tasks if starter == "srun" else None)
    if "ranks" not in starter_options and number("nodes", starter_options, nodes) != nodes:
        copies = None  # `srun --nodes=1` starts some of the job's tasks
    copies = None if launch.is_free else copies if starter else 1
    per_node = number("per node", starter_options)
    used = copies and per_node and -(-copies // per_node)
    on_node = copies and nodes and round(per_node or copies / nodes, 1)

    # Of the launcher: the nodes that it expects, and its ranks on each
    has_file = "other" in options or "accelerate" in launcher  # which may have the numbers
    hosts = number("nodes", options, None if has_file else 1)
    ranks, divisor = number("ranks", options), nodes if launcher == "horovodrun" else hosts
    ranks = number("per node", options) or (ranks and divisor and round(ranks / divisor, 1))
    slots = sum(map(int, re.findall(r":(\d+)", printed("hosts"))))
    is_spread = is_torchrun and "other" not in options and 1 not in (hosts, nodes)
    is_static = is_spread and "c10d" not in printed("backend")
    address = printed("address")
    if is_rank and is_more(nodes, 1):
        address = f"MASTER_ADDR {launch.variables.get('MASTER_ADDR')}"
    world_size = number_of(launch.variables.get("WORLD_SIZE"))

    rows = [  # whether something is wrong, and what
        (starts_ranks and is_more(copies, hosts), f"{copies} tasks start {launcher}, which starts "
         f"all ranks of {printed('nodes') or 'a node'}: one task per node (srun "
         '--ntasks="$SLURM_NNODES" --ntasks-per-node=1; mpiexec -n NODES --ppn 1)'),
        (is_torchrun and is_more(hosts, copies), f"{printed('nodes')}, and {launcher} is started "
         f"on {copies}, and waits for the others: srun or mpiexec --ppn 1 starts one per node"),
        (starts_ranks and is_more(hosts, nodes), f"{printed('nodes')}, and the job has {nodes}"),
        (starts_ranks and is_more(ranks, gpus), f"{ranks} ranks on a node with {gpus} GPUs"),
        (starts_ranks and is_alone and is_more(gpus, ranks),
         f"{ranks} ranks on a node with {gpus} GPUs: the other GPUs are idle"),
        (is_rank and is_more(on_node, gpus) and not re.search(r"[ =]cpu\b", launch.text),
         f"{on_node} ranks on a node with {gpus} GPUs"),
        (is_rank and copies and world_size not in (None, copies),
         f"WORLD_SIZE={world_size}, and {starter} starts {copies} ranks"),
        (is_more(used, nodes),
         f"{copies} ranks, {per_node} per node, and the job has {nodes} nodes"),
        (is_alone and is_more(nodes, used),
         f"{copies} ranks, {per_node} per node: only {used} of the job's {nodes} nodes are used"),
        (is_alone and is_rank and is_more(copies, 1) and not per_node and is_more(tasks, copies),
         f"{copies} ranks, and the job has {tasks} tasks: some are idle"),
        (is_more(number("nodes", starter_options), nodes), f"the job has {nodes} nodes"),
        (by_mpi and not per_node and is_more(copies, tasks),
         f"{copies} ranks in a job of {tasks} tasks: Open MPI ends with `not enough slots`"),
        (starter == "srun" and {"--ntasks", "--ntasks-per-node"} & {*job.options} and not
         {"--cpus-per-task", "-c"} & {*job.options} and is_more(copies, tasks),
         f"{copies} tasks in a job of {tasks}: Slurm ends with `More processors requested`"),
        (is_more(number("ranks", options), slots), f"{printed('ranks')}, and {printed('hosts')}"),
        (is_alone and not starter and hosts == 1 and is_more(nodes, copies),
         f"note: only one of {nodes} nodes is used, unless the program starts processes on the "
         "others: srun, mpiexec"),
        (is_alone and not starter and launcher.startswith("python") and not is_torchrun
         and is_more(gpus, copies), f"note: only one of {gpus} GPUs is used, unless the program "
         f"itself uses all: torchrun --nproc-per-node={gpus}"),
        (re.search(r" (localhost|127\.|\$\(hostname)", address) and (is_spread or is_rank),
         f"{address} is another machine on each node: the first of `scontrol show hostnames`"),
        (is_spread and not launch.is_free and re.search(r" (?!localhost|127\.)[^$\s]+$", address),
         f"{address}: this node may not belong to the job: the first of `scontrol show hostnames`"),
        (is_spread and printed("nodes") and not address,
         f"{printed('nodes')} without the first node's address: --master-addr, --rdzv-endpoint"),
        (is_static and not printed("node rank"),
         "each node is node 0: --node-rank, or --rdzv-backend c10d"),
        (is_static and copies != 1 and printed("node rank").endswith(" 0"),
         f"{printed('node rank')} on each node (this script, which runs on the first, replaces the "
         "variable): srun bash -c '... $SLURM_NODEID ...', or --rdzv-backend c10d")]
    return [problem for is_wrong, problem in rows if is_wrong]


def is_more(number, limit):
    return bool(number and limit and number > limit)
