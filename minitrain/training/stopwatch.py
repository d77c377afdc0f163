"""Measure time where a device computes: an event in its queue, so that the host need not wait."""

import time

import torch


class Moment:
    """The moment at which a device has done what it was given before; on the CPU, now."""

    def __init__(self, device: torch.device):
        self.event = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))
        else:
            self.time = time.perf_counter()

    def wait(self) -> None:
        """Return when the moment has come."""
        if self.event is not None:
            self.event.synchronize()

    def since(self, earlier: "Moment") -> float:
        """Return the seconds from an earlier moment of the same device to this; wait for it."""
        self.wait()
        if self.event is not None:
            return earlier.event.elapsed_time(self.event) / 1000
        return self.time - earlier.time
