"""Ctrl-C that is not lost."""

from __future__ import annotations

import _thread
import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

RETRY_SECONDS = 0.01


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it Ctrl-C raises KeyboardInterrupt even if it arrives during garbage collection.

    JAX registers a collector callback, and tracing a model collects often. Python prints and drops what is raised
    in such a callback, so an interrupt that lands there is sent again a moment later.
    """
    custom = signal.getsignal(signal.SIGINT) is not signal.default_int_handler  # ignored, say, by nohup
    if custom or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(_: int, frame: FrameType | None) -> None:
    if frame is None or not _in_collector_callback(frame):
        raise KeyboardInterrupt
    timer = threading.Timer(RETRY_SECONDS, _thread.interrupt_main)
    timer.daemon = True
    timer.start()


def _in_collector_callback(frame: FrameType) -> bool:
    codes = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    caller: FrameType | None = frame
    while caller is not None:
        if caller.f_code in codes:
            return True
        caller = caller.f_back
    return False
