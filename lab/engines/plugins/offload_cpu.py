# SPDX-License-Identifier: Apache-2.0
"""OffloadingConnector with its tiers on a machine without an accelerator.

vLLM 0.32.0 copies blocks between an accelerator's KV cache and host memory with the accelerator's streams, events and copy
kernel (vllm/v1/kv_offload/cpu/gpu_worker.py), and asks the platform whether it has them (cpu/spec.py). Here the KV cache is host
memory, too, and a copy is over when its call returns. The scheduler, the tiers, their sessions and NIXL stay vLLM's. Named by
kv_connector_module_path, with this folder in PYTHONPATH.
"""
import contextlib
import ctypes
import inspect

import torch
import vllm.v1.kv_offload.cpu.gpu_worker as worker
import vllm.v1.kv_offload.cpu.spec as spec
import vllm.v1.kv_offload.tiering.spec as tiering
from vllm.platforms import current_platform


class Done:
    """A stream or an event on which everything has happened already."""

    def __init__(self, *_, **__):
        pass

    def record(self, stream):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, end):
        return 0.001  # milliseconds; vLLM divides by it


class Instead:
    """A module or object some of whose names are replaced."""

    def __init__(self, of, **names):
        self.of = of
        self.__dict__.update(names)

    def __getattr__(self, name):
        return getattr(self.of, name)


def copy(sources, targets, sizes, **_):
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist()):
        ctypes.memmove(target, source, size)


platform = Instead(
    current_platform,
    Stream=Done,
    current_stream=Done,
    stream=lambda stream: contextlib.nullcontext(),
    is_cuda_alike=lambda: True,
    is_rocm=lambda: False,
    is_xpu=lambda: False,
)
# Once more without its assertions, of which one says that the KV cache lies on an accelerator.
exec(compile(inspect.getsource(worker), worker.__file__, "exec", optimize=1), worker.__dict__)
worker.torch = Instead(torch, Event=Done)
worker.current_platform = spec.current_platform = platform
worker._select_swap_blocks_fn = lambda *_, **__: copy
spec.CPUOffloadingWorker = tiering.CPUOffloadingWorker = worker.CPUOffloadingWorker

from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector  # noqa: E402

OffloadingConnector = offloading_connector.OffloadingConnector
