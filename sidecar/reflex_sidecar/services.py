"""What every route needs, in one place; made once in serve.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from reflex_protocol.messages import GenerateFinal, ScoreFinal

from .errors import ApiError, unavailable
from .metrics import Metrics
from .options import Options
from .rendering.renderer import Renderer
from .supervise import Facts, Supervisor
from .turns import Turns


@dataclass
class LastRequest:
    """What the page shows of the latest answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    timings: dict[str, float] = field(default_factory=dict)


@dataclass
class Services:
    """Shared by all requests."""

    options: Options
    supervisor: Supervisor
    renderer: Renderer
    turns: Turns
    metrics: Metrics
    log: Callable[[str], None]
    started_unix: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    active: int = 0  # HTTP requests being answered
    launch: dict[str, float] = field(default_factory=dict)  # phases of our own start, milliseconds
    last: LastRequest = field(default_factory=LastRequest)

    @property
    def facts(self) -> Facts:
        """The model's."""
        return self.supervisor.facts

    @property
    def model_id(self) -> str:
        """As /v1/models lists it."""
        return self.options.model_id

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: what answers would change with."""
        return f"reflex-{self.facts.architecture or 'none'}"

    @property
    def ready(self) -> bool:
        """Whether new requests are taken."""
        return self.supervisor.state == "ready" and not self.draining

    def not_ready(self) -> ApiError:
        """Why there is no worker for a request now."""
        if self.draining or self.supervisor.state == "draining":
            return unavailable("the server is shutting down", code="draining")
        if self.supervisor.state == "gone":
            return unavailable("the worker is gone", code="worker_gone")
        return unavailable("the model is loading", code="loading")

    def note_final(self, final: GenerateFinal | ScoreFinal) -> None:
        """Remember the latest answer's figures."""
        usage = final.usage
        self.last = LastRequest(usage.prompt_tokens, usage.completion_tokens, dict(final.timings))
