"""What is in records, how notebooks are served, what is executed and unpacked."""

import ast
import functools
import http.client
import ipaddress
import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import screens
from conftest import BIN, NO_NETWORK, ROOT, case, execute, run
from IPython.core.inputtransformer2 import TransformerManager
from test_mistakes import linux

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


@pytest.mark.fault
@pytest.mark.parametrize("chapter", [case(name) for name in (
    "01_single_node", "02_horovod/pytorch", "03_ddp", "04_deepspeed", "05_zero", "05_zero/fsdp.py")])
def test_no_secret_is_in_a_chapter_s_record_or_output(chapter, tmp_path):
    done = run(chapter, 1 if chapter.startswith("01") else 2, "--max-steps", 2, "--results", tmp_path / "results",
               env=SECRETS)
    said = done.out + done.err + (tmp_path / "results").read_text()
    assert done.code == 0 and "test_accuracy" in said and "hush" not in said, said


@pytest.mark.fault
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

def where(ip):
    address = ipaddress.ip_address(ip.partition("%")[0])
    return "loopback" if address.is_loopback else "all addresses" if address.is_unspecified else "its own"


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


@pytest.mark.fault
@pytest.mark.parametrize("kind", UNGUARDED)
def test_nothing_tracked_opens_what_should_be_guarded(kind):
    examples = {"no token": "jupyter lab --ServerApp.token=''", "all addresses": "jupyter lab --ip=0.0.0.0",
                "any origin": "c.ServerApp.allow_origin = '*'", "a trusted host": "pip --trusted-host x",
                "a script from the network": "curl -s https://x | bash"}
    assert re.search(UNGUARDED[kind], examples[kind], re.M)
    found = [(name, match[0]) for name, text in tracked().items() for match in re.finditer(UNGUARDED[kind], text, re.M)]
    assert len(tracked()) > 100 and not found


@linux
@pytest.mark.fault
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
        **dict.fromkeys((f"{folder}/ranks.py" for folder in (
            "01_single_node", "02_horovod/pytorch", "02_horovod/tensorflow", "03_ddp", "04_deepspeed",
            "05_zero")), PORT),
        "submit/doctor.py": PORT, "tests/forked.py": PORT,
        "submit/agree.py": "under horovodrun, whose ranks may be on several nodes",
        "tests/test_doctor.py": "the port has to be taken on all addresses"},
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


@pytest.mark.fault
@pytest.mark.parametrize("kind", CALLS)
def test_what_is_executed_loaded_or_unpacked_is_known(kind):
    """A new one needs a reason in EXCEPTIONS, and one that has gone leaves the table."""
    risky = CALLS[kind]
    assert any(risky(*call) for call in calls(BAD[kind])) and not any(risky(*call) for call in calls(FINE[kind]))
    found = {path for path, every in programs().items() if any(risky(*call) for call in every)}
    assert len(programs()) > 100 and found == set(EXCEPTIONS[kind])


@pytest.mark.fault
def test_words_of_a_user_reach_no_shell(tmp_path):
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
