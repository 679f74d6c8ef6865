"""Digests of the step programs of some engines: a change of jswa that changes no program changes no digest.

    python -m tools.programs digest [TEXT]       write tools/programs/digests.json anew, to accept a change
    python -m tools.programs compare [TEXT]      say which programs have changed; exit with 1 if some have
    python -m tools.programs show NAME           print the text of a program, such as "gemma-3-27b, Mosaic: prefill"

TEXT chooses the configurations whose names contain it. Programs are traced and lowered, not compiled, for a CPU or for
a GPU that need not be there. Those with kernels on Triton need jax-triton (`.venv-gpu/bin/python`), and are left alone
where it is missing. Compare two commits by the texts of a program, without the numbers of values:

    python -m tools.programs show NAME | sed -E 's/%[0-9a-z_#:]+//g' > before
"""

import argparse
import sys

import jax

from pallas_kernels.cpu import library
from tools.programs.committed import changes, named, write
from tools.programs.configurations import CONFIGURATIONS
from tools.programs.lowered import Configuration, lowered
from tools.programs.triton import installed


def main() -> None:
    """Run the command that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("digest", "compare", "show"))
    parser.add_argument("name", nargs="?", default="", help="part of a configuration's name; for `show` a program's")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    jax.config.update("jax_num_cpu_devices", 2)  # type: ignore[no-untyped-call]
    if options.command == "show":
        sys.exit(show(options.name))
    chosen, found = [one for one in CONFIGURATIONS.values() if options.name in one.name], dict[str, str]()
    if not chosen:
        sys.exit(f"no configuration has {options.name} in its name: they are {'; '.join(CONFIGURATIONS)}")
    for configuration in chosen:
        if (missing := missing_for(configuration)) is None:
            found |= named(configuration.name, lowered(configuration))
        else:
            print(f"left alone, as {missing}: {configuration.name}", file=sys.stderr)
    if options.command == "digest":
        write(found, CONFIGURATIONS)
    else:
        sys.exit(changes(found) or None)


def show(name: str) -> str | None:
    """Print the text of a program; return what is wrong with its name, if anything is."""
    configuration, _, program = name.rpartition(": ")
    if configuration not in CONFIGURATIONS:
        return f"{name} is not CONFIGURATION: PROGRAM; configurations are {'; '.join(CONFIGURATIONS)}"
    texts = lowered(CONFIGURATIONS[configuration])
    if program not in texts:
        return f"{configuration} has the programs {', '.join(texts)}"
    sys.stdout.write(texts[program].text)
    return None


def missing_for(configuration: Configuration) -> str | None:
    """Return what is missing here to lower a configuration's programs; None if nothing is."""
    if configuration.on_triton and not installed():
        return "jax-triton is not installed"
    if configuration.on_library and not library.available():
        return "the library of CPU kernels is not built"
    return None


if __name__ == "__main__":
    main()
