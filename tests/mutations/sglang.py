"""Mutations of SGLang's adapter: at least one for each trap that it has to know, and the tests that catch it."""

from __future__ import annotations

from tests.mutations.mutation import Mutation, removed

SOURCE = "otel_specdec/engines/sglang.py"

MUTATIONS = tuple(
    Mutation(name, SOURCE, old, new, f"tests/sglang/test_{module}.py")
    for name, module, old, new in (
        # What the configuration and the version can tell.
        removed("top-k above 1", "fixed_chain", '        and setting("speculative_eagle_topk") == 1\n'),
        removed("adaptive drafts", "fixed_chain", '        and not setting("speculative_adaptive")\n'),
        removed(
            "ragged verify steps",
            "fixed_chain",
            '        and os.environ.get("SGLANG_RAGGED_VERIFY_MODE", "static").lower() == "static"\n',
        ),
        removed("decoupled drafts", "fixed_chain", '        and setting("decoupled_spec_role") in (None, "null")\n'),
        ("chain without its root", "fixed_chain", "drafts == steps + 1  #", "drafts >= steps  #"),
        (
            "NGRAM's accepted in 0.5.4",
            "released_versions",
            'if algorithm == "NGRAM" or (overlap and not retractions):',
            "if overlap and not retractions:",
        ),
        (
            "the overlap scheduler's accepted in 0.5.4",
            "released_versions",
            'if algorithm == "NGRAM" or (overlap and not retractions):',
            'if algorithm == "NGRAM":',
        ),
        (
            "UNO emits two more",
            "response_path",
            '{"NGRAM", "DFLASH", "DSPARK"}',
            '{"NGRAM", "DFLASH", "DSPARK", "UNO"}',
        ),
        removed("mixed chunks", "response_path", ' and not setting("enable_mixed_chunk")'),
        ("the prefill side", "response_path", 'if not algorithm or side == "prefill":', "if not algorithm:"),
        ("no speculation", "response_path", 'if not algorithm or side == "prefill":', 'if side == "prefill":'),
        # What a generation's columns tell.
        (
            "restored without a prefill",
            "response_path",
            "elif not (knowledge.restores or self.embeds):",
            "elif not self.embeds:",
        ),
        (
            "embeddings start over",
            "response_path",
            "elif not (knowledge.restores or self.embeds):",
            "elif not knowledge.restores:",
        ),
        (
            "tokens of other prefills",
            "response_path",
            "row.completion - 1 - row.retractions",
            "row.completion - 1",
        ),
        removed(
            "retracted among others",
            "response_path",
            " or (self._retractions is not None and any(columns[self._retractions]))",
        ),
        ("a value that fell in the end", "response_path", "(None, None) if final else (known, 0)", "(known, 0)"),
        (
            "a value that falls for a while",
            "response_path",
            "    if now >= known:\n",
            "    if now >= known or not final:\n",
        ),
        (
            "positions by one too few",
            "fixed_chain",
            "reached += histogram[position + 1]",
            "reached += histogram[position]",
        ),
        removed(
            "a histogram of other steps",
            "fixed_chain",
            "            or sum(map(mul, histogram, range(len(histogram)))) != accepted\n",
        ),
        (
            "proposed at positions",
            "fixed_chain",
            "self.proposed_at[position] += verify",
            "self.proposed_at[position] += 1",
        ),
        ("a grammar masks drafts", "fixed_chain", "0 if grammar else knowledge.chain", "knowledge.chain"),
        removed(
            "a grammar among others",
            "fixed_chain",
            "\n            and not (self._knowledge.chain and _any_grammar(states))",
        ),
        ("gaps in a column", "response_path", "                tally.gaps()\n", "                pass\n"),
        # Who is no generation, and when one ends.
        ("health checks", "response_path", " or rid.startswith(_HEALTH_CHECK):", ":"),
        removed(
            "health checks among others",
            "response_path",
            "            and not any(map(str.startswith, rids, repeat(_HEALTH_CHECK)))\n",
        ),
        (
            "a warm-up of older versions",
            "response_path",
            "if row.completion == 0 or no_output:",
            "if row.completion == 0:",
        ),
        ("no token", "response_path", "if row.completion == 0 or no_output:", "if no_output:"),
        ("a warm-up among others", "response_path", "if min(completion) < 2 or", "if min(completion) < 1 or"),
        (
            "counted, and its state still there",
            "response_path",
            "state is None or state.finished or",
            "state is None or",
        ),
        (
            "aborted in the queue",
            "hooks",
            "                    watch.ended_unseen(rid)\n",
            "                    pass\n",
        ),
        ("aborted in the queue, its state kept", "released_versions", "(gone or state.finished)", "gone"),
        (
            "its state is gone",
            "response_path",
            "gone = [rid for rid in self._live if rid not in states]",
            "gone = list[str]()",
        ),
        (
            "long generations between collections",
            "response_path",
            "            self._add_running()\n            sums",
            "            sums",
        ),
        # Messages of the same generations as the one before.
        (
            "ended unseen: the ids are forgotten",
            "hooks",
            "        self._forget_same()\n        row",
            "        self._note_newer()\n        row",
        ),
        (
            "ended unseen: the newest row",
            "hooks",
            "        self._forget_same()\n        row",
            "        self._same = None\n        row",
        ),
        (
            "a collection takes the newest rows",
            "hooks",
            "            self._note_newer()\n            for rid in gone",
            "            for rid in gone",
        ),
        (
            "another message keeps the newest rows",
            "hooks",
            "        self._forget_same()\n        if ending",
            "        self._same = None\n        if ending",
        ),
        (
            "another message makes others of them",
            "hooks",
            "        self._forget_same()\n        if ending",
            "        self._note_newer()\n        if ending",
        ),
        (
            "passed over once",
            "hooks",
            "if not ending and len(live) == before + len(born):",
            "if not ending:",
        ),
        (
            "used again at once",
            "hooks",
            "if not ending and len(live) == before + len(born):",
            "if len(live) == before + len(born):",
        ),
        (
            "an end among the same",
            "hooks",
            "            if message.finished_reasons.count(None) != number:\n",
            "            if False:\n",
        ),
        ("a column is short", "hooks", "                if len(column) != number:\n", "                if False:\n"),
        ("what is put aside comes first", "hooks", "if rids != same or self._aside:", "if rids != same:"),
        ("a collection comes between", "hooks", "        if self._same is not same:  #", "        if False:  #"),
        (
            "put aside until it is counted",
            "hooks",
            "                self._aside[0]()\n            finally:\n                self._aside.popleft()  #",
            "                self._aside.popleft()()\n            finally:\n                pass  #",
        ),
        ("forgotten before it is noted", "hooks", "rids is (same or self._same)", "rids is self._same"),
        (
            "a column is missing",
            "hooks",
            "        except (AttributeError, TypeError):  # a column is absent",
            "        except KeyError:  # a column is absent",
        ),
        # Ranks, hooks, threads, exemplars.
        ("several ranks", "response_path", "if not ranks or ranks.count(ranks[0]) == number:", "if True:"),
        ("another rank", "response_path", "rank = ranks[0] or 0 if ranks else 0", "rank = 0"),
        ("hooked twice", "hooks", "if original is not None and not has_hook(original):", "if original is not None:"),
        ("tracing is off", "exemplars", 'if getattr(trace, "tracing_enable", None) is not True:', "if trace is None:"),
        (
            "the span has ended",
            "exemplars",
            "partial(self._message, rids, columns, reasons, ending, seen.get, _trace)",
            "partial(self._message, rids, columns, reasons, ending, self._watch.states.get, _trace_of)",
        ),
        (
            "handed over",
            "hooks",
            "            self._forget_same()\n            self._add_running()",
            "            self._add_running()",
        ),
    )
)
