"""Compare the numbers of a job with those of the commands that start its ranks.

nodes, tasks, GPUs and ranks are None where the script alone does not tell them, as in `-N $1`.
"""

import re
from types import SimpleNamespace

from shell_commands import read_commands

RANK_VARIABLES = "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "PBS_NODENUM"
NO_LAUNCH = re.compile(r"(?:echo|printf|which|command|type|module|ml|pip3?|cat|git|cp|if|elif|for|"
                       r"conda|source|alias|mkdir|\.|\[\[?|\w+\(\))(?:\s|$)")
FROM_OPTION = {  # variables that Slurm sets if the job has the option
    "SLURM_NTASKS_PER_NODE": "--ntasks-per-node", "SLURM_GPUS_PER_NODE": "--gpus-per-node",
    "SLURM_CPUS_PER_TASK": "--cpus-per-task", "SLURM_GPUS": "--gpus",
    "SLURM_GPUS_PER_TASK": "--gpus-per-task"}
STARTER = re.compile(r"(?<!\S)(?:\S*/)?(srun|mpirun|mpiexec)(?:\.\w+)?\s(.*)", re.S)
LAUNCHER = re.compile(
    r"(?<!\S)(?:\S*/)?(torchrun|deepspeed|horovodrun|accelerate launch|python\S* (?:-\w )*-m (?:"
    r"torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch)|python[\d.]*)\s(.*)", re.S)
ROLES = {option: role for role, options in {  # of the options of starters and launchers
    "ranks": "-n --ntasks -np --np --num-processes --num-proc",
    "nodes": "-N --nodes --nnodes --num-machines --num-nodes",
    "per node": "--ppn -ppn --npernode -npernode --nproc-per-node --num-gpus",
    "hosts": "-w --nodelist -H --host --hosts --hostfile -f --oversubscribe --overcommit",
    "node rank": "--node-rank --machine-rank", "backend": "--rdzv-backend", "conf": "--rdzv-conf",
    "address": "--master-addr --main-process-ip --rdzv-endpoint",
    "one node": "--standalone", "no ssh": "--no-ssh", "file": "--config-file"}.items()
    for option in options.split()}
OWN_NODE = r"(?:localhost|127\.|\$\(hostname)"
CONTAINER = re.compile(r"(?:uv|poetry|conda) run |(?:apptainer|singularity) (?:exec|run) ")
OTHERS = re.compile(  # which may start ranks: programs, and scripts except conda's and set-up's
    r"\b((?!torch)\w*run|mpi\w+|p?ssh|pb?s?dsh|clush|parallel|deepspeed|ray|dask\S*|spark\S*|"
    r"sbatch|qsub)\b|\b(bash|sh) \S|(?<!conda)(?<!modules)(?<!activate)\.sh\b")


def number_of(text):
    return int(text) if text and re.fullmatch(r"\d{1,6}", text) else None


def is_more(number, limit):
    return bool(number and limit and number > limit)


def divide(number, parts):
    """Return a number's part, or None where one of the two is not known."""
    if not number or not parts:
        return None
    return round(number / parts, 1) if number % parts else number // parts


def count_chunks(job, resources):
    """Count what `#PBS -l` asks for, as `select=1:ngpus=4:mpiprocs=4+2:ngpus=2`."""
    chunks = re.search(r"\b(?:select|nodes)=([^,\s]+)|$", resources)[1]
    chunks = chunks.split("+") if chunks else []
    counts = [number_of(chunk.split(":")[0]) or int("=" in chunk.split(":")[0]) for chunk in chunks]
    tasks, gpus = ([number_of(re.search(rf"\b(?:{name})=(\w+)|$", chunk)[1]) for chunk in chunks]
                   for name in ("mpiprocs|ppn", "n?gpus"))
    if chunks and all(counts):
        job.nodes = sum(counts)
        job.slots = sum(count * (number or 1) for count, number in zip(counts, tasks))
        job.tasks = job.slots if all(tasks) else None
        job.gpus = min(gpus) if all(gpus) else None
        job.are_nodes_equal = len({*tasks}) == len({*gpus}) == 1


