"""Where the drafter's passes run: beside the target's, or in turn with them. One small interface for each back end.

Knows work and devices; knows nothing about models or tokens. A back end takes one piece of work at a time: `submit`
starts it and returns a function that waits for it, and `close` leaves nothing behind.
"""

import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch


class Done(NamedTuple):
    """What a piece of work gave, and when it ran (`time.perf_counter`, seconds)."""

    result: Any
    start: float
    end: float


class InlineOverlap:
    """No overlap: work runs when it is submitted."""

    mode = "inline"

    def submit(self, work: Callable[[], Any]) -> Callable[[], Done]:
        """Runs `work`; what it raises is raised here."""
        done = _timed(work)
        return lambda: done

    def close(self) -> None:
        """Nothing to end."""


class ThreadOverlap:
    """Work runs in a thread of its own: for a drafter on another device, or on cores of its own.

    Args:
        num_threads (`int`, *optional*): Intra-op threads of the drafter's passes. As many as the caller's by default.
    """

    mode = "thread"

    def __init__(self, num_threads: int | None = None):
        # Not a `ThreadPoolExecutor`: that one refuses work once the main thread has ended, while a generation in another
        # thread goes on. This thread is a daemon where the caller is one, and knows only the queue, not its owner.
        work = queue.SimpleQueue()
        self.thread = threading.Thread(target=_work_off, args=(work,), name="d3d-drafter")
        self.work, self.end = work, weakref.finalize(self, work.put, None)
        self.thread.start()
        callers = torch.get_num_threads()
        if num_threads is not None and num_threads != callers:
            self._submit(functools.partial(_set_threads, num_threads)).result()
            # PyTorch also takes the newest number for threads that start later.
            torch.set_num_threads(callers)

    def submit(self, work: Callable[[], Any]) -> Callable[[], Done]:
        """Starts `work`; what it raises is raised by the wait, with its own traceback."""
        return self._submit(functools.partial(_timed, functools.partial(_with_modes, _modes(), work))).result

    def close(self) -> None:
        """Waits for work that runs, and ends the thread."""
        self.end()
        self.thread.join()

    def _submit(self, work: Callable[[], Any]) -> Future:
        future = Future()
        self.work.put((work, future))
        return future


class StreamOverlap:
    """Work runs on a side stream of the CUDA device that the target runs on.

    All passes of a drafter run there, so that its cache belongs to that stream alone.
    """

    mode = "stream"

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = _side_stream(device)
        self.base = torch.cuda.Event(enable_timing=True)
        self.base.record(torch.cuda.current_stream(device))
        self.base.synchronize()
        self.base_time = time.perf_counter()

    def submit(self, work: Callable[[], Any]) -> Callable[[], Done]:
        """Launches `work` behind what the current stream has been given so far."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            start.record(self.stream)
            result = work()
            end.record(self.stream)

        def wait(inputs=work) -> Done:  # `inputs` keeps the tensors that the work reads until it has run
            end.synchronize()
            for tensor in [result, *getattr(result, "__dict__", {}).values()]:
                if isinstance(tensor, torch.Tensor):
                    # Made on the side stream and read on this one: the allocator must not give it away before.
                    tensor.record_stream(torch.cuda.current_stream(self.device))
            times = [self.base_time + self.base.elapsed_time(event) / 1000 for event in (start, end)]
            return Done(result, *times)

        return wait

    def close(self) -> None:
        """Waits for work that runs."""
        self.stream.synchronize()


def choose_overlap(
    wanted: str, drafter_device: torch.device, target_device: torch.device, num_threads: int | None = None
) -> tuple[InlineOverlap | ThreadOverlap | StreamOverlap, str]:
    """The back end for a drafter and a target on these devices.

    `"auto"` overlaps where the two don't compete: on different devices with a thread, on one CUDA device with a side
    stream. On one CPU both would share the cores, and the packed pass costs more there than it hides.

    Args:
        wanted (`str`): `"auto"`, `"inline"`, `"thread"` or `"stream"`.
        drafter_device, target_device (`torch.device`): Where they run.
        num_threads (`int`, *optional*):
            Intra-op threads of the drafter's passes in `"thread"`. By default half of the caller's when both run on the
            CPU, at least one.

    Returns:
        `tuple`: The back end, and in words why it was chosen.

    Raises:
        `ValueError`: If the back end cannot serve these devices.
    """
    same = drafter_device == target_device
    if wanted == "auto":
        if not same:
            wanted, reason = "thread", f"the drafter is on {drafter_device} and the target on {target_device}"
        elif drafter_device.type == "cuda":
            wanted, reason = "stream", f"drafter and target share {drafter_device}"
        else:
            wanted = "inline"
            reason = f"drafter and target share the {drafter_device.type}, where overlap costs more than it hides"
    else:
        reason = f"`overlap` is {wanted!r}"
    if wanted == "stream":
        if not same or drafter_device.type != "cuda":
            raise ValueError(
                f"`overlap` is 'stream', but the drafter is on {drafter_device} and the target on {target_device}; a side "
                "stream needs both on one CUDA device. Use 'auto', 'thread' or 'inline'."
            )
        return StreamOverlap(drafter_device), reason
    if wanted == "thread":
        if num_threads is None and drafter_device.type == target_device.type == "cpu":
            num_threads = max(torch.get_num_threads() // 2, 1)
        return ThreadOverlap(num_threads), reason
    return InlineOverlap(), reason


@functools.cache
def _side_stream(device: torch.device):
    # One for all generations: the allocator keeps memory for each stream.
    return torch.cuda.Stream(device)


def _set_threads(num_threads: int) -> None:
    torch.get_num_threads()  # a thread's first question sets its number to the newest, so ask before setting it
    torch.set_num_threads(num_threads)


def _work_off(work: queue.SimpleQueue) -> None:
    while (item := work.get()) is not None:
        function, future = item
        try:
            future.set_result(function())
        except BaseException as error:  # for the one who waits, whatever it is
            future.set_exception(error)
        del item, function, future  # what they hold must not outlive the generation's next pass


def _timed(work: Callable[[], Any]) -> Done:
    start = time.perf_counter()
    result = work()
    return Done(result, start, time.perf_counter())


def _modes() -> list[Callable]:
    """What of the caller's modes a new thread would not have: gradients off, inference mode, autocast."""
    modes = [functools.partial(torch.inference_mode, torch.is_inference_mode_enabled()), torch.no_grad]
    for device_type in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            modes.append(functools.partial(torch.autocast, device_type, dtype=dtype))
    return modes


def _with_modes(modes: list[Callable], work: Callable[[], Any]) -> Any:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        return work()
