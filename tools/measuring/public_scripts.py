"""Does agree.py leave good scripts of others alone? Run public ones, unmodified, under it on 2 ranks; print one table.

    python -m tools.measuring.public_scripts [--mirror FOLDER] [--publish] [NAME...]

Each repository is cloned at its commit into a temporary folder, from GitHub or from FOLDER/owner+name/repo. The data
are stand-ins: random bytes where the script looks for its own. What is `expected` are the script's own mistakes.
Some scripts import what this repository does not install: accelerate blobfile jsonargparse lightning tensorboard
tensorboardX timm.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas
from launch import ROOT, machine
from one_line import Parser
from PIL import Image
from records import RECORDS, refusal

PUBLISHED = RECORDS / "public_scripts.jsonl"
MPI, TORCHRUN = ["mpiexec", "-n", "2"], ["torchrun", "--nproc-per-node", "2", "--standalone"]
SECONDS = 300  # that a script may take
RANK = "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}"  # of MPICH, of Open MPI


@dataclass
class Script:
    """A script of a repository, and how it is started; {data} is the folder of the stand-ins."""
    repository: str
    commit: str
    path: str
    arguments: str = ""
    launcher: list = field(default_factory=lambda: MPI)
    expected: str = ""  # the mistakes it has
    also: tuple = ()  # other paths of its repository that it imports
    place: str = ""  # where it looks for the data, from its own folder
    variables: dict = field(default_factory=dict)
    each: str = ""  # variables that differ by rank, as sh assigns them


HOROVOD = "horovod/horovod", "2626dc87a3a8eb8fb7d2216198ce45bce0f9e65a"
ALCF = "argonne-lcf/ATPESC_MachineLearning", "ae638e305dbe81ee441877be10bb3eef285b3552"
LIGHTNING = "Lightning-AI/pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414"
MNIST_HVD = *HOROVOD, "examples/pytorch/pytorch_mnist.py"
ON_CPU = "--trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp --trainer.max_epochs 1"
SCRIPTS = {
    "horovod-mnist": Script(*MNIST_HVD, "--no-cuda --data-dir {data}"),
    "horovod-fp16": Script(*MNIST_HVD, "--no-cuda --data-dir {data} --fp16-allreduce"),
    "horovod-adasum": Script(*MNIST_HVD, "--no-cuda --data-dir {data} --use-adasum"),
    "horovod-synthetic": Script(*HOROVOD, "examples/pytorch/pytorch_synthetic_benchmark.py",
                                "--no-cuda --model resnet18 --batch-size 2"),
    "horovod-accumulation": Script(
        *HOROVOD, "examples/pytorch/pytorch_imagenet_resnet50.py", "--no-cuda --train-dir {data}/train "
        "--val-dir {data}/val --batch-size 2 --batches-per-allreduce 2 --log-dir {data}/log"),
    "alcf-ddp": Script(*ALCF, "03_distributed_deep_learning/DDP/04_pytorch_cnn_ddp.py", "--num_threads 1",
                       place="datasets"),
    "alcf-horovod": Script(*ALCF, "03_distributed_deep_learning/Horovod/04_pytorch_cnn_hvd.py", "--num_threads 1",
                           place="datasets", expected="order"),
    "sagemaker-by-hand": Script(
        "aws/amazon-sagemaker-examples", "2d519b52c3a2c2361f2b87f0d3de46fd6c0232a5",
        " archived/sm-train_a_pytorch_model/mnist.py", "--backend gloo", expected="order",
        each=f"SM_CURRENT_HOST=h{RANK}",
        variables={"SM_HOSTS": '["h0", "h1"]', "SM_MODEL_DIR": "{data}", "SM_CHANNEL_TRAINING": "{data}",
                   "SM_NUM_GPUS": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}),
    "nersc": Script("NERSC/pytorch-examples", "f787817c73179597376d5cceeae597473d51fde4", "train.py",
                    "configs/mnist.yaml -d gloo", expected="order", also=(".",),
                    each=f"SLURM_PROCID={RANK}", variables={"SLURM_NTASKS": "2", "SLURM_JOB_ID": "1",
                                                            "SLURM_STEP_ID": "0", "SCRATCH": "{data}"}),
    "pytorch-imagenet": Script(
        "pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8", "imagenet/main.py", "--dummy --no-accel -b 4 "
        "-j 0 --dist-backend gloo --dist-url env:// --world-size 2", TORCHRUN, expected="own gradients, weights"),
    "openai-diffusion": Script(
        "openai/improved-diffusion", "1bc7bbbdc414d83d4abf2ad8cc1446dc36c4e4d5", "scripts/image_train.py",
        "--data_dir {data}/train --image_size 32 --num_channels 32 --num_res_blocks 1 --batch_size 4",
        expected="own gradients", also=("improved_diffusion",)),
    "nanogpt-mpiexec": Script(
        "karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", "train.py", "--device=cpu --compile=False "
        "--dataset=tokens --eval_iters=1 --batch_size=2 --block_size=64 --n_layer=1 --n_head=2 --n_embd=32 "
        "--gradient_accumulation_steps=2", also=("model.py", "configurator.py"), place="data/tokens", expected="alone"),
    "kubeflow-one-epoch": Script("kubeflow/training-operator", "ee1162919408cbca4a899f2916cfcd0ecd562881",
                                 "examples/pytorch/mnist/mnist.py", "--no-cuda --epochs 1 --dir {data}/log", TORCHRUN,
                                 place="../data"),
    "fabric": Script(*LIGHTNING, "examples/fabric/image_classifier/train_fabric.py", "", TORCHRUN,
                     place="../../../Datasets", variables={"LT_CLI_USED": "1", "LT_ACCELERATOR": "cpu",
                                                           "LT_DEVICES": "2", "LT_STRATEGY": "ddp"}),  # of `fabric run`
    "lightning-imagenet": Script(
        *LIGHTNING, "examples/pytorch/domain_templates/imagenet.py", "fit --model.data_path {data} "
        f"--model.arch resnet18 --model.batch_size 4 --model.workers 0 {ON_CPU}", TORCHRUN),
    "lightning-default": Script(*LIGHTNING, "examples/pytorch/bug_report/bug_report_model.py", "", TORCHRUN,
                                expected="alone"),
    "accelerate": Script("huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83", "examples/cv_example.py",
                         "--cpu --data_dir {data}/pets", TORCHRUN,
                         variables={"HF_HOME": "{data}/hf", "HF_HUB_OFFLINE": "1"}),
}


def stand_ins(data):
    """Random bytes in the formats that the scripts read: MNIST, folders of images, tokens, the weights of a ResNet."""
    random = np.random.default_rng(0)
    for name in ("MNIST", "FashionMNIST"):
        raw = data / name / "raw"
        raw.mkdir(parents=True)
        for part, count in (("train", 6000), ("t10k", 1000)):
            sizes = np.array([0x803, count, 28, 28], ">i4").tobytes(), np.array([0x801, count], ">i4").tobytes()
            (raw / f"{part}-images-idx3-ubyte").write_bytes(sizes[0] + random.bytes(count * 28 * 28))
            labels = random.integers(0, 10, count, np.uint8)
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(sizes[1] + labels.tobytes())
    (data / "pytorch-examples" / "mnist").mkdir(parents=True)
    (data / "pytorch-examples" / "mnist" / "data").symlink_to(data)
    for folder, count in (("train/a", 64), ("train/b", 64), ("val/a", 8), ("val/b", 8), ("pets", 500)):
        (data / folder).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 256, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(data / folder / f"{'ab'[number % 2]}_{number}.jpg")
    for part in ("train", "val"):
        random.integers(0, 50257, 10_000, np.uint16).tofile(data / f"{part}.bin")
    if find_spec("timm"):
        import timm
        from safetensors.torch import save_file
        cached = data / "hf" / "hub" / "models--timm--resnet50d.ra2_in1k"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("0")
        (cached / "snapshots" / "0").mkdir(parents=True)
        save_file(timm.create_model("resnet50d").state_dict(), cached / "snapshots" / "0" / "model.safetensors")


def fetch(script, mirror, folder):
    """The paths of the script's repository at its commit, in `folder`."""
    here = mirror and mirror / script.repository.replace("/", "+") / "repo"
    source = here or f"https://github.com/{script.repository}"
    subprocess.run(["git", "clone", "-q", "--no-checkout", "--filter=blob:none", source, folder], check=True,
                   stderr=subprocess.DEVNULL)
    paths = [str(Path(script.path).parent), *script.also]
    subprocess.run(["git", "checkout", "-q", script.commit, "--", *paths], cwd=folder, check=True)


