"""What bench.overhead compares with in the same run: the least that a proxy on aiohttp can do.

It reads the body, sends it on and passes the answer back as it comes. It knows nothing of prompts,
tenants, limits or errors.
"""

from __future__ import annotations

import argparse
import asyncio

import aiohttp
import uvloop
from aiohttp import web


async def serve(port: int, engine: str) -> None:
    """Until it is killed."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            if request.method == "GET":
                return web.Response()
            body = await request.read()
            headers = {"Content-Type": "application/json"}
            async with session.post(engine + request.path, data=body, headers=headers) as upstream:
                content_type = upstream.headers["Content-Type"]
                response = web.StreamResponse(headers={"Content-Type": content_type})
                await response.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
            await response.write_eof()
            return response

        loop = asyncio.get_running_loop()
        server = await loop.create_server(web.Server(answer, access_log=None), "127.0.0.1", port)
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.bare_proxy")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", required=True, help="its URL")
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.engine))
