"""Tensor-parallel plans for models that have none in transformers."""

from __future__ import annotations

# transformers gives GPT-OSS a plan for its experts only (expert parallelism). This one shards the
# attention; the experts stay whole on every rank, unless `ep_size` shards them too.
GPT_OSS_TP_PLAN = {
    "model.layers.*.self_attn": "local_params",
    "model.layers.*.self_attn.sinks": "colwise",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}
