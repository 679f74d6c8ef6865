"""The engine: drives a scheduler and a runner, with one step in flight. It has no policy of its own."""

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO

import numpy as np
from jaxtyping import Int

from jswa.architecture import ModelConfig
from jswa.cache.keys import root_key
from jswa.cache.layout import KVLayout
from jswa.cache.prefix.stats import CacheStats
from jswa.cache.view import CacheView, view
from jswa.cluster.hosts import Hosts
from jswa.config import Limits
from jswa.env import Switches
from jswa.errors import InvalidPrompt, InvalidToken, JswaError, RequestError
from jswa.exec.host_pages import HostPages
from jswa.grammar.compiler import Grammars, asked_grammar
from jswa.images.picture import Picture
from jswa.images.tokens import ImageInput, placed_images
from jswa.kernels import PORTABLE, Kernels
from jswa.model.vision.encoder import Sight
from jswa.model.weights.lora.files import HostAdapter, LoraReader
from jswa.plan import (
    DEFAULT_OPTIONS,
    PLAIN,
    SPLIT,
    ImageRows,
    Request,
    RequestOptions,
    StepEvents,
    TextGrammar,
    TokenEvent,
)
from jswa.ribs.table import VARIANTS, needs_of
from jswa.running.adapters import Adapters
from jswa.running.runners import AdapterRunner, CompilingRunner, DraftingRunner
from jswa.running.staging import WeightsStager
from jswa.running.stepping import Stepping, StepRunner
from jswa.running.turnover import Turnover
from jswa.sched.constraint import make_constraint
from jswa.sched.outputs import SchedulerStats
from jswa.sched.scheduler import Scheduler
from jswa.sched.steplog import StepStats
from jswa.types import SamplingParams

_log = logging.getLogger("jswa")


