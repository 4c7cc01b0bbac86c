"""Who listens while a job runs, what is in records, how notebooks are served, what is executed and unpacked."""

import ast
import functools
import http.client
import ipaddress
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import screens
from conftest import BIN, NO_NETWORK, ROOT, case, environment, execute, load_module, run
from faults import fault
from forked import free_port
from IPython.core.inputtransformer2 import TransformerManager
from launch import command
from test_mistakes import linux

# Who listens

LISTENERS = {  # what listens on more than loopback while a job of one node runs, (who, "all addresses" or "its own")
    ("mpiexec", "all addresses"): "MPICH's hydra waits for its proxies of other nodes, and has no option against it",
    ("hydra_pmi_proxy", "all addresses"): "has inherited mpiexec's listening socket",
    ("rank of mpiexec", "its own"): "MPICH's UCX waits for ranks of other nodes; not so with UCX_NET_DEVICES=lo",
    ("torchrun", "all addresses"): "its store, at which agents of other nodes would meet",
    ("horovodrun", "all addresses"): "its server of keys and values, which ranks of other nodes would ask",
}
LAUNCHERS = ("mpiexec", "hydra_pmi_proxy", "torchrun", "horovodrun", "deepspeed")


def name(process):
    """The launcher's name, or `rank`; None for what has nothing to do with it."""
    words = process.cmdline()
    names = [re.sub(r"\.launcher\..*", "", Path(word).name) for word in words]
    if found := [name for name in names if name in LAUNCHERS]:
        return found[0]
    return "rank" if any(word.endswith(("main.py", "fsdp.py")) for word in words) else None


def where(ip):
    address = ipaddress.ip_address(ip.partition("%")[0])
    return "loopback" if address.is_loopback else "all addresses" if address.is_unspecified else "its own"


def listeners(job):
    """Of a job's processes those that listen now: {(name, where)}, and the names of all."""
    found, names, ports = set(), [], {}
    for process in [job, *job.children(recursive=True)]:
        try:
            who = name(process)
            ports[process.pid] = who, [one.laddr for one in process.net_connections("inet") if one.status == "LISTEN"]
        except psutil.Error:  # it has ended
            continue
        names.append(who)
    launchers = {address for who, addresses in ports.values() if who in LAUNCHERS for address in addresses}
    for who, addresses in ports.values():
        found |= {(who, where(address.ip)) for address in addresses if who != "rank" or address not in launchers}
    return found, names


