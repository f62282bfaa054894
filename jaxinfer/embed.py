"""What `LLM.embed` does around the model: prompts to token ids, and the pooling that the model was made for."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from jax.sharding import Mesh

from convert.sentence import Pooling, TextConfig, pooling_config, text_config
from jaxinfer.config import EngineConfig
from jaxinfer.engine.embedder import POOLINGS, Embedder
from jaxinfer.outputs import EmbeddingOutput
from jaxinfer.startup import LoadedModel
from jaxinfer.tokenizer import Tokenizer


class TextEmbedder:
    """Made with every LLM, and idle until the first text, since most decoders are never asked for vectors."""

    def __init__(
        self,
        model: LoadedModel,
        mesh: Mesh,
        engine: EngineConfig,
        path: Path | None,
        tokenizer: Callable[[], Tokenizer],
        *,
        any_length: bool,
        warm_up: bool,
        progress: bool,
    ):
        """path: of the checkpoint, whose files of sentence-transformers are read; None: random weights. tokenizer:
        raises ValueError if there is none. any_length: texts may be as long as engine.max_model_len, whatever these
        files say.
        """
        self._model, self._mesh, self._engine = model, mesh, engine
        self._path, self._tokenizer = path, tokenizer
        self._any_length, self._warm_up, self._progress = any_length, warm_up, progress
        self._started: tuple[Embedder, TextConfig] | None = None
        self._starting = threading.Lock()

    def start(self) -> tuple[Embedder, TextConfig]:
        """What runs, compiled if `warm_up`, and what is done with texts."""
        with self._starting:
            if self._started is None:
                text = TextConfig() if self._path is None else text_config(self._path)
                engine = self._engine
                if text.max_length is not None and not self._any_length:
                    engine = dataclasses.replace(engine, max_model_len=min(engine.max_model_len, text.max_length))
                embedder = Embedder(self._model.config, self._model.weights, self._mesh, engine)
                if self._warm_up:
                    embedder.compile(embedder.shapes, self._progress)
                self._started = embedder, text
            return self._started

    def __call__(
        self,
        prompts: Sequence[str | list[int]],
        pooling: str | None,
        normalize: bool | None,
        truncate: bool,
        progress: bool,
    ) -> list[EmbeddingOutput]:
        """As `LLM.embed`; prompts: texts or token ids."""
        chosen, scaled = self._resolve(pooling, normalize)
        embedder, text = self.start()
        longest = embedder.max_length if truncate else None
        each = [
            self._encode(prompt, text, longest) if isinstance(prompt, str) else prompt[:longest] for prompt in prompts
        ]
        for number, ids in enumerate(each):
            embedder.check(ids, f"text {number}")
        vectors = embedder.run(each, chosen, scaled, progress)
        return [
            EmbeddingOutput(prompt if isinstance(prompt, str) else None, ids, vector)
            for prompt, ids, vector in zip(prompts, each, vectors, strict=True)
        ]

    def _resolve(self, pooling: str | None, normalize: bool | None) -> tuple[Pooling, bool]:
        """What is asked for, or else what the files say, or else the mean of an encoder, the last of a decoder."""
        if pooling not in (None, *POOLINGS):
            raise ValueError(
                f"pooling is {pooling!r}; it must be one of {', '.join(POOLINGS)}, or None for the model's"
            )
        own: tuple[Pooling, bool] = ("mean" if self._model.config.bidirectional else "last", True)
        if self._path is not None and (pooling is None or normalize is None):
            own = pooling_config(self._path) or own
        chosen: Pooling = own[0] if pooling is None else pooling
        return chosen, own[1] if normalize is None else normalize

    def _encode(self, prompt: str, text: TextConfig, longest: int | None) -> list[int]:
        """longest: cut after so many tokens; None: never."""
        tokenizer, prompt = self._tokenizer(), text.applied(prompt)
        return tokenizer.encode(prompt) if longest is None else tokenizer.encode_start(prompt, longest)
