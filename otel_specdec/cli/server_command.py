"""A server's command line, read and never run: what of it decides whether and how its engine is counted."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_INSTRUMENT = "opentelemetry-instrument"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass
class ServerCommand:
    """One command line.

    Attributes:
        words: what follows variables and wrappers. variables: those that it sets: in front, with `env`, and by the
            options of `opentelemetry-instrument`. instrumented: whether it runs under `opentelemetry-instrument`.
    """

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    instrumented: bool = False

    @classmethod
    def read(cls, words: Sequence[str]) -> ServerCommand:
        """Take a command line apart, as in `A=1 env B=2 opentelemetry-instrument --service_name x vllm serve MODEL`."""
        command = cls(list(words))
        while command.words:
            word = command.words[0]
            if match := _ASSIGNMENT.fullmatch(word):
                command.variables[match[1]] = match[2]
            elif os.path.basename(word) == _INSTRUMENT:
                command.instrumented = True
            elif command.instrumented and word.startswith("--"):
                name, given, value = word[2:].partition("=")
                if not given and len(command.words) > 1:
                    value = command.words.pop(1)
                # It finds the variable by the option's name without its prefix, of which there are two.
                for prefix in ("OTEL_", "OTEL_PYTHON_"):
                    command.variables[prefix + name.upper().replace("-", "_")] = value
            elif os.path.basename(word) not in ("env", "exec", "nohup"):
                break
            command.words.pop(0)
        # Behind a wrapper that we do not know, as in `uv run opentelemetry-instrument …`.
        command.instrumented |= any(os.path.basename(word) == _INSTRUMENT for word in command.words[:8])
        return command

    @property
    def engine(self) -> str | None:
        """`vllm` or `sglang`, where the command names one."""
        for word in self.words[:8]:
            name = os.path.basename(word).split(".")[0]
            if name in ("vllm", "sglang"):
                return name
        return None

    def option(self, *names: str) -> str | None:
        """The value of the last of these options (without dashes); `""` for one without value, None for none."""
        value: str | None = None
        for index, word in enumerate(self.words):
            if not word.startswith("--"):
                continue
            name, given, attached = word[2:].partition("=")
            if name.replace("_", "-") in names:
                following = self.words[index + 1] if index + 1 < len(self.words) else "--"
                value = attached if given else ("" if following.startswith("--") else following)
        return value

    def number(self, *names: str) -> int:
        """The value of an option that counts something; 1 where it is absent or no number."""
        value = self.option(*names)
        return int(value) if value and value.isdigit() else 1

    @property
    def speculates(self) -> bool | None:
        """Whether an option asks for speculative decoding; None where a configuration file may."""
        asking = {
            "vllm": ("-sc", "--speculative-config", "--spec-method", "--spec-model", "--spec-tokens"),
            "sglang": ("--speculative-algorithm", "--speculative-algo"),
        }[self.engine or "vllm"]
        options = {re.split(r"[=.]", word.replace("_", "-"))[0] for word in self.words}
        if options.intersection(asking):
            return True
        return None if "--config" in options else False
