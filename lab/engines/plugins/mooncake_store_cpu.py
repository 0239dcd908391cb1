# SPDX-License-Identifier: Apache-2.0
"""MooncakeStoreConnector on a machine without an accelerator.

vLLM 0.32.0's connector records a CUDA event after each forward pass and waits for it before it stores the KV. On a CPU a
forward pass is over when its call returns, so that there is nothing to wait for. Named by kv_connector_module_path, with this
folder in PYTHONPATH.
"""
import torch


class Event:
    def record(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


torch.cuda.Event = Event

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector  # noqa: E402

MooncakeStoreConnector = connector.MooncakeStoreConnector
