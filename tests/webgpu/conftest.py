"""What the tests of WebGPU share."""

from __future__ import annotations

import pytest


@pytest.fixture
def submits(monkeypatch):
    """The labels of what was dispatched, submit by submit."""
    from numfuse.backends.webgpu.device.device import Device

    found = []
    run = Device.submit

    def submit(self, dispatches, copies=()):
        found.append([how.label.partition(" ")[0] for how, _, _ in dispatches])
        run(self, dispatches, copies)

    monkeypatch.setattr(Device, "submit", submit)
    return found
