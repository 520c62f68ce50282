"""What a profile says: how often the host waits in a step, and how long the device has nothing to do."""

from types import SimpleNamespace

from gpu_parts.sdxl_step import ENDS, read_profile
from torch.autograd import DeviceType


def event(name, start, end, device=DeviceType.CPU):
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device)


def kernel(start, end):
    return event("gemm", start, end, DeviceType.CUDA)


def test_waits_and_idle_time_of_the_steps_between_the_first_mark_and_the_last():
    events = [
        event(ENDS, 0, 1),
        event(ENDS, 100, 101),
        event(ENDS, 200, 201),
        event(ENDS, 100, 101, DeviceType.CUDA),  # the mark as the device sees it is not a kernel
        event("cudaStreamSynchronize", -5, 0),  # before the first mark
        event("cudaStreamSynchronize", 90, 95),
        event("cudaMemcpy", 110, 111),
        event("cudaStreamSynchronize", 190, 195),
        event("cudaLaunchKernel", 20, 21),
        kernel(-10, 11),
        kernel(51, 101),
        kernel(61, 71),  # beside the one before it
        kernel(101, 181),
        kernel(191, 300),
    ]
    waits, idle = read_profile(events)
    assert waits == 2
    assert idle == (200 - 10 - 50 - 80 - 10) / 200