def while_it_trains(words, folder, env):
    """What listens from a job's start to some steps of its training, and which processes it had."""
    found, names = set(), set()
    log = folder / "log"
    with open(log, "w") as file:
        started = psutil.Popen([str(word) for word in words], env=environment() | NO_NETWORK | env, stdout=file,
                               stderr=file, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 100
        while "epoch 3/" not in log.read_text() and started.is_running() and time.monotonic() < end:
            now, processes = listeners(started)
            found |= now
            names |= set(processes)
            time.sleep(0.02)
        assert "epoch 3/" in log.read_text(), log.read_text()
    finally:
        family = [started, *started.children(recursive=True)]
        started.terminate()
        _, left = psutil.wait_procs(family, 10)
        for process in left:
            process.kill()
    return found, names


@linux
@fault("security", "who listens while a job runs")
@pytest.mark.parametrize(("chapter", "launcher", "env"), [
    case("03_ddp", "", {}), case("03_ddp", "mpiexec", {}), case("03_ddp", "torchrun", {}),
    case("02_horovod/pytorch", "mpiexec", {}), case("02_horovod/pytorch", "mpiexec", {"UCX_NET_DEVICES": "lo"}),
    case("02_horovod/pytorch", "horovodrun", {}), case("02_horovod/tensorflow", "mpiexec", {}),
    case("04_deepspeed", "mpiexec", {}), case("04_deepspeed", "deepspeed", {}),
    case("05_zero/fsdp.py", "torchrun", {}), case("05_zero/fsdp.py", "mpiexec", {})])
def test_nothing_listens_but_on_loopback(chapter, launcher, env, tmp_path):
    """Who belongs to a launcher or a library, and cannot be told, stands in LISTENERS."""
    main = command(chapter, 1)[-1]
    start = {"": [sys.executable], "mpiexec": [BIN / "mpiexec", "-n", 2, sys.executable],
             "torchrun": [BIN / "torchrun", "--nproc-per-node", 2],
             "deepspeed": [BIN / "deepspeed", "--num_gpus", 2, "--master_port", free_port()],
             "horovodrun": [BIN / "horovodrun", "--gloo", "-np", 2, sys.executable]}[launcher]
    found, names = while_it_trains([*start, main, "--epochs", 1000, "--device", "cpu"], tmp_path, env)
    assert "rank" in names and (not launcher or launcher in names)
    by_mpi = launcher == "mpiexec" and "UCX_NET_DEVICES" not in env
    far = {("rank of mpiexec" if by_mpi and (who, place) == ("rank", "its own") else who, place)
           for who, place in found if place != "loopback"}
    assert far <= set(LISTENERS), far - set(LISTENERS)


@fault("security", "who listens while a job runs")
def test_a_free_port_is_looked_for_on_loopback_alone(monkeypatch, clean_environment):
    asked = []
    ranks = load_module(ROOT / "03_ddp" / "ranks.py")
    original = ranks.socket.create_server
    monkeypatch.setattr(ranks.socket, "create_server", lambda place, **more: asked.append(place) or original(place))
    ranks.find_ranks()
    assert asked and {host for host, _ in asked} == {"127.0.0.1"}


# What is in records

SECRETS = {"AWS_SECRET_ACCESS_KEY": "hush-1", "HF_TOKEN": "hush-2", "WANDB_API_KEY": "hush-3", "GITHUB_TOKEN": "hush-4",
           **dict.fromkeys(NO_NETWORK, "http://me:hush-5@127.0.0.1:9"), "PIP_INDEX_URL": "https://me:hush-6@127.0.0.1:9"}
SUBMIT = ROOT / "submit"
LAUNCH = "import json, launch; print(json.dumps(launch.launch('03_ddp', 2, '--max-steps', 1)))"  # a demo's records
SWEEP = [sys.executable, SUBMIT / "sweep.py", "weak", "--ranks", 1, "--repeats", 1, "--results", "{}/results"]
COMMANDS = {
    "launch.py": ([sys.executable, "-c", LAUNCH], 0, '"git"'),
    "sweep.py": ([*SWEEP, "--", "--max-steps", 6], 0, "weak scaling"),
    "sweep.py, a run that fails": ([*SWEEP, "--", "--dataset", "mnist", "--data-dir", "{}/data"], 1, "no whole mnist"),
    "doctor.py": ([BIN / "mpiexec", "-n", 2, sys.executable, SUBMIT / "doctor.py"], 0, "nothing wrong was found"),
    "agree.py": ([BIN / "mpiexec", "-n", 2, sys.executable, SUBMIT / "agree.py", "--record", "{}/results",
                  ROOT / "03_ddp" / "main.py", "--max-steps", 3], 0, "nothing wrong was found"),
}


@fault("security", "secrets in the environment")
@pytest.mark.parametrize("chapter", [case(name) for name in (
    "01_single_node", "02_horovod/pytorch", "03_ddp", "04_deepspeed", "05_zero", "05_zero/fsdp.py")])
def test_no_secret_is_in_a_chapter_s_record_or_output(chapter, tmp_path):
    done = run(chapter, 1 if chapter.startswith("01") else 2, "--max-steps", 2, "--results", tmp_path / "results",
               env=SECRETS)
    said = done.out + done.err + (tmp_path / "results").read_text()
    assert done.code == 0 and "test_accuracy" in said and "hush" not in said, said


@fault("security", "secrets in the environment")
@pytest.mark.parametrize("tool", COMMANDS)
def test_no_secret_is_in_what_a_tool_writes(tool, tmp_path):
    words, code, expected = COMMANDS[tool]
    done = execute([str(word).format(tmp_path) if "{}/" in str(word) else word for word in words], cwd=SUBMIT,
                   env=SECRETS, timeout=120)
    results = tmp_path / "results"
    said = done.out + done.err + (results.read_text() if results.exists() else "")
    assert done.code == code and expected in said, said
    assert "hush" not in said, said


# Notebooks

UNGUARDED = {  # what opens a Jupyter server to others
    "no token": r"""--\S*(?:token|password)=(?:''|""|\s|$)|(?:\.|["'])(?:token|password)["']?\s*[=:]\s*(?:''|"")""",
    "all addresses": r"""(?:--ip|ServerApp\.ip|["']ip["'])\s*[=: ]\s*["']?(?:0\.0\.0\.0|\*|::)""",
    "any origin": r"allow_remote_access|disable_check_xsrf|allow_origin|allow_unauthenticated_access",
    "a trusted host": r"--trusted-host|verify\s*=\s*False|_create_unverified_context|GIT_SSL_NO_VERIFY",
    "a script from the network": r"(?:curl|wget)\b[^|\n]*\|\s*(?:sudo\s+)?(?:ba|z)?sh\b",
}


@functools.cache
def tracked():
    """The tracked text files but this one, as {path: text}."""
    names = execute(["git", "-C", ROOT, "ls-files"]).out.splitlines()
    found = {}
    for name in names:
        path = ROOT / name
        if path.is_file() and path.suffix not in (".png", ".pt", ".jsonl", ".csv") and path != Path(__file__):
            found[name] = path.read_text()
    return found


@fault("security", "a server without a token")
@pytest.mark.parametrize("kind", UNGUARDED)
def test_nothing_tracked_opens_what_should_be_guarded(kind):
    examples = {"no token": "jupyter lab --ServerApp.token=''", "all addresses": "jupyter lab --ip=0.0.0.0",
                "any origin": "c.ServerApp.allow_origin = '*'", "a trusted host": "pip --trusted-host x",
                "a script from the network": "curl -s https://x | bash"}
    assert re.search(UNGUARDED[kind], examples[kind], re.M)
    found = [(name, match[0]) for name, text in tracked().items() for match in re.finditer(UNGUARDED[kind], text, re.M)]
    assert len(tracked()) > 100 and not found


@linux
@fault("security", "a server without a token")
def test_jupyterlab_wants_a_token_and_listens_on_loopback(tmp_path):
    """As `python -m tests.screens` starts it for the instructor, with Jupyter's own settings for who may come in."""
    def status(address):
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=20) as answer:
                return answer.status
        except urllib.error.HTTPError as refusal:
            return refusal.code

    with screens.jupyterlab(tmp_path) as address:
        site, token = re.fullmatch(r"(http://.*?)/doc/tree/\{\}\?(token=\w{20,})", address).groups()
        assert status(f"{site}/api/contents") == http.client.FORBIDDEN
        assert status(f"{site}/api/contents?token=guess") == http.client.FORBIDDEN
        assert status(f"{site}/api/contents?{token}") == http.client.OK
        servers = [process for process in psutil.Process().children()  # what has ended has no words
                   if "jupyter-lab" in " ".join(process.as_dict(["cmdline"], ad_value=())["cmdline"])]
        places = {where(one.laddr.ip) for process in servers for one in process.net_connections("inet")
                  if one.status == "LISTEN"}
    assert places == {"loopback"}


