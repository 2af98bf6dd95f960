# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`POST /expert_profile/dump`: write the expert profile now."""

from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from vllm.logger import init_logger

logger = init_logger(__name__)

router = APIRouter()


@router.post("/expert_profile/dump")
async def dump_expert_profile(raw_request: Request) -> JSONResponse:
    """Add what was counted since the last write to `--expert-profile-out`.

    Returns:
        `{"path": …, "tokens_prefill": …, "tokens_decode": …}`, the tokens added by all
        engines; status 500 with `{"error": …}` if the file could not be written.

    """
    path = raw_request.app.state.args.expert_profile_out
    engine_core = raw_request.app.state.engine_client.engine_core
    try:
        added = await engine_core.call_utility_all_async("dump_expert_profile")
    except Exception as error:
        logger.exception("Expert profile %s was not written", path)
        return JSONResponse(
            {"error": str(error)}, status_code=HTTPStatus.INTERNAL_SERVER_ERROR
        )
    totals = {key: sum(engine[key] for engine in added) for key in added[0]}
    return JSONResponse({"path": path} | totals)


def attach_router(app: FastAPI) -> None:
    """Add the endpoint to a server that records a profile."""
    if getattr(app.state.args, "expert_profile_out", None) is not None:
        app.include_router(router)
