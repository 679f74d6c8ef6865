"""Images in the jitted step: its programs read rows of tokens (`Variant.embeds`), and compute nothing besides."""

from jswa.ribs.hooks import Hooks
from jswa.ribs.images.host import EMBEDDED

HOOKS = {EMBEDDED: Hooks({})}