# What is executed, loaded and unpacked

SHELLS = ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
          "asyncio.create_subprocess_shell")
CALLS = {  # how a call can do what a user's input says
    "a shell": lambda call, name, named: (
        named.get("shell", "False") != "False" or name in SHELLS
        or (name.startswith("get_ipython().") and "{" in ast.unparse(call))),  # a notebook's line that begins with !
    "code": lambda call, name, named: name in ("eval", "exec"),
    "pickle": lambda call, name, named: (
        re.fullmatch(r"(pickle|dill|cloudpickle|marshal|joblib|shelve)\.(loads?|open)|(pd|pandas)\.read_pickle", name)
        is not None or named.get("weights_only", "True") != "True"
        or named.get("allow_pickle", "False") != "False" or (name == "yaml.load" and "Safe" not in str(named))),
    "an archive": lambda call, name, named: (
        name.rpartition(".")[2] in ("extractall", "extract", "unpack_archive") and named.get("filter") != "'data'"),
    "a file of a known name": lambda call, name, named: name in ("tempfile.mktemp", "mktemp", "os.tempnam"),
    "all addresses": lambda call, name, named: (
        name.rpartition(".")[2] in ("bind", "create_server", "TCPStore", "HTTPServer", "ThreadingHTTPServer")
        and re.match(r"""\(?['"](0\.0\.0\.0|::)?['"]""", ast.unparse(call.args[0]) if call.args else "") is not None),
}
BAD = {"a shell": "subprocess.run(text, shell=True)", "code": "eval(text)",
       "pickle": "torch.load(p, weights_only=False)", "an archive": "tarfile.open(p).extractall(folder)",
       "a file of a known name": "tempfile.mktemp()", "all addresses": "socket.create_server(('', port))"}
