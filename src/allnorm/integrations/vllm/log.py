"""The log of the plugin for vLLM."""

# Below vLLM's own logger, so that its users see what is said.
LOGGER = "vllm.allnorm"
