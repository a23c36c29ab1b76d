"""Requests made up from the server's own description: nothing it accepts or refuses is a 5xx."""

from __future__ import annotations

import pytest
from conftest import Server

schemathesis = pytest.importorskip("schemathesis", reason="run.sh installs it")

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES_PER_ROUTE = 60


def test_no_body_makes_the_server_fail(server: Server):
    from hypothesis import HealthCheck, given, settings

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    n_routes = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        n_routes += 1
        kinds = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
        for kind in kinds:

            @given(case=operation.as_strategy(generation_mode=kind))
            @settings(
                max_examples=EXAMPLES_PER_ROUTE,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            def attempt(case):
                response = case.call(base_url=server.url, timeout=60)
                assert response.status_code < 500 or response.status_code == 503, response.text
                if response.status_code >= 400 and response.headers["content-type"] == "application/json":
                    assert isinstance(response.json()["error"]["code"], str)

            try:
                attempt()
            except Exception as e:
                if "Unsatisfiable" in type(e).__name__ or "cannot" in str(e).lower():
                    continue
                raise
    assert n_routes > 15
