"""A server for the tests of the pages: its model reasons, writes Markdown that tries to be HTML, or calls a tool.

`python -m tests.pages.scripted_server '{...}'` is the process; the argument has options of the server, and whether its
model `sees` images.
"""

import json
import sys

from jswa.text.chat_template import ChatTemplate
from server.core.service import Served
from server.http.process import set_up_logging
from server.options import ServeConfig
from server.processes.supervisor import run
from tests.support.server import pictures
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.scripted import AGENT_TEMPLATE, HARMONY, writing_engine
from tests.support.text.transcripts import template_of, tokenizer_of

SECONDS = 0.002  # of a step, which writes one character
_CHANNEL = "<|start|>assistant<|channel|>"
_EFFORTS = '{% if reasoning_effort == "low" or reasoning_effort == "high" %}{% endif %}'
MARKDOWN = """# Heading

A *word*, a **bold one**, `code <b>`, ~~gone~~ and [a link](https://example.com/a_(b)).
Second line with <img src=x onerror="document.title='broken'"> and <script>document.title='broken'</script>.

- one
  - inner *item*
- two [bad](javascript:alert(1)) ![picture](https://example.com/p.png)

3. three
4. four

| name | value |
| --- | ---: |
| a \\| b | 1 |

> quoted **text**

```html
<script>alert("code stays text")</script>
```

<iframe src="https://example.com"></iframe> &lt;b&gt; and 2 * 3 * 4 = 24, snake_case_name.
"""


def answer(prompt: str) -> str:
    """Return what the model writes after a prompt."""
    turn = prompt.rpartition("<|start|>user<|message|>")[2]
    asked = turn.partition("<|end|>")[0]
    if "weather" in asked and "<|start|>tool<|message|>" not in turn:
        call = '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
        return f"analysis<|message|>I look it up.<|end|>{call}"
    text = f"You said: {asked}"
    if "markdown" in asked:
        text = MARKDOWN
    elif "weather" in asked:
        text = "It rains in Oslo."
    elif "long" in asked:
        text = " ".join(f"word{i}" for i in range(400))
    return f"analysis<|message|>They ask for something.<|end|>{_CHANNEL}final<|message|>{text}<|return|>"


def _engine() -> FakeEngine:
    tokenizer = tokenizer_of(HARMONY)
    ends = tokenizer.encode("<|call|><|return|>", add_special_tokens=False).tolist()
    engine = writing_engine(tokenizer, answer, ends)
    engine.delay = SECONDS
    return engine


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    if options.pop("sees", False):
        served = Served(pictures.seeing, pictures.tokenizer(), ChatTemplate({"default": pictures.TEMPLATE}, {}))
    else:
        template = _EFFORTS + AGENT_TEMPLATE.removesuffix("<|start|>assistant") + _CHANNEL
        served = Served(_engine, tokenizer_of(HARMONY), ChatTemplate({"default": template}, {}),
                        template_of("harmony", tokenizer_of(HARMONY)), {"temperature": 0.7})  # fmt: skip
    config = ServeConfig(**{"served_model_name": ("scripted",), "port": 0, **options})
    set_up_logging(config)
    sys.exit(run(served, config))