FINE = {"a shell": "subprocess.run(words)", "code": "ast.literal_eval(text)", "pickle": "torch.load(p)",
        "an archive": "tarfile.open(p).extractall(folder, filter='data')",
        "a file of a known name": "tempfile.mkstemp()", "all addresses": "socket.create_server(('127.0.0.1', port))"}
PORT = "whether a port is free is tried where ranks of other nodes will ask for it; closed at once"
EXCEPTIONS = {
    "a shell": {"05_zero/memory.ipynb": "the flags stand in the same cell"},
    "code": {
        "submit/agree_frames.py": "the argument of a range() in the user's own script, of names and numbers only",
        "tests/test_bad_input.py": "our own parsers, taken out of the programs",
        "tests/programs/readers_in_turn.py": "our own file, with one line changed",
        "tests/test_slow_link.py": "our own file, of which one function is taken",
        "tools/measuring/collectives.py": "our own file, with a line in front"},
    "pickle": {
        "exercises/runner.py": "what our own ranks have just written into a temporary folder",
        "exercises/scripts.py": "what the learner's own script has just saved",
        "tests/test_checkpoints.py": "a checkpoint that the test has just made",
        "tools/measuring/parameters.py": "DeepSpeed's checkpoint, which the run has just written"},
    "an archive": {},
    "a file of a known name": {},
    "all addresses": {
        "submit/doctor.py": PORT, "tests/forked.py": PORT,
        "submit/agree.py": "under horovodrun, whose ranks may be on several nodes",
        "tests/test_doctor.py": "the port has to be taken on all addresses",
        "tests/test_launchers.py": "the port has to be taken on all addresses"},
}


def calls(text):
    """Of a Python text (call, name of what is called, its named arguments as text)."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}


@functools.cache
def programs():
    """The calls of all Python that is tracked, of the notebooks too, as {path: [what calls() gives]}."""
    found = {}
    for path, text in tracked().items():
        if path.endswith(".py"):
            found[path] = [*calls(text)]
        elif path.endswith(".ipynb"):
            for cell in json.loads(text)["cells"]:
                source = "".join(cell["source"]) if cell["cell_type"] == "code" else ""
                found.setdefault(path, []).extend(calls(TransformerManager().transform_cell(source)))
    return found


@fault("security", "input that is executed")
@pytest.mark.parametrize("kind", CALLS)
def test_what_is_executed_loaded_or_unpacked_is_known(kind):
    """A new one needs a reason in EXCEPTIONS, and one that has gone leaves the table."""
    risky = CALLS[kind]
    assert any(risky(*call) for call in calls(BAD[kind])) and not any(risky(*call) for call in calls(FINE[kind]))
    found = {path for path, every in programs().items() if any(risky(*call) for call in every)}
    assert len(programs()) > 100 and found == set(EXCEPTIONS[kind])


@fault("security", "input that is executed")
def test_words_of_a_user_reach_no_shell(tmp_path, survived):
    """Flags and paths that a shell would read as commands."""
    made = tmp_path / "made"
    words = f"$(touch {made})`touch {made}`", f"x; touch {made} && touch {made} | touch {made}\n touch {made}"
    main = ROOT / "01_single_node" / "main.py"
    tools = [["sweep.py", "weak", "--results"], ["agree.py"], ["check_script.py"], ["lab.sh", "on"],
             [ROOT / "exercises" / "grade.py"], [main, "--dataset", "mnist", "--data-dir"]]
    for tool in tools:
        for word in words:
            python = [] if tool[0] == "lab.sh" else [sys.executable]
            done = execute([*python, SUBMIT / tool[0], *tool[1:], word], timeout=60, cwd=tmp_path)
            assert done.code and not made.is_file(), (tool, word)
    survived(len(tools) * len(words))
