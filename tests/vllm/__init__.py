"""Heads written here, loaded in vLLM. Run by `make test-vllm` only: vLLM lives in an environment of its own."""
