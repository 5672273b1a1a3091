"""A plugin for SGLang that lets its `torch_native` attention verify a tree of drafts: see the README beside it."""

from __future__ import annotations

from typing import Any

import torch


def activate() -> None:
    """Entry point of `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend",
        _forward_extend,
        HookType.AROUND,
    )


def _forward_extend(
    original: Any, self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True
) -> Any:
    if not batch.forward_mode.is_target_verify():
        return original(self, q, k, v, layer, batch, save_kv_cache)
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    width = batch.spec_info.draft_token_num
    if save_kv_cache:
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
    keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
    values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
    out = torch.empty_like(q)
    queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    results = out.view(-1, layer.tp_q_head_num, layer.v_head_dim)
    requests = batch.req_pool_indices.numel()
    trees = batch.spec_info.custom_mask[: requests * width * width].view(requests, width, width).bool()
    for row in range(requests):
        length = int(batch.seq_lens[row])
        slots = self.req_to_token_pool.req_to_token[int(batch.req_pool_indices[row]), : length + width].long()
        # A draft sees the whole context, and of the drafts itself and those above it.
        mask = torch.cat([torch.ones(width, length, dtype=torch.bool), trees[row]], 1)
        rows = slice(row * width, (row + 1) * width)
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries[rows].movedim(0, 1).unsqueeze(0),
            keys[slots].movedim(0, 1).unsqueeze(0),
            values[slots].movedim(0, 1).unsqueeze(0),
            attn_mask=mask,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        results[rows] = attended[0].movedim(0, 1)
    return out
