#!/bin/bash
# Two engines as the vLLM KV connector guide starts them.

MODEL_NAME="meta-llama/Meta-Llama-3.1-8B-Instruct"

# Launch prefill server
CUDA_VISIBLE_DEVICES=0 vllm serve $MODEL_NAME \
    --port 8100 \
    --max-model-len 100 \
    --gpu-memory-utilization 0.8 \
    --trust-remote-code \
    --kv-transfer-config \
    '{"kv_connector":"PyNcclConnector","kv_role":"kv_producer","kv_rank":0,"kv_parallel_size":2}' &

# Launch decode server
CUDA_VISIBLE_DEVICES=1 vllm serve $MODEL_NAME \
    --port 8200 \
    --max-model-len 100 \
    --gpu-memory-utilization 0.8 \
    --trust-remote-code \
    --kv-transfer-config \
    '{"kv_connector":"PyNcclConnector","kv_role":"kv_consumer","kv_rank":1,"kv_parallel_size":2}' &

wait_for_server() {
  timeout 1200 bash -c "
    until curl -s localhost:$1/v1/completions > /dev/null; do
      sleep 1
    done"
}

wait_for_server 8100
wait_for_server 8200

echo "Both servers are ready!"
