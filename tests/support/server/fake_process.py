"""A server process with a fake engine. Arguments: attributes of the engine and options of the server, as JSON."""

import json
import sys

from jswa.text.tokenizer import Tokenizer
from server.core.service import Served
from server.http.process import set_up_logging
from server.options import ServeConfig
from server.processes.supervisor import run
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import BYTES

if __name__ == "__main__":
    fake, options = (json.loads(argument) for argument in sys.argv[1:3])

    def build() -> FakeEngine:
        engine = FakeEngine(max_model_len=100_000)
        for name, value in fake.items():
            setattr(engine, name, value)
        return engine

    config = ServeConfig(**{"served_model_name": ("fake",), "port": 0, **options})
    set_up_logging(config)
    sys.exit(run(Served(build, Tokenizer.load(BYTES)), config))
