"""The back ends: when work runs, in which modes, and what is left when it fails or nobody waits."""

import gc
import threading
import time
import weakref

import pytest
import torch

from transformers_d3d.overlap_d3d import InlineOverlap, StreamOverlap, ThreadOverlap, choose_overlap

CPU = torch.device("cpu")


@pytest.mark.parametrize("back_end", [InlineOverlap, ThreadOverlap])
def test_work_gives_its_result_and_its_times(back_end):
    overlap = back_end()
    before = time.perf_counter()
    done = overlap.submit(lambda: (time.sleep(0.02), 5)[1])()
    overlap.close()
    assert done.result == 5
    assert before <= done.start <= done.end - 0.02 and done.end <= time.perf_counter()


def test_a_thread_runs_beside_the_caller():
    overlap, go = ThreadOverlap(), threading.Event()
    wait = overlap.submit(go.wait)  # would never end if it ran in the caller
    go.set()
    assert wait().result is True
    overlap.close()


def test_an_error_keeps_its_traceback():
    def fails():
        raise KeyError("here")

    overlap = ThreadOverlap()
    wait = overlap.submit(fails)
    with pytest.raises(KeyError) as caught:
        wait()
    assert caught.traceback[-1].name == "fails"
    assert overlap.submit(lambda: 3)().result == 3
    overlap.close()
    with pytest.raises(KeyError):
        InlineOverlap().submit(fails)


def test_the_callers_modes_hold_in_the_thread():
    def modes():
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast

    overlap = ThreadOverlap()
    assert overlap.submit(modes)().result == (False, False, None)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert overlap.submit(modes)().result == (False, True, torch.bfloat16)
    assert overlap.submit(modes)().result == (False, False, None)
    overlap.close()


def test_a_thread_has_its_own_number_of_threads():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        overlap = ThreadOverlap(2)
        assert overlap.submit(torch.get_num_threads)().result == 2
        assert torch.get_num_threads() == 3
        overlap.close()
        later = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [3]
    finally:
        torch.set_num_threads(before)


def test_close_waits_for_what_runs_and_ends_the_thread():
    overlap, ended = ThreadOverlap(), []
    overlap.submit(lambda: (time.sleep(0.05), ended.append(1)))
    overlap.close()
    assert ended == [1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("d3d-drafter")]


def test_a_back_end_that_nobody_closed_ends_with_its_owner():
    overlap = ThreadOverlap()
    overlap.submit(int)()
    (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("d3d-drafter")]
    del overlap
    gc.collect()
    thread.join(timeout=5)
    assert not thread.is_alive()


def test_results_are_let_go():
    class Result:
        pass

    overlap = ThreadOverlap()
    wait = overlap.submit(Result)
    reference = weakref.ref(wait().result)
    del wait
    gc.collect()
    assert reference() is None
    overlap.close()


@pytest.mark.parametrize(
    ("wanted", "drafter", "target", "mode", "reason"),
    [
        ("auto", "cpu", "cpu", "inline", "share the cpu"),
        ("auto", "mps", "mps", "inline", "share the mps"),
        ("auto", "cpu", "cuda:0", "thread", "the drafter is on cpu and the target on cuda:0"),
        ("auto", "cuda:1", "cuda:0", "thread", "cuda:1"),
        ("inline", "cpu", "cuda:0", "inline", "'inline'"),
        ("thread", "cpu", "cpu", "thread", "'thread'"),
    ],
)
def test_auto_overlaps_where_the_two_do_not_compete(wanted, drafter, target, mode, reason):
    overlap, why = choose_overlap(wanted, torch.device(drafter), torch.device(target))
    overlap.close()
    assert overlap.mode == mode and reason in why


@pytest.mark.parametrize(("callers", "given", "expected"), [(4, None, 2), (1, None, 1), (3, 3, 3)])
def test_two_models_on_a_cpu_share_its_threads(callers, given, expected):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(callers)
        overlap, _ = choose_overlap("thread", CPU, CPU, given)
        assert overlap.submit(torch.get_num_threads)().result == expected
        overlap.close()
        overlap, _ = choose_overlap("thread", CPU, torch.device("cuda:0"))
        assert overlap.submit(torch.get_num_threads)().result == callers
        overlap.close()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("target", ["cpu", "cuda:0"])
def test_a_stream_needs_one_cuda_device(target):
    with pytest.raises(ValueError, match="'stream'.*on cpu.*one CUDA device"):
        choose_overlap("stream", CPU, torch.device(target))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a side stream needs a CUDA device")
def test_a_side_stream_keeps_its_tensors_alive():
    """Results must survive allocations of the main stream, and inputs the end of their last reference."""
    device = torch.device("cuda:0")
    overlap = StreamOverlap(device)
    for i in range(200):
        numbers = torch.full((1000, 1000), float(i), device=device)

        def work(numbers=numbers):
            torch.cuda._sleep(1_000_000)
            return numbers + 1

        wait = overlap.submit(work)
        del numbers, work
        for _ in range(5):
            torch.randn(1000, 1000, device=device)
        done = wait()
        assert done.end > done.start
        assert bool((done.result == i + 1).all())
    overlap.close()
