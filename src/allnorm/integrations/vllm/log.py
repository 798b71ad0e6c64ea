"""The log of the plugin for vLLM."""

# A child of vLLM's logger, so that its users see the messages.
LOGGER = "vllm.allnorm"
