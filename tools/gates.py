"""Gates of compiled kernels and steps: what a compiler reported is committed, and may not become worse.

Files are JSON: name of a kernel or a step, then figures. Imports no jax.
"""

import json
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent / "aot" / "gates"
Figures = Mapping[str, float]
MORE_IS_BETTER = ("blocks_per_sm", "smallest_copy")


def worse(found: Mapping[str, Figures], file: str, folder: Path = FOLDER) -> list[str]:
    """Return what is worse than committed, as lines that name the entry, the figure and both values.

    Entries and figures on one side alone are not compared: a sample compiles a few, and not all are committed.
    """
    committed = json.loads((folder / file).read_text())["figures"]
    faults = []
    for name, figures in found.items():
        for figure, limit in committed.get(name, {}).items():
            value = figures.get(figure, limit)
            if value < limit if figure in MORE_IS_BETTER else value > limit:
                faults.append(f"{name}: {figure} is {value:g}, committed is {limit:g} ({file})")
    return faults


def write(found: Mapping[str, Figures], file: str, versions: Mapping[str, str], folder: Path = FOLDER) -> None:
    """Write the figures over those of the same names; entries that were not found stay."""
    path = folder / file
    committed = json.loads(path.read_text())["figures"] if path.exists() else {}
    lines = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(dict(figures))}" for name, figures in sorted({**committed, **found}.items())
    )
    path.write_text(f'{{"versions": {json.dumps(dict(versions))}, "figures": {{\n{lines}\n}}}}\n')
