"""Table and roofline plot of the results of `benchmarks.gpu.kernels` and `benchmarks.gpu.torch_attention`.

    python -m benchmarks.gpu.roofline DIR    reads DIR/kernels.json and DIR/torch.json, writes table.md and roofline.png

The roof was measured in the same run: bytes per second of a large copy, FLOP per second of a large matrix product. The
plot needs matplotlib (`pip install jswa[bench]`).
"""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from benchmarks import result_file


def main() -> None:
    """Write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    if not (folder / "kernels.json").is_file():
        parser.error(f"{folder} has no kernels.json: run benchmarks.gpu.kernels first")
    kernels, torch = (result_file.read(folder / name) for name in ("kernels.json", "torch.json"))
    (folder / "table.md").write_text("\n".join(table(kernels, torch)) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (pip install jswa[bench])")
    else:
        plot(kernels, folder / "roofline.png")


def table(kernels: dict[str, Any], torch: dict[str, Any]) -> list[str]:
    """Return lines of Markdown: microseconds per measure and implementation, and the first one's share of the roof."""
    others = {row["label"]: row["seconds"] for row in torch.get("attention", [])}
    rows = [(row, {**row["seconds"], **others.get(row["label"], {})}) for row in kernels.get("attention", [])]
    names = list(dict.fromkeys(name for _, seconds in rows for name in seconds))
    jax = kernels.get("versions", {}).get("jax")
    lines = [
        f"{kernels.get('device', 'no device')}, jax {jax}; microseconds of one call, median",
        "",
        f"| attention | {' | '.join(names)} | share of the roof |",
        f"|{' --- |' * (len(names) + 2)}",
    ]
    for row, seconds in rows:
        cells = [_microseconds(seconds.get(name)) for name in names]
        share = _share(row, seconds.get(names[0]), kernels["ceilings"])
        lines.append(f"| {row['label']} | {' | '.join(cells)} | {share} |")
    return lines


def _microseconds(seconds: Any) -> str:
    return f"{1e6 * seconds['median']:.1f}" if isinstance(seconds, dict) else "not measured"


def _share(row: dict[str, Any], seconds: Any, ceilings: dict[str, float]) -> str:
    if not isinstance(seconds, dict):
        return "not measured"
    least = max(row["bytes"] / ceilings["copy_bytes_per_s"], row["flops"] / ceilings["flops"])
    return f"{least / seconds['median']:.0%}"


def plot(kernels: dict[str, Any], path: Path) -> None:
    """Plot FLOP per second over FLOP per byte, a colour per implementation, under the roof."""
    from matplotlib import pyplot

    ceilings = kernels["ceilings"]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    reach = [0.1, ceilings["flops"] / ceilings["copy_bytes_per_s"], 1e5]
    axes.loglog(reach, [min(x * ceilings["copy_bytes_per_s"], ceilings["flops"]) / 1e12 for x in reach], "k-")
    names = list(dict.fromkeys(name for row in kernels["attention"] for name in row["seconds"]))
    for name in names:
        rows = [row for row in kernels["attention"] if isinstance(row["seconds"].get(name), dict)]
        intensity = [row["flops"] / row["bytes"] for row in rows]
        axes.loglog(intensity, [row["flops"] / row["seconds"][name]["median"] / 1e12 for row in rows], "o", label=name)
    axes.set_xlabel("FLOP per byte moved")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(kernels["device"])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