def count_tasks(job, options):
    """Count what Slurm's options {name: value} ask for."""
    count = {name: number_of(value.split(":")[-1]) for name, value in options.items()}
    tasks, per_node = count.get("--ntasks"), count.get("--ntasks-per-node", 1)
    nodes = count.get("--nodes", None if "--ntasks" in options else 1)
    job.nodes = nodes = 1 if tasks == 1 else nodes
    if "--ntasks" not in options:  # which overrides --ntasks-per-node
        tasks = nodes and per_node and nodes * per_node
    job.tasks = job.slots = tasks
    if "--exclusive" in options and not {"--ntasks", "--ntasks-per-node"} & {*options}:
        job.slots = None  # as many as the nodes have cores
    gres = re.search(r"\bgpu(?=,|$)|(?<=gpu:)[^,(]*|$", options.get("--gres", ""))[0]
    of_node = options.get("--gpus-per-node") or re.sub("^gpu$", "1", gres)
    total = count.get("--gpus")
    of_tasks = tasks and nodes and tasks * (count.get("--gpus-per-task") or 0) // nodes
    job.gpus = number_of(of_node.split(":")[-1]) or (total and nodes and total // nodes) or of_tasks


def scheduler_variables(job):
    """Return the scheduler's variables as the script has them, which runs on the first node."""
    numbers = {"nodes": job.nodes, "slots": job.slots,  # of $PBS_NODEFILE
               **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "PBS_NUM_NODES"), job.nodes),
               **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), job.tasks),
               "SLURM_GPUS_ON_NODE": job.gpus, **dict.fromkeys(RANK_VARIABLES, 0)}
    for name, option in FROM_OPTION.items():
        numbers[name] = number_of(job.options.get(option, "").split(":")[-1])
    return {name: str(number) for name, number in numbers.items() if number is not None}


def read_options(text):
    """Return {role: (option, value)} of a command's options, up to the name of a program."""
    text = re.sub(r"(?<!\S)-([nNH])(\d)", r"-\1 \2", re.split(r"\s\S+\.py\b", text)[0])
    options = re.findall(r"(?<!\S)(--?[A-Za-z][\w-]*)(?:[= ]\s*([^\s-]\S*))?", text)
    roles = {ROLES.get(option.replace("_", "-")): (option, value) for option, value in options}
    if re.search(r"(?<!\S)[^-\s]\S* +\$|^ *\$", text):  # $ARGS, which may be options
        roles["file"] = ("$", "")
    return roles


def find_problems(shell, options, resources):
    """Return what does not fit between a job and its commands, as (line number, text).

    options: Slurm's, as {name: value}; resources: what `#PBS -l` asks for, or "".
    """
    job = SimpleNamespace(options=options, is_pbs=bool(resources and not options), nodes=None,
                          tasks=None, slots=None, gpus=None, are_nodes_equal=True)
    if options:
        count_tasks(job, options)
    else:
        count_chunks(job, resources)
    job.slots_of_hostfile = number_of(re.search(r"\bslots=(\d+)|$", shell)[1])
    variables = scheduler_variables(job)
    in_home = job.is_pbs and not re.search(r"-l\s*(?:\S*,)?wd\b|-[dw] ", resources)
    problems, launches, other_commands = [], [], []
    for match in re.finditer(r"(?<!\\)\$\([^()]*(\\\$\{?(?:SLURM|PBS)\w+)", shell):
        problems.append((1 + shell.count("\n", 0, match.start()),
                         f"{match[1]} is not replaced by its value: without the \\"))
    for line, text, in_loop in read_commands(shell, variables):
        in_home = in_home and not re.match(r"(cd|pushd)\b", text)
        launch = find_launch(text, variables)
        if not launch:
            other_commands += [text] * (not re.match("module|ml|echo|pip|conda", text))
            continue
        launch.line = line
        launch.is_free |= in_loop or bool({"--array", "--nodelist"} & {*options})
        launches.append(launch)
        if in_home and (program := re.search(r"\s((?:[\w.-]+/)*[\w-]+\.py)\b", text)):
            problems.append((line, "PBS starts this script in your home folder: write `cd "
                             f'"$PBS_O_WORKDIR"` before {program[1]}'))
            in_home = False
    job.is_alone = len(launches) == 1 and not OTHERS.search("\n".join(other_commands))
    return problems + [(launch.line, problem) for launch in launches
                       for problem in judge_launch(launch, job)]


