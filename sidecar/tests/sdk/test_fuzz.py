"""Requests made up from the server's own description: nothing that is sent makes it fail."""

from __future__ import annotations

from typing import Any

import pytest
from servers import Server

schemathesis = pytest.importorskip("schemathesis", reason="run.sh installs it")

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = 60  # of bodies that fit the description, and of bodies that do not, for each route


def test_no_request_makes_the_server_fail(server: Server):
    from hypothesis import HealthCheck, given, settings

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    sent: dict[str, int] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        kinds = [schemathesis.GenerationMode.POSITIVE]
        if operation.body:
            kinds.append(schemathesis.GenerationMode.NEGATIVE)
        for kind in kinds:

            @given(case=operation.as_strategy(generation_mode=kind))
            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            def attempt(case: Any) -> None:
                response = case.call(base_url=server.url, timeout=60)
                sent[case.path] = sent.get(case.path, 0) + 1
                assert response.status_code < 500, (case.path, response.text)
                if response.status_code >= 400:
                    error = response.json()["error"]
                    assert isinstance(error["code"], str) and isinstance(error["message"], str)

            attempt()
    bodies = [n for path, n in sent.items() if path in ("/v1/chat/completions", "/v1/systemone", "/tokenize")]
    assert len(sent) > 15 and len(bodies) == 3 and all(n > EXAMPLES for n in bodies)
