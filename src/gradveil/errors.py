"""The errors gradveil raises besides `ValueError` for a bad argument."""


class GradveilError(Exception):
    """Something gradveil refuses to go on with; the message says what to do."""


class WireError(GradveilError):
    """Bytes from the other side that are not a valid payload."""


class StateError(GradveilError):
    """A client's state does not fit its defense or its parameters."""


class NeedError(GradveilError):
    """A defense or an attack was not given something it needs."""


class GradientError(GradveilError):
    """A gradient that must not be sent: NaN, infinity, or a type the defense cannot handle."""


class GuardError(GradveilError):
    """The model handed to the client looks manipulated; no gradient is computed on it."""


class ConfigError(GradveilError):
    """A configuration, name or file the user gave cannot be used."""


class EngineError(GradveilError):
    """The other side of an engine broke off, or an engine is used in a way that cannot be protected."""