def find_launch(text, variables):
    """Return how a command starts ranks, or None.

    starter: srun, mpiexec, mpirun or ""; launcher: torchrun or the like, python, or ""; their
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


def count_launch(launch, job):
    """Add the numbers of a launch: of the processes that it starts, and of their ranks."""
    options, starter_options = launch.options, launch.starter_options
    is_torchrun = bool(re.search(r"torchrun|torch\.dist|accelerate", launch.launcher))
    launch.is_torchrun = is_torchrun
    launch.starts_ranks = is_torchrun or launch.launcher in ("deepspeed", "horovodrun")
    launch.is_program = launch.launcher.startswith("python") and not is_torchrun

    # Of the starter: its processes, in all, on a node, and the nodes that they need
    tasks = job.tasks if launch.starter == "srun" else None
    if number_of_role("nodes", starter_options, job.nodes) != job.nodes:
        tasks = None  # `srun --nodes=1` starts some of the job's tasks
    copies = number_of_role("ranks", starter_options, tasks) if launch.starter else 1
    launch.copies = copies = None if launch.is_free else copies
    per_node = number_of_role("per node", starter_options) or number_of(
        re.search(r"ppr:(\d+):node|$", launch.text)[1])
    launch.copies_per_node = per_node
    launch.nodes = copies and per_node and -(-copies // per_node)
    launch.copies_of_node = per_node or (divide(copies, job.nodes) if job.are_nodes_equal else None)

    # Of the launcher: the nodes that it expects, and its ranks on each
    has_file = "file" in options or "accelerate" in launch.launcher  # which may have the numbers
    launch.hosts = 1 if "one node" in options else number_of_role(
        "nodes", options, None if has_file else 1)
    launch.launchers = launch.hosts if is_torchrun or "no ssh" in options else 1
    launch.ranks = number_of_role("per node", options, 1 if is_torchrun and not has_file else None)
    if "ranks" in options:
        launch.ranks = divide(number_of_role("ranks", options),
                              launch.hosts if launch.launcher != "horovodrun"
                              else job.nodes if job.are_nodes_equal else None)


def number_of_role(role, options, default=None):
    return number_of(options[role][1]) if role in options else default


def judge_launch(launch, job):
    """Return what does not fit between a command that starts ranks and its job."""
    def printed(role):
        return " ".join(launch.options[role]) if role in launch.options else ""

    count_launch(launch, job)
    nodes, gpus, variables = job.nodes, job.gpus, launch.variables
    launcher, starter, copies, ranks = launch.launcher, launch.starter, launch.copies, launch.ranks
    if re.fullmatch(r"\d+(,\d+)*", variables.get("CUDA_VISIBLE_DEVICES") or ""):
        gpus = min(gpus or 1024, variables["CUDA_VISIBLE_DEVICES"].count(",") + 1)
    hosts, of_node = launch.hosts, launch.copies_of_node
    is_rank = bool(starter) and launch.is_program
    is_spread = launch.is_torchrun and "file" not in launch.options and 1 not in (hosts, nodes)
    is_static = is_spread and "c10d" not in printed("backend") + printed("conf")
    is_far = (is_spread or is_rank) and is_more(nodes, 1)
    node_rank, address = printed("node rank"), printed("address")
    if is_rank:
        address = f"MASTER_ADDR {variables.get('MASTER_ADDR')}"
    first_node = "give the first node of the job"
    world_size = number_of(variables.get("WORLD_SIZE"))
    slots = job.slots if starter == "mpirun" else job.tasks
    host_slots = [int(number) for number in re.findall(r":(\d+)", printed("hosts"))]
    unset = [name for name, option in FROM_OPTION.items() if job.options and option not in
             job.options and re.search(rf"\${{?{name}\b", launch.text)]

    rows = [  # whether something is wrong, and what
        (launch.starts_ranks and is_more(copies, launch.launchers) and is_more(copies, nodes),
         f"{copies} tasks start {launcher}, which itself starts all ranks of a node: one task per "
         'node (srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1; mpiexec -n NODES --ppn 1)'),
        (launch.starts_ranks and is_more(copies, launch.launchers) and not is_more(copies, nodes),
         f"{copies} tasks start {launcher}, and each expects {launch.launchers}: they wait or "
         "train separately (--nnodes is the number of nodes, without --standalone; deepspeed and "
         "horovodrun are started once)"),
        (launch.is_torchrun and is_more(hosts, copies), f"{printed('nodes')}, and {launcher} "
         f"is started on {copies}, and waits for others: start it with srun or mpiexec --ppn 1"),
        (launch.starts_ranks and is_more(hosts, nodes),
         f"{printed('nodes')}, and the job has {nodes}"),
        (job.is_alone and not starter and "nodes" in launch.options and is_more(nodes, hosts),
         f"{printed('nodes')}, and the job has {nodes}: the others are idle"),
        (launch.starts_ranks and is_more(ranks, gpus), f"ranks on a node: {ranks}, GPUs: {gpus}"),
        (launch.starts_ranks and job.is_alone and job.are_nodes_equal and is_more(gpus, ranks),
         f"ranks on a node: {ranks}, GPUs: {gpus}, so some are idle (--num_processes and -np count "
         "the ranks of all nodes)"),
        (is_rank and is_more(of_node, gpus) and not re.search(r"[ =]cpu\b|mpi4py|mpi\w*\.py",
                                                              launch.text),
         f"ranks on a node: {of_node}, GPUs: {gpus}"),
        (is_rank and ".py" in launch.text and is_more(copies, 1) and world_size
         and world_size != copies,
         f"WORLD_SIZE={world_size}, and {starter} starts {copies} ranks"),
        (is_rank and is_more(copies, 1) and variables.get("RANK") == "0", "note: RANK is 0 for "
         "all: this script, which runs on the first node, replaces the variable"),
        (is_far and re.search(r"(?<![A-Z_])RANK=\$\{?SLURM_LOCALID", launch.text),
         "SLURM_LOCALID counts the tasks of a node, from 0 on each: RANK is $SLURM_PROCID"),
        (is_more(launch.nodes, nodes), f"{copies} ranks, {launch.copies_per_node} per node, and "
         f"the job has {nodes} nodes"),
        (job.is_alone and is_more(nodes, launch.nodes), f"{copies} ranks, {launch.copies_per_node} "
         f"per node: {launch.nodes} of the job's {nodes} nodes are used"),
        (job.is_alone and is_rank and is_more(copies, 1) and not launch.copies_per_node
         and is_more(job.tasks, copies), f"{copies} ranks, and the job has {job.tasks} tasks"),
        (is_more(number_of_role("nodes", launch.starter_options), nodes),
         f"the job has {nodes} nodes"),
        (starter.startswith("mpi") and not launch.copies_per_node and is_more(copies, slots),
         f"{copies} ranks in a job of {slots} slots: Open MPI ends with `not enough slots`"),
        (starter == "srun" and {"--ntasks", "--ntasks-per-node"} & {*job.options}
         and "--cpus-per-task" not in job.options and is_more(copies, job.tasks),
         f"{copies} tasks in a job of {job.tasks}: Slurm ends with `More processors requested`"),
        (is_more(number_of_role("ranks", launch.options), sum(host_slots)),
         f"{printed('ranks')}, and {printed('hosts')}"),
        (launcher in ("deepspeed", "horovodrun") and is_more(job.slots_of_hostfile, gpus),
         f"slots={job.slots_of_hostfile} in the host file, and a node has {gpus} GPUs"),
        (launcher == "horovodrun" and any(is_more(number, gpus) for number in host_slots),
         f"{printed('hosts')}, and a node has {gpus} GPUs"),
        (unset, f"{', '.join(unset)}: not set, as the job does not have the option of that name"),
        (job.is_alone and not starter and launch.is_torchrun and hosts == 1 and is_more(
            nodes, copies), f"{launcher} uses one of {nodes} nodes: srun, mpiexec"),
        (job.is_alone and not starter and launch.is_program and is_more(nodes, copies), "note: one "
         f"of {nodes} nodes is used, unless the program itself uses the others: srun, mpiexec"),
        (job.is_alone and launch.is_program and not starter and is_more(gpus, copies),
         f"note: one of {gpus} GPUs is used, unless the program itself uses all: torchrun "
         f"--nproc-per-node={gpus}"),
        (is_far and (re.search(f" {OWN_NODE}", address)
                     or re.search(f"MASTER_ADDR={OWN_NODE}", launch.text)),
         f"the address is another machine on each node: {first_node}"),
        (is_far and "$(tail)" in address, f"the address is that of the last node: {first_node}"),
        (is_spread and not launch.is_free and re.search(r" (?!localhost|127\.)[^$\s]+$", address),
         f"{address} may not belong to the job: {first_node}"),
        (is_spread and printed("nodes") and not address,
         f"{printed('nodes')}: {first_node} with --master-addr or --rdzv-endpoint"),
        (is_static and not node_rank, "each node is node 0: --node-rank, or --rdzv-backend c10d"),
        (is_static and copies != 1 and node_rank.endswith(" 0"), f"{node_rank} on each node (this "
         "script, which runs on the first, replaces a variable): srun bash -c '... $SLURM_NODEID "
         "...', or --rdzv-backend c10d"),
        (is_static and job.is_alone and variables.get(f"first {node_rank.split('$')[-1]}") == "1",
         f"{node_rank} begins at 1: node 0 is never started")]
    return [problem for is_wrong, problem in rows if is_wrong]
