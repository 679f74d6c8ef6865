"""The messages that openai-harmony reads from token ids. Runs in an environment of its own (`make families`).

`python harmony_reference.py`: each line of the input is a JSON list of token ids behind `<|start|>assistant`, each line
of the output a list of messages (role, channel, recipient, text), or the error as a string.
"""

import json
import sys

from openai_harmony import HarmonyEncodingName, HarmonyError, Role, StreamableParser, load_harmony_encoding


def main() -> None:
    """Answer each line."""
    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    for line in sys.stdin:
        parser = StreamableParser(encoding, Role.ASSISTANT)
        try:
            for token in json.loads(line):
                parser.process(token)
            parser.process_eos()
        except HarmonyError as error:
            print(json.dumps(str(error)))
            continue
        print(
            json.dumps(
                [
                    (one.author.role.value, one.channel, one.recipient, "".join(part.text for part in one.content))
                    for one in parser.messages
                ]
            )
        )


if __name__ == "__main__":
    main()
