"""What one grammar may have. docs/structured-outputs.md lists these numbers."""

from collections import Counter
from typing import Literal

from jswa.grammar.bounds import SchemaError

MAX_BYTES = 2**18  # of a schema or another form
MAX_SCHEMAS = 10_000  # of a grammar, required names without a schema among them
MAX_DEPTH = 100  # of brackets inside brackets; llguidance reads 128
MAX_CHOICES = 10_000  # strings of a `choice`
MAX_TEXT = 2**15  # characters of a string that is forced as a whole: to fill a mask takes time in proportion to it
MAX_LARK = 16_384  # characters of a grammar, without its schemas
MAX_LINES = 2_000  # of a grammar: an error in a chain of rules is told once more by each of them
MAX_PATTERN = 8_192  # characters of a regular expression
MAX_REPEATS = 4_096  # characters that a regular expression asks for at least
MAX_JOINED = 8  # patterns of a schema that are in an `allOf`: with each one more, their product takes twice as long
MAX_STEP = 10_000  # a `multipleOf` without its decimal point, and a common multiple of those of one value
MAX_PLACES = 3_900  # places where a text may go on at once; a row of llguidance's parser has 4,000 items
MAX_ALTERNATIVES = 200  # objects and arrays of which a value may be one
MAX_TAGS = 1_000  # of a structural tag: its structures, and its triggers
MAX_COMPILE_SECONDS = 1.0  # of the processor, to compile a grammar once its text is there
MAX_MASK_SECONDS = 0.05  # of the processor, to fill one mask

Kind = Literal["bytes", "schemas", "values", "steps", "checked patterns", "name checks", "comparisons", "merges"]

# Of all schemas of one grammar together, tools among them: how many, and in which words.
MOST: dict[Kind, tuple[int, str]] = {
    "bytes": (2**20, "bytes of schemas"),
    "schemas": (MAX_SCHEMAS, "schemas and required names"),
    "values": (20_000, "values in `enum` and `const`"),
    "steps": (30_000, "as the sum of its `multipleOf`"),
    "checked patterns": (1_000, "patterns and formats that are joined with lengths, values or each other"),
    "name checks": (5_000, "pairs of a pattern of `patternProperties` and another pattern or property beside it"),
    "comparisons": (20_000_000, "comparisons of the parts of a `oneOf`"),
    "merges": (300_000, "copies of schemas that are merged: by `allOf`, or as `anyOf` or `$ref` beside other keywords"),
}


class SchemaCounts:
    """What the schemas of one grammar have together."""

    def __init__(self) -> None:
        self._found = Counter[str]()

    def add(self, kind: Kind, number: int, at: str = "") -> None:
        """Count something at a place of a schema. Raises SchemaError if it is too much."""
        self._found[kind] += number
        most, words = MOST[kind]
        if self._found[kind] > most:
            raise SchemaError(at, f"is too large: it takes more than {most} {words}")
