"""Records of runs that were never made, for what the demo says of them."""


def paying_run(ranks: int, speed: float, **more: object) -> dict:
    """A run of 10 images a rank with gradients of 1 MB, at so many images/s."""
    return {"chapter": "03_ddp", "ranks": ranks, "dataset": "synthetic", "model": "resnet18", "image_size": 32,
            "batch_size": 10, "global_batch_size": 10 * ranks, "images_per_second": speed, "gradient_bytes": 1e6,
            "cpus": 2, "others": 0.0, "processor": "a processor"} | more


def left_out(reason: str = "lab.sh: no tc here: apt install iproute2") -> dict:
    """A run on nodes that could not be."""
    return {"chapter": "03_ddp", "ranks": 2, "dataset": "synthetic", "link": "1gbit", "left_out": reason, "cpus": 2}
