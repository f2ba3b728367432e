"""Reading a prompt in chunks, for one model or for two at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from masw.decoder import Decoder
from masw.memory import Memory
from masw.recorder import Recorder

CHUNK = 512  # tokens; wide enough for full GEMM speed, narrow enough to answer a cancel within a second


@dataclass(frozen=True)
class Progress:
    """A model has read `done` of `total` prompt tokens, the last chunk of them from `start` on."""

    who: str
    done: int
    total: int
    start: int = 0


class Reader:
    """Feeds `tokens` to one model chunk by chunk. `step` enqueues one chunk; `ms` is the time its chunks took."""

    def __init__(
        self,
        who: str,
        decoder: Decoder,
        memory: Memory,
        tokens: Sequence[int],
        recorder: Recorder,
        chunk: int = CHUNK,
        observe: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """`observe` is shown the hidden states [n, H] of each chunk, outside its time; on CUDA on this reader's stream."""
        self.who, self.total, self.done = who, len(tokens), memory.length
        self._decoder, self._memory, self._recorder, self._chunk, self._observe = decoder, memory, recorder, chunk, observe
        self._tokens = torch.tensor([list(tokens)], dtype=torch.long, device=decoder.device)
        self._device = decoder.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._marks: list[tuple[int, int, torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def asynchronous(self) -> bool:
        return self._stream is not None

    @property
    def ready(self) -> int:
        """Tokens that can be read now: all of them, unless they wait for something."""
        return self.total

    def step(self) -> Progress:
        """Reads one chunk. On CUDA it only enqueues, on this reader's own stream; `finish` then waits and records."""
        start, stop = self.done, min(self.done + self._chunk, self.ready)
        tokens = self._tokens[:, start:stop]
        if self._stream is None:
            with self._recorder.span() as span:
                hidden = self._read(tokens)
            self._record(start, stop, span.ms)
            self._show(hidden)
        else:
            # What the memory was filled with so far (its empty stamps, a shared prefix) was enqueued on the current stream.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                hidden = self._read(tokens)
                end.record()
                self._show(hidden)
            self._marks.append((start, stop, begin, end))
        self.done = stop
        return Progress(self.who, self.done, self.total, start)

    def finish(self) -> None:
        """Makes later work wait for this stream and writes the events that were only enqueued."""
        if self._stream is None:
            return
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for start, stop, begin, end in self._marks:
            end.synchronize()
            self._record(start, stop, begin.elapsed_time(end))
        self._marks.clear()

    def _read(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self._decoder.forward(tokens, self._memory)
        self._memory.commit()
        return hidden

    def _show(self, hidden: torch.Tensor) -> None:
        if self._observe is not None:
            self._observe(hidden[0])

    def _record(self, start: int, stop: int, ms: float) -> None:
        self._recorder.add("prefill", self.who, start, stop - start, ms=ms, nbytes=self._memory.live_nbytes)


def read_all(readers: Sequence[Reader], stop: Callable[[], bool]) -> Iterator[Progress]:
    """Runs the readers to their end: side by side on CUDA (a stream each), one after the other on the CPU (its cores are shared).
    One that waits for another comes before it, and reads what is there as soon as it is.

    Ends early when `stop()` turns true, which is asked before each chunk.
    """
    width = len(readers) if all(r.asynchronous for r in readers) else 1
    while waiting := [r for r in readers if r.done < r.ready][:width]:
        if stop():
            break
        for reader in waiting:
            yield reader.step()
    for reader in readers:
        reader.finish()
