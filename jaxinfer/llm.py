"""The Python API: generate, chat, stream, embed."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh
from tqdm import tqdm

import convert
from jaxinfer import compilation, memory, startup, weights
from jaxinfer.adapters import Adapters, check_named, load_adapters
from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, Quantization, at_least_one
from jaxinfer.embed import TextEmbedder
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.output import OutputBuilder, request_output
from jaxinfer.engine.request import Request
from jaxinfer.outputs import EmbeddingOutput, RequestOutput, TextDelta
from jaxinfer.prompts import (
    Loras,
    Messages,
    Prompt,
    check_switches,
    listed,
    one_name_each,
    one_params_each,
    text_or_ids,
)
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenizer import Tokenizer
from meshes import AXES


class LLM:
    """A model, ready to generate, or, an encoder, to embed. Names and defaults follow vLLM where it has one.

    model: a local checkpoint (Hugging Face folder, GGUF file, native folder), a Hub id, or a ModelConfig for random
        weights.
    task: "embed" for an LLM that keeps no cache and only embeds; "generate" for one that can do both; None: whichever
        the model is made for, the first of an encoder.
    dtype: of weights, activations and, by default, cache: float32, bfloat16, float16, or auto: float32 on CPU, else
        bfloat16.
    quantization: store the projections in int8, fp8 or int4, made while loading; None: as the checkpoint stores them.
    quantize_activations: round what goes into projections in int8 or fp8 to their format, too, a scale per token; not
        into experts or the head. Faster with many tokens, and less exact (docs/quantization.md).
    tensor_parallel_size: devices that share each layer. mesh: in its place, one with axes data, pipe, expert, tensor.
    max_model_len: longest sequence, prompt and output; the model's own limit by default, and for `embed` that of the
        files of sentence-transformers beside it.
    max_num_seqs, max_num_batched_tokens: sequences that run at once, and tokens that one step takes.
    page_size, num_pages: of the KV cache, in tokens and per cache group; num_pages None fills the memory that is left.
    kv_cache_dtype: how keys and values are stored: auto: in `dtype`; int8 or fp8: with a scale per token and head.
    memory_fraction: share of a GPU's memory that weights, cache and temporaries may take; it counts if JAX has not
        started yet. On CPU the cache takes at most a quarter of the memory that is free.
    skip_tokenizer_init: token ids in, token ids out.
    seed: for random weights, and for requests without a seed of their own.
    warm_up: compile every batch shape now, so that nothing compiles later; otherwise each at its first use.
    progress: show progress bars.
    lora: name → folder or Hub id, of adapters that are kept beside the weights; a request has one of them, or none.
    max_loras, max_lora_rank: places for them, and the largest rank; by default as many and as large as `lora` needs.

    Raises FileNotFoundError for a model that is not there, and ValueError for settings that do not fit it.
    """

    def __init__(
        self,
        model: str | ModelConfig,
        *,
        task: str | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        quantize_activations: bool = False,
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        page_size: int = 64,
        num_pages: int | None = None,
        kv_cache_dtype: str = "auto",
        memory_fraction: float = 0.9,
        skip_tokenizer_init: bool = False,
        seed: int = 0,
        warm_up: bool = True,
        progress: bool = True,
        steps_in_flight: int = 2,
        mesh: Mesh | None = None,
        lora: Mapping[str, str] | None = None,
        max_loras: int | None = None,
        max_lora_rank: int | None = None,
    ):
        check_named({} if lora is None else lora)
        for name, value in (("max_loras", max_loras), ("max_lora_rank", max_lora_rank)):
            if value is not None:
                at_least_one(name, value)
        check_switches(skip_tokenizer_init=skip_tokenizer_init, warm_up=warm_up, progress=progress)
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ValueError(f"seed is {seed!r}; it must be an integer")
        cache = CacheConfig(page_size, num_pages, memory_fraction, dtype=kv_cache_dtype)  # type: ignore[arg-type]
        memory.reserve(memory_fraction)
        compilation.enable_cache()
        wanted = None if quantization is None else Quantization(quantization)  # type: ignore[arg-type]
        source = model if isinstance(model, ModelConfig) else convert.open_checkpoint(convert.resolve(model))
        self.config: ModelConfig = source if isinstance(source, ModelConfig) else source.config
        generates = _generates(task, self.config)
        if not generates and (kv_cache_dtype, num_pages) != ("auto", None):
            raise ValueError("to embed takes no cache: leave out kv_cache_dtype and num_pages")
        if not generates and (lora or max_loras is not None):
            raise ValueError("to embed takes no adapters beside the weights: merge one, its folder as the model")
        self.mesh = startup.mesh_of(tensor_parallel_size, mesh)
        self.engine_config = EngineConfig(
            max_model_len=_model_len(max_model_len, self.config),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            steps_in_flight=steps_in_flight,
            cache=cache,
            parallel=ParallelConfig(**{axis: self.mesh.shape[axis] for axis in AXES}),
        )
        self.tokenizer: Tokenizer | None = None
        if not (skip_tokenizer_init or isinstance(source, ModelConfig)):
            self.tokenizer = Tokenizer.load(source.path)
        loaded = startup.load_model(source, self.mesh, dtype, wanted, seed, progress, quantize_activations)
        config = loaded.config.for_length(self.engine_config.max_model_len)
        loaded = dataclasses.replace(loaded, config=config)
        self.weight_bytes = weights.size_in_bytes(loaded.weights)
        self._adapters = load_adapters(source, loaded, self.mesh, lora or {}, max_loras, max_lora_rank)
        self.dtype = loaded.dtype
        self.quantization = loaded.quantization
        self._progress = progress
        self._embed = TextEmbedder(
            loaded,
            self.mesh,
            self.engine_config,
            None if isinstance(source, ModelConfig) else source.path,
            self.get_tokenizer,
            any_length=max_model_len is not None,
            warm_up=warm_up,
            progress=progress,
        )
        self._engine: Engine | None = None
        if generates:
            self._engine = startup.build_engine(
                loaded, self.mesh, self.engine_config, self.tokenizer, warm_up, progress
            )
        else:
            self._embed.start()
        self._seeds = random.Random(seed)
        self._numbers = itertools.count()

    @property
    def engine(self) -> Engine:
        """What generates. Raises ValueError if this LLM only embeds."""
        if self._engine is None:
            raise _no_generation(self.config)
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        lora: Loras = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; one RequestOutput each, in order.

        sampling_params: for all, or one per prompt. use_tqdm: show progress; None: as the LLM was told. lora: the name
        of a loaded adapter for all, or one, or None, per prompt. Threads may call it at the same time: their requests
        share the batch, whatever adapters they have.
        Raises ValueError, before any compute, for a prompt or parameters that cannot be served.
        """
        entries: list[Any] = [prompts] if isinstance(prompts, (str, dict)) else listed(prompts, "prompts")
        return self._run([self._encode(entry) for entry in entries], sampling_params, use_tqdm, lora)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        lora: Loras = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template. Arguments as in `generate`."""
        chats = listed(messages, "messages")
        conversations = [chats] if not chats or isinstance(chats[0], dict) else chats
        prompts = [(None, self._encode_chat(c, **template_kwargs)) for c in conversations]
        return self._run(prompts, sampling_params, use_tqdm, lora)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, lora: str | None = None
    ) -> Iterator[TextDelta]:
        """Complete one prompt piece by piece. A stream that is closed or dropped frees what it held."""
        return self._stream(self._encode(prompt)[1], sampling_params, lora)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        lora: str | None = None,
        **template_kwargs: Any,
    ) -> Iterator[TextDelta]:
        """Answer one conversation piece by piece."""
        return self._stream(self._encode_chat(messages, **template_kwargs), sampling_params, lora)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        use_tqdm: bool | None = None,
    ) -> list[EmbeddingOutput]:
        """The vector of every text; one EmbeddingOutput each, in order.

        pooling: of the last hidden states: "cls", the first token's, "mean", or "last"; None: as the model's files of
            sentence-transformers say, else the mean of an encoder's and the last of a decoder's.
        normalize: scale vectors to Euclidean length 1; None: as those files say, else yes.
        truncate: cut what is longer than max_model_len or max_num_batched_tokens; otherwise it is an error.
        use_tqdm: show progress; None: as the LLM was told. Threads may call it at the same time.
        Raises ValueError, before any compute, for a text that cannot be embedded, or a pooling that does not exist.
        """
        entries: list[Any] = [prompts] if isinstance(prompts, (str, dict)) else listed(prompts, "prompts")
        check_switches(truncate=truncate, **({} if normalize is None else {"normalize": normalize}))
        show = self._progress if use_tqdm is None else use_tqdm
        return self._embed([text_or_ids(entry) for entry in entries], pooling, normalize, truncate, show)

    def load_lora(self, name: str, model: str) -> None:
        """Put an adapter, a folder or a Hub id, into a free place, while requests may run; nothing is compiled.

        Raises ValueError if no place is free (`max_loras`), and for an adapter that does not fit.
        """
        check_named({name: model})
        self._places().load(name, convert.resolve(model))

    def unload_lora(self, name: str) -> None:
        """Free an adapter's place. Raises ValueError if unfinished requests have it."""
        adapters = self._places()
        with adapters.lock:
            if adapters.place(name) in self.engine.places_in_use():
                raise ValueError(
                    f"requests with the adapter {name!r} are unfinished; wait for them, or close their streams"
                )
            adapters.unload(name)

    def _places(self) -> Adapters:
        if self._adapters is None:
            raise ValueError("this LLM has no places for adapters; make it with max_loras, or with lora={name: folder}")
        return self._adapters

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ValueError if there is none: `skip_tokenizer_init`, or random weights."""
        if self.tokenizer is None:
            raise ValueError(
                'this LLM has no tokenizer (skip_tokenizer_init, or random weights); pass {"prompt_token_ids": […]}'
            )
        return self.tokenizer

    def _run(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | None,
        lora: Loras,
    ) -> list[RequestOutput]:
        if isinstance(lora, str):
            self._places().place(lora)  # an unknown name is refused though there be no prompt
        each, names = one_params_each(params, len(prompts)), one_name_each(lora, len(prompts))
        groups = [self._requests(ids, p, name) for (_, ids), p, name in zip(prompts, each, names, strict=True)]
        requests = [request for group in groups for request in group]
        show = self._progress if use_tqdm is None else use_tqdm
        try:
            outputs = {request: self._add(request) for request in requests}
            with tqdm(total=len(requests), desc="Generating", unit="seq", disable=not show) as bar:
                unfinished = requests
                while unfinished:
                    self.engine.step()
                    left = [request for request in unfinished if not request.finished]
                    for request in unfinished:
                        outputs[request].check()
                    bar.update(len(unfinished) - len(left))
                    unfinished = left
        finally:
            self.engine.abort(requests)
        return [
            request_output(text, [outputs[request] for request in group])
            for (text, _), group in zip(prompts, groups, strict=True)
        ]

    def _stream(self, ids: list[int], params: SamplingParams | None, lora: str | None) -> Iterator[TextDelta]:
        """Checks now, generates when iterated."""
        [checked] = one_params_each(params, 1)
        return self._deltas(self._requests(ids, checked, lora))

    def _deltas(self, requests: list[Request]) -> Iterator[TextDelta]:
        try:
            outputs = [self._add(request) for request in requests]
            while outputs:
                self.engine.step()
                for output in list(outputs):
                    delta = self.engine.take_delta(output)
                    if delta.finish_reason:  # told, not just finished: other callers step the engine too
                        outputs.remove(output)
                    if delta.token_ids or delta.text or delta.finish_reason:
                        yield delta
        finally:
            self.engine.abort(requests)

    def _add(self, request: Request) -> OutputBuilder:
        """Queue a request, in the place that its adapter has now. Raises ValueError if that was unloaded meanwhile."""
        if request.lora is None:
            return self.engine.add(request)
        adapters = self._places()
        with adapters.lock:
            request.place = adapters.place(request.lora)
            return self.engine.add(request)

    def _requests(self, ids: list[int], params: SamplingParams, lora: str | None) -> list[Request]:
        """The `n` requests of one prompt, checked; the first one alone scores the prompt."""
        if lora is not None:
            self._places().place(lora)
        number = next(self._numbers)
        limit = self.engine_config.max_model_len
        most = limit if params.max_tokens is None else min(len(ids) + params.max_tokens, limit)
        seed = self._seeds.getrandbits(32) if params.seed is None else params.seed
        requests = [
            Request(
                request_id=str(number),
                prompt_token_ids=ids,
                params=params if index == 0 else dataclasses.replace(params, prompt_logprobs=None),
                max_total_tokens=most,
                seed=seed,
                index=index,
                end_token_ids=frozenset() if params.ignore_eos else frozenset(self.config.eos_token_ids),
                lora=lora,
            )
            for index in range(params.n)
        ]
        self.engine.check(requests[0])
        return requests

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text, if it came as text, and its token ids."""
        found = text_or_ids(prompt)
        return (found, self.get_tokenizer().encode(found)) if isinstance(found, str) else (None, found)

    def _encode_chat(self, messages: Messages, **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation. Raises ValueError if this LLM only embeds: then it need not have a template."""
        if self._engine is None:
            raise _no_generation(self.config)
        return self.get_tokenizer().encode_chat(messages, **template_kwargs)


def _generates(task: str | None, config: ModelConfig) -> bool:
    if task not in (None, "embed", "generate"):
        raise ValueError(f"task is {task!r}; it must be 'embed', 'generate', or None for what the model is made for")
    if task == "generate" and config.headless:
        raise _no_generation(config)
    return task != "embed" and not config.headless


def _no_generation(config: ModelConfig) -> ValueError:
    if config.bidirectional:
        return ValueError(f"{config.family} is an encoder: it embeds text and generates none; use LLM.embed")
    if config.headless:
        return ValueError("the checkpoint has no head: it embeds text and generates none; use LLM.embed")
    return ValueError("this LLM was made with task='embed', and only embeds; make another without it to generate")


def _model_len(max_model_len: int | None, config: ModelConfig) -> int:
    if max_model_len is not None and at_least_one("max_model_len", max_model_len) > config.max_position:
        raise ValueError(
            f"max_model_len is {max_model_len}, and the model was made for {config.max_position} tokens at most"
        )
    return config.max_position if max_model_len is None else max_model_len
