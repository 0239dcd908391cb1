# SPDX-License-Identifier: Apache-2.0
"""Launch an SGLang server on a machine without an accelerator: launch.py [arguments of sglang.launch_server]

SGLang 0.5.23 serves on a CPU and moves KV between two such engines over Mooncake's TCP, but some of its modules take
for granted what only an accelerator has. This file stands in for those things, and changes nothing else:

  * sgl_kernel and triton are packages of kernels for accelerators, triton 1 GB of them. SGLang imports their names. An
    engine on a CPU, with torch's own attention, calls none of them.
  * Disaggregation asks torch for pinned memory, and for CUDA's events and streams, with which it orders copies. On a
    CPU a copy is done when the call returns, so there is nothing to wait for.
  * IPython is for notebooks.

SGLang spawns its processes, so each of them runs this file, too.
"""
import importlib.abc
import importlib.machinery
import os
import sys
import types


class Missing:
    """A name of a package that is not there. A kernel can be declared with it, and cannot be called."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        if not self.__name__.startswith("triton.") or self.__name__.startswith("triton.runtime."):
            raise NotImplementedError(f"{self.__name__} needs an accelerator")
        if len(args) == 1 and isinstance(args[0], types.FunctionType) and not kwargs:
            return Missing(f"sglang.{args[0].__module__}.{args[0].__name__}")  # @triton.jit
        return self  # @triton.jit(…), tl.constexpr(…)

    def __getitem__(self, grid):
        return self  # kernel[grid]


class MissingModule(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():  # a class: torch asks for instances of triton's
            return type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        return Missing(f"{self.__name__}.{name}")


class MissingPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages and all their modules. Where no such file is installed, an import gets these."""

    versions = {"sgl_kernel": "0.4.10", "triton": "3.9.0", "IPython": "9.18.1"}

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in self.versions:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return MissingModule(spec.name)

    def exec_module(self, module):
        if module.__name__ in self.versions:
            module.__version__ = self.versions[module.__name__]
        if module.__name__ == "triton":  # these two are no kernels
            module.cdiv = lambda x, y: (x + y - 1) // y
            module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()


class Event:
    """torch.cuda.Event, of which each is over at once."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def wait(self, *args):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 0.0


class Stream:
    """torch.cuda.Stream, which is never behind."""

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self):
        pass


def unpinned(make):
    def without_pin_memory(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return without_pin_memory


sys.meta_path.insert(0, MissingPackages())
import torch  # noqa: E402

for made in ("empty", "zeros", "ones", "tensor", "full", "arange"):
    setattr(torch, made, unpinned(getattr(torch, made)))
torch.cuda.Event = Event
torch.cuda.current_stream = lambda *args: Stream()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
