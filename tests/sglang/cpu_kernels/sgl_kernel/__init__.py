"""A stand-in for the CPU build of `sgl-kernel`, in plain torch: see the README beside this folder.

Arguments and effects are those of SGLang's kernels of the same names; results go into the tensors that are handed in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any


def assign_req_to_token_pool_cpu(requests: Any, pool: Any, starts: Any, ends: Any, slots: Any, _width: int) -> None:
    """Write each request's new cache slots, which lie one after the other, into its row of the pool."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        pool[request, start:end] = slots[taken : taken + end - start].to(pool.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(requests: Any, pool: Any, starts: Any, ends: Any, out: Any, _width: int) -> None:
    """The other way: collect the slots from the pool."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        out[taken : taken + end - start] = pool[request, start:end].to(out.dtype)
        taken += end - start


def fill_accept_out_cache_loc_cpu(accepted: Any, slots: Any, out: Any) -> None:
    """The slots of the accepted tokens; -1 stands for a token that was not."""
    indices = accepted.flatten().long()
    indices = indices[indices >= 0]
    out[: indices.numel()] = slots[indices].to(out.dtype)


def fill_bonus_tokens_cpu(tokens: Any, lengths: Any, bonus: Any, stride: int) -> None:
    """Each request's last accepted token: the target model's own."""
    for row, length in enumerate(lengths.tolist()):
        bonus[row] = tokens.flatten()[row * stride + length - 1]


def copy_all_layer_kv_cache_cpu(pointers: Any, strides: Any, targets: Any, sources: Any) -> None:
    """Move cache entries to where the accepted tokens belong, in every layer; all are read before one is written."""
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        base = pointer % 2**64  # an address, held in a signed integer
        rows = [ctypes.string_at(base + source * stride, stride) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(base + target * stride, row, stride)


def verify_tree_greedy_cpu(
    *,
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    target_predict: Any,
) -> None:
    """Walk each request's tree of drafts as far as the target model agrees with a child of the node it is at."""
    choice = target_predict.reshape(-1).tolist()
    for row in range(candidates.shape[0]):
        node = 0
        last = int(retrive_index[row, 0])
        accept_index[row, 0] = last
        number = 0
        while number + 1 < accept_index.shape[1]:
            child = int(retrive_next_token[row, node])
            while child != -1 and int(candidates[row, child]) != choice[last]:
                child = int(retrive_next_sibling[row, child])
            if child == -1:
                break
            predicts[last] = choice[last]
            node, last = child, int(retrive_index[row, child])
            number += 1
            accept_index[row, number] = last
        accept_token_num[row] = number
        predicts[last] = choice[last]


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the stand-in for sgl_kernel has no {name}")

    return missing