class Engine:
    """Runs requests. One thread drives it: `add`, then `step` while `has_work`.

    Args:
        kernels: that the runner runs.
        adapters: the LoRA adapters among the runner's parameters, and the room for others.
        lora_reader: reads further adapters; None: the runner has no room for any.
        stager: turns new weights into parameters; needed if the runner can change them.
        hosts: the hosts that share the model, if there are several; the engine runs on the first.
        host_pages: the contents of the second prefix cache, if `limits.host` asks for one.
        grammars: those of structured outputs; None: requests with structured outputs are refused.
        sight: what reads images; None: requests with images are refused.

    Attributes:
        stepping: runs the steps.
        turnover: changes the weights, pauses and sleeps.
    """

    def __init__(
        self,
        model: ModelConfig,
        limits: Limits,
        layout: KVLayout,
        runner: StepRunner,
        *,
        kernels: Kernels = PORTABLE,
        seed: int = 0,
        switches: Switches | None = None,
        trace: IO[str] | None = None,
        adapters: Adapters | None = None,
        lora_reader: LoraReader | None = None,
        stager: WeightsStager | None = None,
        hosts: Hosts | None = None,
        host_pages: HostPages | None = None,
        grammars: Grammars | None = None,
        sight: Sight | None = None,
    ) -> None:
        self.model = model
        self.limits = limits
        self.layout = layout
        self.kernels = kernels
        self._adapters = adapters or Adapters()
        self._lora_reader = lora_reader
        self._stager = stager
        self.hosts = hosts
        self._scheduler = Scheduler(layout, limits)
        if limits.speculation is not None and isinstance(runner, DraftingRunner):
            self._scheduler.drafting.lengths = runner.lengths
        self.stepping = Stepping(runner, self._scheduler, switches or Switches(), trace, host_pages)
        # Held while the prefix cache is saved or loaded, so that one copy runs at a time, and of one version of the KV.
        self.copying = threading.Lock()
        nodes = 1 if hosts is None else hosts.member.nodes
        self.turnover = Turnover(runner, self._scheduler, self.stepping.drain, self.copying, nodes=nodes)
        self._seed = seed
        self._numbers = itertools.count(1)  # several threads may call `request`
        self.grammars = grammars
        self.sight = sight
        self._profiles = False

    @property
    def runner(self) -> StepRunner:
        """The device side."""
        return self.stepping.runner

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for benchmarks and tests to look at between two steps; the engine alone drives it."""
        return self._scheduler

    def request(
        self,
        request_id: str,
        prompt: Int[np.ndarray, " P"],
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        bad_words: tuple[tuple[int, ...], ...] = (),
        choice: int = 0,
        like: Request | None = None,
        images: Sequence[ImageRows] = (),
    ) -> Request:
        """Validate a prompt and its parameters; `add` checks length limits. Any thread may call it.

        Raises InvalidPrompt, InvalidToken, InvalidSampling, UnknownAdapter, or RequestError for what no rib serves.

        Args:
            bad_words: token sequences that are never generated, in place of the text in `params.bad_words`.
            choice: number of the text among those of its prompt; with a seed it is added to the seed.
            like: a request of the same call, hence with the same parameters, options and bad words. Its stop ids
                and constraint, whose tables may be as long as the vocabulary, are shared. So is its prompt if `prompt`
                is that very array: then nothing here depends on the prompt's length, and images are shared too.
            images: what `see` has returned of the prompt's images, in its order.
        """
        if like is not None and prompt is like.prompt:
            ids, at = like.prompt, like.images
        else:
            at = placed_images(prompt, images)
            ids = self._checked(prompt, soft=sum(len(image.rows) for image in at))
        if like is None:
            needs_of(params, images=bool(at))  # raises for what no rib serves
            if params.pooling == "mean" and self.limits.deterministic:
                limit = "must be 'last' in a deterministic engine: the sum of a mean is rounded as its prompt is cut"
                raise RequestError("pooling", "mean", limit)
            number, digest = (0, None) if options.lora is None else self._adapters.find(options.lora)
            root = root_key(options.cache_salt, digest)
            ends = () if params.ignore_eos else self.model.eos_token_ids
            stop_ids = frozenset(params.stop_token_ids) | frozenset(ends)
            constraint = make_constraint(params, self.model.vocab_size, len(ids), stop_ids, bad_words)
            grammar: TextGrammar | None = asked_grammar(self.grammars, params)
        else:
            stop_ids, constraint, number, root = like.stop_ids, like.constraint, like.adapter, like.cache_salt
            grammar = like.grammar
            if constraint is not None:
                constraint = constraint._replace(min_length=len(ids) + params.min_tokens)
        longest = self.limits.max_model_len
        return Request(
            request_id,
            ids,
            params,
            stop_ids,
            key=self._key(params.seed, choice),
            max_length=longest if params.max_tokens is None else min(longest, len(ids) + params.max_tokens),
            options=options,
            constraint=constraint,
            grammar=grammar,
            cache_salt=root,
            adapter=number,
            version=self.turnover.version,
            images=at,
        )

    def _checked(self, prompt: Int[np.ndarray, " P"], soft: int) -> Int[np.ndarray, " P"]:
        """Return a copy of a prompt as int32. Raises InvalidPrompt or InvalidToken.

        `soft`: the number of its tokens that belong to images.
        """
        if len(prompt) == 0:
            raise InvalidPrompt("prompt", "", "must have at least one token")
        bad = prompt[(prompt < 0) | (prompt >= self.model.vocab_size)]
        if soft and prompt[-1] < 0:
            raise InvalidPrompt("prompt", "an image", "must not be the end of a prompt: a token of text must follow")
        if len(bad) > soft:
            raise InvalidToken("prompt token id", int(bad[0]), f"must be in [0, {self.model.vocab_size})")
        return prompt.astype(np.int32)

    def _key(self, seed: int | None, choice: int) -> tuple[int, int]:
        """Return the random key of a new request, the two halves of 64 bits."""
        number = next(self._numbers)
        if seed is None:
            high, low = np.random.SeedSequence([self._seed, number]).generate_state(2).tolist()
            return high, low
        return divmod((int(seed) + choice) % 2**64, 2**32)

    @property
    def images(self) -> ImageInput | None:
        """What makes prompts of images; None if the engine reads no images. Any thread may read it."""
        return None if self.sight is None else self.sight.images

    def see(self, pictures: Sequence[Picture], salt: str = "") -> tuple[ImageRows, ...]:
        """Return the rows of pictures' soft tokens, for `request`. It may take seconds; any thread may call it.

        Raises RequestError if the engine reads no images.
        """
        if self.sight is None:
            raise RequestError("images", len(pictures), "must be none: this engine reads no images")
        encode = partial(self.sight.encoder.encode, salt=salt, busy=self.has_work)
        return tuple(ImageRows(picture.digest, encode(picture)) for picture in pictures)

    def adapter_digest(self, lora: str | None) -> str | None:
        """Return the digest of a loaded LoRA adapter; None without an adapter. Raises UnknownAdapter."""
        return None if lora is None else self._adapters.find(lora).digest

    @property
    def adapters(self) -> Mapping[str, str]:
        """Digests of the loaded LoRA adapters by name. Any thread may read it."""
        return self._adapters.digests

    @property
    def lora_reader(self) -> LoraReader:
        """What reads adapters for `load_lora`, in any thread. Raises RequestError if the engine has no room for any."""
        self._adapters.require_room()
        assert self._lora_reader is not None
        return self._lora_reader

    @property
    def stager(self) -> WeightsStager:
        """The stager, which turns new weights into parameters for `turnover`, in any thread. Raises RequestError."""
        self.turnover.require_changing()
        assert self._stager is not None
        return self._stager

    def load_lora(self, name: str, adapter: HostAdapter, *, replace: bool = False) -> None:
        """Load an adapter that `lora_reader` has read: requests may use it from now on. Compiles nothing.

        Args:
            replace: instead of an adapter of that name, which unfinished requests keep using.

        Raises RequestError if the name is wrong or taken, or if no room is left.
        """
        assert isinstance(self.runner, AdapterRunner)
        used = {request.adapter for request in self.turnover.unfinished()}
        slot, number = self._adapters.begin(name, used, replace=replace)
        self.runner.set_adapter(slot, number, adapter.pairs)
        self._adapters.add(name, adapter.digest, slot, number)
        _log.info("loaded LoRA adapter %r: %d matrices, digest %s", name, len(adapter.pairs), adapter.digest[:12])

    def unload_lora(self, name: str) -> None:
        """Forget an adapter. Queued and running requests use it to their end; then its room is free.

        Raises UnknownAdapter, and RequestError if the engine cannot load and unload adapters.
        """
        self._adapters.remove(name)
        _log.info("unloaded LoRA adapter %r", name)

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLong, and UnknownAdapter if its adapter was unloaded meanwhile."""
        self._adapters.require_loaded(request.adapter)
        self.turnover.add(request)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request and free its pages at once; return None if it has ended already."""
        return self.turnover.abort(request_id)

    def has_work(self) -> bool:
        """Return whether `step` has anything to do."""
        return self.turnover.has_work()

    def step(self) -> StepEvents:
        """Launch the next step, and return the events of the one before; or only events that wait to be reported."""
        if self.turnover.holds:
            self.turnover.settle()
        reports = self.turnover.reports()
        return self.stepping.step() if reports is None else reports

    def prepare(
        self,
        params: SamplingParams,
        *,
        images: bool = False,
        fewest: bool = False,
        pause: float = 0.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Compile all programs that a request with these parameters may run in, if they are missing.

        Another thread than the one that drives the engine may call this; steps go on meanwhile.

        Args:
            images: whether its prompt has images.
            fewest: compile only the fewest programs that suffice, though steps are slower in them than in the others.
            pause: while steps run, pause after each program for `pause` times as long as it took to compile.
            stop: asked before each program whether to stop compiling.
        """
        if not isinstance(self.runner, CompilingRunner):
            return
        variants = needs_of(params, images=images).variants
        wanted = [*(name for name in VARIANTS if name in variants), *([SPLIT] if params.masks_follow_text else [])]
        for feature in wanted or [PLAIN]:
            self.runner.prepare(feature, fewest=fewest, pause=pause, stop=stop)

    def when_lost(self, lost: Callable[[JswaError], None], leaving: Callable[[JswaError], None]) -> None:
        """Register callbacks for the loss of another host; each is called in a thread of its own.

        Without callbacks the process exits when a host is lost.

        Args:
            lost: a host is gone: a step that waits for it never returns.
            leaving: a host was told to exit; it keeps working until this engine is closed.
        """
        if self.hosts is not None:
            self.hosts.when_lost(lost, leaving)

    def close(self) -> None:
        """Stop compiling, write the records that wait for the disk (at most 5 s), and release the other hosts.

        Closing twice is fine.

        The engine cannot be used afterwards.
        """
        if isinstance(self.runner, CompilingRunner):
            self.runner.close()
        host = self._scheduler.cache.host
        if host is not None and host.disk is not None:
            host.disk.store.close()
        if self.hosts is not None:
            self.hosts.close()

    def step_stats(self) -> StepStats:
        """Return counts and times of the steps so far."""
        runner = self.runner
        late = (runner.compiled_in_steps, runner.compiled_beside) if isinstance(runner, CompilingRunner) else (0, 0)
        drafting = self._scheduler.drafting.stats() if self._scheduler.rows.speculates else None
        return self.stepping.log.stats(*late, drafting)

    def stats(self) -> SchedulerStats:
        """Return rows and memory at this moment."""
        return self._scheduler.stats()

    def check(self) -> None:
        """Assert every law of scheduler, cache, leases and pool; for tests."""
        self._scheduler.check()

    def cache_stats(self) -> CacheStats:
        """Return counters and contents of the prefix cache."""
        return self._scheduler.cache.stats()

    def view(self, edges: int) -> CacheView:
        """Return what the arena, the rows and so many edges of the prefix tree hold, as `cache.view.view`."""
        return view(self._scheduler.cache, self._scheduler.rows.launched, edges)

    def profile(self, folder: str | None) -> None:
        """Begin a profile of jax, written to a folder; None ends and writes it. Raises RequestError."""
        from jax import profiler

        if (folder is None) != self._profiles:
            asked, limit = ("stop", "a profile must run") if folder is None else ("start", "a profile runs already")
            raise RequestError("profile", asked, limit)
        if folder is None:
            profiler.stop_trace()  # type: ignore[no-untyped-call]
        else:
            profiler.start_trace(folder)
        self._profiles = folder is not None

    def flush_cache(self) -> None:
        """Empty the prefix cache, on the disk too, and forget its texts. Running rows keep their pages."""
        cache = self._scheduler.cache
        cache.flush()
        self._scheduler.drafting.forget_texts()
        if cache.host is not None and cache.host.disk is not None:
            cache.host.disk.clear()
