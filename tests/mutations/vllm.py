"""Mutations of vLLM's adapter: at least one for each trap of counting steps together, all caught by one module."""

from __future__ import annotations

from tests.mutations.mutation import Mutation, removed

STEPS = "otel_specdec/engines/vllm.py"
CANDIDATES = "otel_specdec/engines/vllm_candidates.py"

MUTATIONS = tuple(
    Mutation(f"vllm: {name}", source, old, new, "tests/unit/test_vllm_steps.py")
    for name, source, old, new in (
        # What is an ordinary step.
        removed("invalid drafts", STEPS, '            and not getattr(step, "num_invalid_spec_tokens", None)\n'),
        removed(
            "padding of resumed",
            STEPS,
            '            and not getattr(step.scheduled_cached_reqs, "resumed_req_ids", None)\n',
        ),
        (
            "padding of new",
            STEPS,
            "not new or drafts.keys().isdisjoint(new)  # those are padding",
            "True",
        ),
        removed("not served", STEPS, "            and served == len(generated) == len(rows)\n"),
        removed("no tokens", STEPS, "            and 0 not in generated\n"),
        removed(
            "somebody ended",
            STEPS,
            "            and len(scheduler.finished_req_ids) == len(finished_before)\n",
        ),
        removed("somebody left", STEPS, "            and len(scheduler.running) == running\n"),
        removed(
            "the end of a turn",
            STEPS,
            "            and _lengths(output.sampled_token_ids) == generated\n",
        ),
        ("a candidate is away", STEPS, "            if self._places.complete:\n", "            if True:\n"),
        ("a candidate is away, others change", STEPS, "if alike and places.complete and", "if alike and"),
        ("a candidate came back", STEPS, " and not came_back and", " and"),
        ("a candidate has no tokens", STEPS, "not came_back and 0 not in generated:", "not came_back:"),
        removed("a session's next turn", STEPS, "            and request.request_id not in self._paused_sessions\n"),
        removed("sessions", STEPS, "            and not self._resumable  # see below\n"),
        (
            "sessions' turns",
            STEPS,
            "            and not (self._resumable and _somebody_stopped(parts))  # a turn may be over, also of who was"
            " preempted\n",
            "",
        ),
        ("a preempted session's turn", STEPS, "and not (self._resumable and _somebody", "and not (ended and _somebody"),
        # What is kept of it.
        removed("new ones have no drafts", STEPS, "                self._pairs[number, each] -= times\n"),
        removed("new ones have tokens", STEPS, "                self._pairs[0, each] += times\n"),
        removed("trimmed", STEPS, "        self._trims.update(zip(valid, got, out, strict=True))\n"),
        ("trimmed of the new", STEPS, "[0 if row in without else drafts", "[drafts"),
        ("trimmed of others", STEPS, "        if untrimmed != generated:\n", "        if False:\n"),
        ("ended by something else", STEPS, "        and 0 <= min(of_ended) <= max", "        and max"),
        removed("trimmed to nothing", STEPS, "        and all(map(went_out.__getitem__, of_ended))\n"),
        ("its list of ids", STEPS, "None if row_ids is None else list(row_ids)", "row_ids"),
        ("its dictionaries", STEPS, "dict(each) if isinstance(each, dict) else each", "each"),
        ("the order of rows", STEPS, "self._row_ids or sorted(rows, key=rows.__getitem__)", "list(rows)"),
        (
            "more than can be",
            STEPS,
            "        self._pairs.update((drafts, got) for got in tokens if got > drafts + 1)",
            "        pass",
        ),
        (
            "before what is put aside",
            STEPS,
            "                self._count_together(together)\n                together = []\n                each()\n",
            "                each()\n",
        ),
        (
            "too many places",
            STEPS,
            "len(self._line) >= _TOGETHER or self._places.crowded:",
            "len(self._line) >= _TOGETHER:",
        ),
        removed("aborted generations", STEPS, "        self._finished += len(aborted.generations)\n"),
        ("aborted before the first token", STEPS, "for request_id in aborted.request_ids:", "for request_id in ():"),
        (
            "the time of an abort",
            STEPS,
            "(aborted.generations, aborted.unix_nano)",
            "(aborted.generations, time.time_ns())",
        ),
        # Candidates.
        (
            "what was before it",
            CANDIDATES,
            "self._alike_drafts, len(self._alike), len(self._mixed))",
            "self._alike_drafts, 0, 0)",
        ),
        ("a carry", CANDIDATES, "together = max(1, 255 // most)", "together = 255"),
        ("more in a row than can be", CANDIDATES, ' or b"".join(some).translate(None, bytes(range(most + 1)))', ""),
        (
            "new places for what is in the log",
            CANDIDATES,
            "        self._add_all_up()\n        for place, followed",
            "        for place, followed",
        ),
        ("a place twice", CANDIDATES, "if request_id and request_id not in self._by_id:", "if request_id:"),
        (
            "who is not in the step",
            CANDIDATES,
            'tokens + b"\\0", rows))',
            "tokens, rows))",
        ),
        (
            "tokens without drafts",
            CANDIDATES,
            "emitted = sum(itertools.compress(tokens, drafts))",
            "emitted = sum(tokens)",
        ),
        (
            "drafts without tokens",
            CANDIDATES,
            "followed.proposed += sum(itertools.compress(drafts, tokens))",
            "followed.proposed += sum(drafts)",
        ),
        ("its first tokens", CANDIDATES, "                followed.completion = number\n", "                pass\n"),
        ("trimmed off it", CANDIDATES, "followed.completion -= trimmed", "pass"),
        (
            "trimmed off no verify step",
            CANDIDATES,
            "                if drafts[row] if isinstance(drafts, bytes) else row not in undrafted:\n",
            "                if True:\n",
        ),
        (
            "a place of nobody",
            CANDIDATES,
            "for request_id in self._by_id.keys() & request_ids:",
            "for request_id in ():",
        ),
    )
)
