"""Write GGUF files of other types from one: the same numbers in F32, rounded to F16 or to Q8_0.

    .venv-real/bin/python -m benchmarks.real.files FILE.gguf FOLDER

Each file has all metadata of the first and its vectors as they are; matrices are dequantized, and quantized by the gguf
package, which is llama.cpp's own. A file that is there already is kept.
"""

import os
import sys
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

TYPES = ("F32", "F16", "Q8_0")
_OURS = ("general.architecture", "general.file_type")  # keys that the writer or this module writes
_FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}


def write(source: Path, target: Path, kind: str) -> None:
    """Write a file whose matrices have another type."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in _OURS:
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    writer.add_file_type(_FILE_TYPES[kind])
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        wanted = GGMLQuantizationType[kind]
        data = quantize(dequantize(tensor.data, tensor.tensor_type), wanted)
        writer.add_tensor(tensor.name, data, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write each type that the folder does not have yet."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for kind in TYPES:
        target = folder / f"{kind}.gguf"
        if not target.exists():
            part = target.with_suffix(".part")
            write(source, part, kind)
            os.replace(part, target)
            print(f"{target}: written", flush=True)


if __name__ == "__main__":
    main()
