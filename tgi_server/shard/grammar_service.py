"""The gRPC service that compiles grammars beside the steps of the engine, without delaying them."""

import logging
from concurrent.futures import Future

import grpc

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import GrammarServiceServicer
from tgi_server.engine.grammar import InvalidGrammar
from tgi_server.shard.errors import GrammarsBusy
from tgi_server.shard.grammar_queue import GrammarQueue
from tgi_server.wire import grammar_from_message

logger = logging.getLogger(__name__)

_SECONDS = 10.0


class GrammarService(GrammarServiceServicer):
    """Calls come in threads of their own: the event loop stands still while a step computes."""

    def __init__(self, queue: GrammarQueue | None) -> None:
        """queue: None where the model's folder has no tokenizer."""
        self._queue = queue

    def Compile(self, request: pb.CompileRequest, context: grpc.ServicerContext) -> pb.CompileResponse:
        """Answers a grammar that is not compiled in time with RESOURCE_EXHAUSTED: it may be soon."""
        if self._queue is None:
            return pb.CompileResponse(error="the model's folder has no tokenizer")
        gone: Future[None] = Future()
        context.add_callback(lambda: gone.set_result(None))
        try:
            self._queue.compile(grammar_from_message(request.grammar), _SECONDS, gone, tried=request.tried)
        except InvalidGrammar as error:
            return pb.CompileResponse(error=str(error))
        except GrammarsBusy as error:
            logger.warning("a grammar of %d bytes was not compiled: %s", len(request.grammar.value), error)
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return pb.CompileResponse()
