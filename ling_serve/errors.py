"""Every error this project raises on purpose.

    LingServeError                     500  server_error
    ├── ConfigError                         a flag or setting; the process exits 2
    ├── CheckpointError                     a checkpoint that cannot be served; the process exits 1
    │   ├── ConfigFieldError                one field of config.json: name, value, expectation
    │   ├── UnsupportedCheckpoint           another architecture, format or quantisation
    │   └── WeightsError                    tensors missing, left over, misshapen or damaged
    ├── RequestError                   400  invalid_request_error
    │   ├── UnsupportedParameter       400  code unsupported_parameter
    │   ├── ContextLengthExceeded      400  code context_length_exceeded
    │   ├── AuthenticationError        401  code invalid_api_key
    │   ├── ModelNotFound              404  code model_not_found
    │   └── QueueFull                  429  code queue_full, with Retry-After
    ├── NotReady                       503  the model is still loading
    ├── ShuttingDown                   503  the server was told to end
    ├── EngineDead                     503  the engine stopped after an internal error
    ├── NotFinite                      500  the model's numbers for one request left the range of its dtype
    └── InvariantViolated              500  a bug here: the caches can no longer be trusted

A message names the offending value, what was expected, and what to change.
"""

from __future__ import annotations

from typing import Any, ClassVar


class LingServeError(Exception):
    """Base of the tree. `status` is the HTTP status an API client sees."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code

    def body(self) -> dict[str, dict[str, Any]]:
        """The OpenAI error body: `{"error": {message, type, param, code}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class ConfigError(LingServeError):
    """A flag or setting is unknown, malformed or contradicts another."""


class CheckpointError(LingServeError):
    """The checkpoint on disk cannot be served."""


class ConfigFieldError(CheckpointError):
    """A field of config.json is missing, malformed or unsupported."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        shown = "missing" if value is MISSING else f"{value!r}"
        super().__init__(f"config.json: {field} is {shown}; expected {expected}", param=field)
        self.field = field
        self.value = value
        self.expected = expected


class UnsupportedCheckpoint(CheckpointError):
    """The checkpoint is of an architecture, format or quantisation that is not served."""


class WeightsError(CheckpointError):
    """Tensors are missing, left over, misshapen or damaged."""


class RequestError(LingServeError):
    status = 400
    type = "invalid_request_error"


class UnsupportedParameter(RequestError):
    default_code = "unsupported_parameter"


class ContextLengthExceeded(RequestError):
    default_code = "context_length_exceeded"


class AuthenticationError(RequestError):
    status = 401
    default_code = "invalid_api_key"


class ModelNotFound(RequestError):
    status = 404
    default_code = "model_not_found"


class UnknownRoute(RequestError):
    status = 404


class MethodNotAllowed(RequestError):
    status = 405


class BodyTooLarge(RequestError):
    status = 413
    default_code = "request_too_large"


class UnsupportedMediaType(RequestError):
    status = 415


class QueueFull(RequestError):
    status = 429
    type = "rate_limit_error"
    default_code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReady(LingServeError):
    status = 503
    default_code = "not_ready"


class ShuttingDown(LingServeError):
    status = 503
    default_code = "shutting_down"


class EngineDead(LingServeError):
    status = 503
    default_code = "engine_dead"


class NotFinite(LingServeError):
    """The model computed NaN or infinity for one request; the others are not affected."""

    default_code = "not_finite"


class InvariantViolated(LingServeError):
    """An internal law was broken; serving on could give wrong answers."""


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()
"""Marks an absent field in a `ConfigFieldError`, since `None` is a value."""
