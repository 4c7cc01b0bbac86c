"""Prints a footprint, and writes it as JSON."""

import json
import resource
import sys


def check_collectives(footprint: dict, ranks: int) -> str:
    """Return what is wrong if several ranks have called no collective, else ""."""
    if ranks == 1 or footprint["sent"]:
        return ""
    return (f"{ranks} ranks, but the step calls no collective of torch.distributed: each rank "
            "trains alone (Horovod's collectives are not counted)")


def add_links(footprint: dict, nodes: list) -> None:
    """Say of each collective whether it stays inside a node. nodes: of all ranks."""
    for row in footprint["sent"]:
        is_inside = len({nodes[rank] for rank in row["ranks"]}) == 1
        row |= {"ranks": len(row["ranks"]),
                "link": "inside a node" if is_inside else "between nodes"}


def show(args, footprints: list[dict], seconds: float) -> None:
    """Print a table of the ranks: all if there are up to four, else the first and the fullest."""
    shown = footprints
    if len(footprints) > 4:
        shown = [footprints[0], max(footprints, key=lambda row: row["memory"]["peak"])]
    first = footprints[0]
    print(f"\n{args.script}, second step, ", end="")
    if first["pretended"]:
        print(f"pretended rank {args.rank} of {args.ranks:,}, {args.gpus_per_node} per node, "
              f"{first['tensors']} tensors")
        if first["tensors"] == "fake":
            print(f"(on fake tensors the peak may be 6 % too high: {first['why_fake']})")
            if first["values_read"]:
                print(f"(values read: {first['values_read']:,}, the first at "
                      f"{first['first_read']}; of fake tensors they are 1: sizes must not depend "
                      "on them)")
    else:
        print(f"{len(footprints)} rank(s)")
    names = [f"rank {row['rank']}" for row in shown]
    print(f"\n{'bytes':22}" + "".join(f"{name:>20}" for name in names))
    for role in first["memory"]:
        sizes = [row["memory"][role] for row in shown]
        print(f"{role:22}" + "".join(f"{size:20,}" for size in sizes)
              + (f"   {sizes[0] / 2**30:.1f} GiB" if role == "peak" and sizes[0] > 1e9 else ""))
    print(f"\n{'sent by rank ' + str(first['rank']):22}{'bytes':>20}{'calls':>8}"
          f"{'group of':>10}   link")
    for row in first["sent"]:
        dimension = f", {row['dimension']} dimension" if row["dimension"] else ""
        print(f"{row['operation']:22}{row['bytes']:20,}{row['calls']:8,}{row['ranks']:10,}   "
              f"{row['link']}{dimension}")
    flops = sum(first["flops"].values())
    again = first["flops"].get("recomputation", 0)
    print(f"\n{'FLOPs':22}{flops - again:20,}"
          + (f"   and {again:,} that activation checkpointing repeats" if again else ""))
    host = peak_host_bytes()
    print(f"\ntook {seconds:.0f} s and {host / 1e9:.1f} GB of this computer's memory")
    if args.results:
        with open(args.results, "a") as file:
            for row in footprints:
                file.write(json.dumps({"script": args.script, "flags": args.arguments,
                                       "ranks": args.ranks or len(footprints),
                                       "seconds": round(seconds, 1), "host_bytes": host, **row})
                           + "\n")


def peak_host_bytes() -> int:
    """Return the largest resident size of this process or of a child that has ended."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * max(resource.getrusage(who).ru_maxrss
                      for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
