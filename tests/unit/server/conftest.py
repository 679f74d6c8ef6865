"""A server that the tests of a module share, and the two forms in which behaviour is tested."""

from collections.abc import Iterator

import pytest

from tests.support.server.harness import Client, forms, serving

# Modules whose tests run a second time with two front ends apart from the engine, but for those marked `one_process`,
# which look into the server's only process. The first ones with each change, the others nightly.
BOTH = (
    *("test_completions", "test_responses", "test_streams"),
    *(
        "test_admin",
        "test_answers",
        "test_anthropic",
        "test_chat_completions",
        "test_embeddings",
        "test_fairness",
        "test_images",
        "test_lora",
    ),
    *("test_memory", "test_metrics", "test_openai", "test_unknown_calls"),
)
ALWAYS = BOTH[:3]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of some modules in both forms, and most of those in the second one nightly."""
    name = metafunc.module.__name__.rpartition(".")[2]
    if name in BOTH and not any(mark.name == "one_process" for mark in metafunc.definition.iter_markers()):
        marks = [] if name in ALWAYS else [pytest.mark.nightly]
        both = [pytest.param(0, id=""), pytest.param(2, id="apart", marks=marks)]
        metafunc.parametrize("form", both, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of front ends of the servers of a test; 0: the engine's process serves HTTP."""
    forms.front_ends = getattr(request, "param", 0)
    yield forms.front_ends
    forms.front_ends = 0


@pytest.fixture(scope="module")
def shared(form: int) -> Iterator[Client]:
    """A server with a fake engine and a chat template."""
    with serving(template="{% for m in messages %}{{ m.content }}{% endfor %}") as client:
        yield client
