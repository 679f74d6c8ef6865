"""The Python API: `LLM(model).generate(prompts)`."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast, overload

from jswa.building.build import build_engine, check_model
from jswa.cache.prefix.stats import CacheStats
from jswa.engine import Engine
from jswa.errors import InvalidPrompt
from jswa.frontend.driver import Driver
from jswa.frontend.generate_call import GenerateCall
from jswa.frontend.operations import operate
from jswa.frontend.outputs import CallOptions, asked_form
from jswa.frontend.pictures import without_images
from jswa.frontend.pooled_call import EmbeddingRequestOutput, Pooler, ScoringRequestOutput
from jswa.plan import RequestOptions
from jswa.running.staging import Weights
from jswa.running.turnover import InFlight, WhilePaused
from jswa.sched.outputs import SchedulerStats
from jswa.storage.cache_store import load_cache, save_cache
from jswa.storage.hub import find_model
from jswa.text.answers.parser import Answering
from jswa.text.answers.probe import settled_by
from jswa.text.answers.template import AnswerTemplate, find_template
from jswa.text.chat_template import ChatTemplate, Message
from jswa.text.guard import encode_guarded, guard
from jswa.text.inputs import (
    NO_TOKENIZER,
    Prompt,
    Prompts,
    chat_examples,
    default_sampling,
    engine_config,
    split_prompts,
)
from jswa.text.pooling import PoolingConfig
from jswa.text.tokenizer import Tokenizer
from jswa.types import Pooling, RequestOutput, SamplingParams


class LLM:
    """An engine with its tokenizer. Use it as a context manager, or `close` it, to free the device's memory.

    Args:
        model: a folder with a Hugging Face checkpoint, a GGUF file, OWNER/NAME on the Hugging Face Hub (with :TYPE or
            /FILE.gguf for a GGUF file), or "tiny", the embedded model.
        options: fields of `jswa.EngineConfig`, by name. Raises ConfigError for an unknown name.

    Several threads may call all methods at the same time; their requests share the engine's steps. A thread holds the
    engine for one step at a time, and not while it waits for the reader of a stream.

    Attributes:
        driver: by which the threads share the engine; `jswa.rl` adds requests of its own to it.

    If several hosts share the model (`nnodes`), each host makes the same LLM. The call returns on host 0 only: the
    other hosts run the steps that host 0 launches, and exit with it (SystemExit).
    """

    def __init__(self, model: str | Path = "tiny", **options: Any) -> None:
        config = engine_config(options)
        folder = find_model(
            model,
            revision=config.revision,
            download_dir=config.download_dir,
            check=lambda folder: check_model(folder, config),
            needed="all but weights" if config.load_format == "dummy" else "all",
        )
        self._folder = folder
        self._answers: dict[str | None, AnswerTemplate | None] = {}  # response templates by the chat template in use
        # Read and check the small files first.
        self.tokenizer = Tokenizer.load(folder)
        self.chat_template = ChatTemplate.load(folder)
        self.default_sampling = default_sampling(folder)
        self.chat_examples = chat_examples(folder)
        self.pooling = PoolingConfig.load(folder)
        self.driver: Driver[Engine] = Driver(build_engine(folder, config, self.tokenizer))

    def with_engine(self, engine: Engine) -> "LLM":
        """Return an LLM with this one's tokenizer, chat template and defaults on another engine of the same model."""
        other = copy.copy(self)
        other.driver = Driver(engine)
        return other

    @property
    def num_unfinished(self) -> int:
        """Number of requests of this LLM that have not ended."""
        return self.driver.num_unfinished

    @property
    def engine(self) -> Engine:
        """The engine underneath. Raises EngineError once the LLM is closed."""
        return self.driver.engine

    def close(self) -> None:
        """Free weights and KV memory. The LLM cannot be used afterwards; closing twice is fine.

        Calls that run in other threads raise EngineError.
        """
        self.driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stats(self) -> SchedulerStats:
        """Return rows and memory at this moment."""
        return self.driver.between(lambda: self.engine.stats())

    def cache_stats(self) -> CacheStats:
        """Return counters and contents of the prefix cache."""
        return self.driver.between(lambda: self.engine.cache_stats())

    def flush_cache(self) -> None:
        """Empty the prefix cache and reset its counters. Running requests keep their pages."""
        operate(self.driver, "flush_cache")

    def save_cache(self, path: str | Path, cache_salt: str = "", lora: str | None = None) -> int:
        """Write the prefix cache of a salt and LoRA adapter to a folder; return the number of tokens in it.

        Another LLM with the same model and options can load it (`load_cache`). A saved cache at `path` is replaced once
        the new one is complete; a folder with other files is refused. Requests of other threads go on meanwhile. The
        saved cache is that of the time of the call, and takes host memory for one copy. Raises CacheFileError, and
        ConfigError if the LLM has no prefix cache.
        """
        return save_cache(self.engine, path, cache_salt, lora, between=self.driver.between)

    def load_cache(self, path: str | Path, cache_salt: str = "", lora: str | None = None) -> int:
        """Add a saved cache to the prefix cache of this salt and adapter; return the tokens added.

        Requests of other threads go on meanwhile. Nothing is evicted: if memory is short, the texts used longest ago
        are left out. Raises CacheFileError with the reason, and changes nothing, if the cache is missing, torn, or of
        another model, weights, dtype, block_size, salt or version; ConfigError if the LLM has no prefix cache. Load
        only caches that you trust as you trust code.
        """
        return load_cache(self.engine, path, cache_salt, lora, between=self.driver.between)

    def load_lora(self, name: str, folder: str | Path, *, load_inplace: bool = False) -> None:
        """Load a LoRA adapter into the memory that `max_loras` reserves.

        `load_inplace` replaces a loaded adapter of that name. If the adapter cannot be loaded, the call raises
        RequestError and changes nothing.
        """
        operate(self.driver, "load_lora", folder, name, load_inplace)

    def unload_lora(self, name: str) -> None:
        """Unload a LoRA adapter: new requests for it are refused; running requests that use it go on to their end."""
        operate(self.driver, "unload_lora", name)

    def update_weights(self, source: Weights, *, in_flight: InFlight = "continue") -> int:
        """Change the weights between two steps, and return their version: the first ones have 0.

        The prefix cache shares nothing between versions. Other threads' requests go on while the weights are converted.

        Args:
            source: a tree of arrays (dict, nnx state, …), or an iterable of (name, array), with the names of a Hugging
                Face checkpoint or the decoder's own; or a checkpoint folder; or the file of arrays that another process
                hands over (`jswa.rl.trainer.handed_over`). Arrays on devices are converted there, without the host.
                They are float32, bfloat16 or float16, and not used afterwards.
            in_flight: unfinished requests go on with the new weights and the KV that they have ("continue"; `versions`
                of an output says which weights each token comes from), end at once ("abort"), or run to their end with
                the old weights while new requests wait ("finish"; the call waits too).

        Needs memory for a second copy of the weights, unless `sleep(2)` has freed the first. Raises WeightsError, and
        changes nothing, if a tensor is missing, unknown, or of a wrong shape or type.
        """
        return cast(int, operate(self.driver, "update_weights", source, in_flight))

    @property
    def weights_version(self) -> int:
        """The version of the weights that the next step runs with."""
        return self.engine.turnover.version

    def pause(self, requests: WhilePaused = "keep") -> None:
        """Run no step until `resume`.

        Unfinished requests wait with their KV ("keep"), end ("abort"), or run to their end before the call returns
        ("wait"); requests that come meanwhile wait for `resume`.
        """
        operate(self.driver, "pause", requests)

    def resume(self) -> None:
        """Run steps again. Raises RequestError while the engine sleeps."""
        operate(self.driver, "resume")

    def sleep(self, level: int = 1) -> None:
        """Pause, and free the KV arena (1), and the weights too (2). Compiled programs stay.

        The prefix cache is emptied. Unfinished requests wait, and compute their KV again after `wake`.
        """
        operate(self.driver, "sleep", level)

    def wake(self) -> None:
        """Allocate the arena and resume. Raises RequestError if the weights were freed and not given again."""
        operate(self.driver, "wake")

    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
        use_tqdm: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        lora: str | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[True],
        use_tqdm: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        lora: str | None = None,
        **sampling: Any,
    ) -> Iterator[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
        use_tqdm: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        lora: str | None = None,
        **sampling: Any,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Generate a continuation of every prompt.

        Args:
            prompts: a string, token ids, or a list of either; vLLM's {"prompt": …}, {"prompt_token_ids": …} too, with
                {"multi_modal_data": {"image": …}} for one or several images of Pillow, files, paths or data: URLs.
            sampling_params: for all prompts, or one per prompt; or give its fields as keywords (`max_new_tokens` is
                another name of `max_tokens`); the checkpoint's generation_config.json gives their defaults.
            stream: return an iterator instead; each item has the new text and tokens of one prompt
                (`outputs[0].text`, `outputs[0].token_ids`), and `finished`. Dropping the iterator aborts its requests.
            use_tqdm: show progress (never while streaming).
            priority: lower runs first, also among other running calls.
            cache_salt: cached prefixes are shared with prompts of the same salt only; {"cache_salt": …} in a prompt
                overrides it.
            lora: name of a loaded LoRA adapter; {"lora": …} in a prompt overrides it, so that one call may use several.

        Returns:
            One `RequestOutput` per prompt, in input order.

        Raises:
            RequestError: a prompt or parameter was refused. With several prompts the others run to their end first, and
                the error has their results (`outputs`) and all errors (`errors`).
            GenerationError: raised for a single prompt; with several it is the `error` of the affected outputs.
        """
        options = CallOptions(RequestOptions(priority, cache_salt, lora), whole=not stream)
        several, defaults = split_prompts(prompts), self.default_sampling
        call = GenerateCall(self.driver, self.tokenizer, several, sampling_params, sampling, defaults, options)
        return call.stream() if stream else call.collect(show=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stream: bool = False,
        use_tqdm: bool = True,
        cache_salt: str = "",
        lora: str | None = None,
        **sampling: Any,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Answer one conversation, or each of a list of them, rendered by the checkpoint's chat template.

        Args:
            messages: objects with `role` and `content`, a text or parts; {"type": "image", "image": …} is an image.
            tools: JSON schemas of the functions that the model may call, in OpenAI's form.
            chat_template: name of one of the checkpoint's templates, or a template to use instead.
            continue_final_message: continue the last message instead of answering it.
            chat_template_kwargs: variables for the template; they may include the arguments above.

        Returns outputs whose texts have the whole answer as a `message`, with its reasoning and tool calls apart, as
        `answer_template` reads them. Otherwise as `generate`. Raises InvalidPrompt if the checkpoint has no template,
        if it refuses the messages, or if there are tools and the form of the model's calls is unknown.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidPrompt("messages", messages, NO_TOKENIZER)
        template = self.chat_template or ChatTemplate({}, tokenizer.special.named)
        variables: dict[str, Any] = {
            "tools": tools,
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        mark = self.engine.images and tokenizer.backend.id_to_token(self.engine.images.tokens.image)
        several = bool(messages) and not isinstance(messages[0], Mapping)
        prompts: list[Prompt] = []
        for conversation in messages if several else [messages]:
            texts, images = without_images(cast(Sequence[Message], conversation))
            guarded = guard(texts, tokenizer, mark)
            text = template.prompt(guarded, **variables)
            # The template has already written all special tokens.
            ids = encode_guarded(text, tokenizer, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids, "multi_modal_data": {"image": images}})
        answers = self._read_by(variables["tools"], variables["chat_template"])
        form = asked_form(sampling_params, sampling)
        answering = Answering(answers, list(variables["tools"] or ()), form=form)
        options = CallOptions(RequestOptions(cache_salt=cache_salt, lora=lora), answering)
        call = GenerateCall(
            self.driver, self.tokenizer, prompts, sampling_params, sampling, self.default_sampling, options
        )
        return call.stream() if stream else call.collect(show=use_tqdm)

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        use_tqdm: bool = True,
        cache_salt: str = "",
        lora: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of every prompt: a hidden state after the final norm, as `outputs.embedding`.

        Args:
            prompts: as `generate` takes them.
            pooling: whose hidden state: that of the "last" token, or the "mean". None: as the checkpoint says.
            dimensions: cut the embedding to so many numbers, if the model was trained for that.
            normalize: make its length 1; None: as the checkpoint says, or True.

        Otherwise as `generate`. Raises RequestError, GenerationError.
        """
        options = CallOptions(RequestOptions(cache_salt=cache_salt, lora=lora), whole=True)
        pooler, asked = Pooler(self.driver, self.tokenizer, self.pooling), (pooling, dimensions, normalize)
        return pooler.embed(prompts, options, *asked, show=use_tqdm)

    def score(
        self, text_1: Prompts, text_2: Prompts, *, use_tqdm: bool = True, cache_salt: str = "", lora: str | None = None
    ) -> list[ScoringRequestOutput]:
        """Return how alike texts are, as `outputs.score`: the cosine of their embeddings.

        One `text_1` is compared with each of `text_2`, several each with its own. Raises RequestError, GenerationError.
        """
        options = CallOptions(RequestOptions(cache_salt=cache_salt, lora=lora), whole=True)
        return Pooler(self.driver, self.tokenizer, self.pooling).score(text_1, text_2, options, show=use_tqdm)

    def _read_by(self, tools: Sequence[object] | None, wanted: str | None) -> AnswerTemplate | None:
        """Return how chats are read. Raises InvalidPrompt if that does not tell how calls of the tools are read."""
        if wanted not in self._answers:
            own = None if self.chat_template is None else self.chat_template.only(wanted)
            found = self._answers[wanted] = self.answer_template(chat_template=own)
            if found is not None and self.engine.grammars is not None:
                self.engine.grammars.delimit(found.delimiters)
        if tools and not ((found := self._answers[wanted]) and found.reads_calls):
            raise InvalidPrompt("tools", len(tools), "the form of the model's tool calls is unknown")
        return self._answers[wanted]

    def answer_template(
        self, wanted: str | None = None, chat_template: ChatTemplate | None = None, *, probe: bool = True
    ) -> AnswerTemplate | None:
        """Return the response template that splits answers into reasoning, content and tool calls; None without one.

        Args:
            wanted: a JSON file, the name of a template that ships with jswa, or "none". Default: the checkpoint's own,
                or the one whose delimiters the chat template writes.
            chat_template: the chat template in use, if it is not the checkpoint's.
            probe: have the chat template write a call, in this process. If it is not read back, a template that was
                chosen by its delimiters reads no calls.

        Raises ConfigError for a `wanted` template that cannot be used, CheckpointError for one of the checkpoint.
        """
        chat_template = chat_template or self.chat_template
        if self.tokenizer is None or (chat_template is None and wanted is None):
            return None
        sources = "" if chat_template is None else "\n".join(chat_template.sources.values())
        found = find_template(self._folder, self.tokenizer, sources, wanted)
        return settled_by(found, chat_template.render) if probe and found and chat_template else found
