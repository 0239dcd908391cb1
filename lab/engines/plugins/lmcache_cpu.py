# SPDX-License-Identifier: Apache-2.0
"""LMCacheConnectorV1 on a machine without an accelerator.

LMCache 0.5.6 has no copier between the KV cache of vLLM's CPU backend and its own chunks. One is added here; adapter, storage,
the PD backend, NIXL and the notices are LMCache's. Named by kv_connector_module_path, with this folder in PYTHONPATH.

A chunk has for K and for V, for each layer and token, the heads side by side (LMCache's KV_2LTD). A layer's cache is
[blocks, heads, block size, 2 * head size] to the world, but vLLM 0.32.0's attention for CPUs (v1/attention/backends/cpu_attn.py
and its kernel) uses the memory of each block and head otherwise: first K as [head size, block size], then V as [block size, head
size]. So a token's K is a column. Whole blocks could be copied in any order that is undone in the same way; a part of a block
cannot.
"""
import torch
from lmcache.v1 import gpu_connector
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface


class CPUConnector(GPUConnectorInterface):
    def __init__(self, metadata):
        self.layers, _, _, self.heads, self.size = metadata.kv_shape
        self.caches = None

    def initialize_kvcaches_ptr(self, **kwargs):
        self.caches = kwargs.get("kvcaches") or self.caches

    def get_shape(self, num_tokens):
        return torch.Size([2, self.layers, num_tokens, self.heads * self.size])

    def places(self, start, end, slot_mapping, **kwargs):
        """Yields for each layer K and V, both indexed by [block, :, :, token in the block], and these indices."""
        self.initialize_kvcaches_ptr(**kwargs)
        slots = slot_mapping[start:end].long()
        for layer, cache in enumerate(self.caches):
            blocks, heads, block, _ = cache.shape
            halves = cache.view(blocks, heads, 2, self.size * block)
            k = halves[:, :, 0].view(blocks, heads, self.size, block)
            v = halves[:, :, 1].view(blocks, heads, block, self.size).transpose(2, 3)
            yield layer, (k, v), (slots // block, slots % block)

    def from_gpu(self, memory_obj, start, end, **kwargs):
        for layer, both, (block, token) in self.places(start, end, **kwargs):
            for i, cache in enumerate(both):
                memory_obj.tensor[i, layer] = cache[block, :, :, token].reshape(end - start, -1)

    def to_gpu(self, memory_obj, start, end, **kwargs):
        for layer, both, (block, token) in self.places(start, end, **kwargs):
            for i, cache in enumerate(both):
                cache[block, :, :, token] = memory_obj.tensor[i, layer].reshape(end - start, self.heads, self.size)

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        for memory_obj, start, end in zip(memory_objs, starts, ends):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs, starts, ends, **kwargs):
        for memory_obj, start, end in zip(memory_objs, starts, ends):
            self.to_gpu(memory_obj, start, end, **kwargs)


def create(config, metadata, *_, **__):
    return CPUConnector(metadata)


gpu_connector.CreateGPUConnector = create

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1  # noqa: E402, F401
