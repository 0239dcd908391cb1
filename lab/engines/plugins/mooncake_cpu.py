# SPDX-License-Identifier: Apache-2.0
"""MooncakeConnector on a machine without an accelerator, over TCP.

vLLM 0.32.0's connector asks torch for the index of the current accelerator, which raises where there is none; the result is
used for nothing else on a CPU. Named by kv_connector_module_path, with this folder in PYTHONPATH.
"""
import torch

torch.accelerator.current_device_index = lambda: 0

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector  # noqa: E402

MooncakeConnector = mooncake_connector.MooncakeConnector