def run(name, mirror, data):
    """A row of the table, and what the script printed."""
    script = SCRIPTS[name]
    with tempfile.TemporaryDirectory() as folder:
        fetch(script, mirror, folder)
        path = Path(folder, script.path)
        place = path.parent / script.place  # a folder that is not in the repository
        if script.place:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(data)
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        env |= {key: value.format(data=data) for key, value in script.variables.items()}
        words = [str(ROOT / "submit" / "agree.py"), path.name, *script.arguments.format(data=data).split()]
        if script.launcher is MPI:
            words = ["sh", "-c", f'{script.each} exec "$@"', "sh", sys.executable, *words]
        with subprocess.Popen([*script.launcher, *words], cwd=path.parent, env=env, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace") as process:
            try:
                text = process.communicate(timeout=SECONDS)[0]
            except subprocess.TimeoutExpired:
                process.terminate()
                text = process.communicate()[0]
    wrapper = re.search(r" steps?; (.*?); \d+ tensors", text)
    said = re.findall(r"^verdict: (?:wrong: )?(.*)|^(agree\.py: .*)", text, re.M)
    verdict = said[-1][0] or said[-1][1] if said else f"none in {SECONDS} s"
    good = verdict == (script.expected or "nothing wrong was found")
    return {"script": name, "wrapper": wrapper.group(1) if wrapper else "", "verdict": verdict,
            "right": "yes" if good else "NO"}, text


def table(records):
    """A row a script: where it is from, how it was started, what was seen, and whether the script has that mistake."""
    rows = []
    for record in records.to_dict("records"):
        script = SCRIPTS[record["script"]]
        name = " ".join([script.repository, script.commit[:7], Path(script.path).name])
        verdict = "nothing wrong" if record["verdict"] == "nothing wrong was found" else record["verdict"]
        rows.append({"script": f"{name}, {record['script']}", "wrapper seen": record["wrapper"] or "none",
                     "verdict": verdict, "right": record["right"]})
    return pandas.DataFrame(rows).to_string(index=False)


def main():
    parser = Parser(__doc__)
    parser.add_argument("--mirror", type=Path, help="a folder of clones, as owner+name/repo, in the place of GitHub")
    parser.add_argument("--verbose", action="store_true", help="print what the scripts print")
    parser.add_argument("--publish", action="store_true", help=f"write {PUBLISHED.relative_to(ROOT)}: all scripts")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCRIPTS)} (all)")
    args = parser.parse_args()
    if unknown := {*args.names} - {*SCRIPTS}:
        parser.error(f"{', '.join(sorted(unknown))}: the scripts are {', '.join(SCRIPTS)}")
    if args.publish and (reason := refusal(PUBLISHED)):
        sys.exit(f"public_scripts.py: {reason}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        stand_ins(Path(folder))
        for name in args.names or SCRIPTS:
            row, text = run(name, args.mirror, Path(folder))
            rows.append(row | machine())
            print(text if args.verbose else f"{name}: {row['verdict']}", flush=True)
    print(table(pandas.DataFrame(rows)))
    if args.publish:
        PUBLISHED.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return 1 if any(row["right"] == "NO" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
